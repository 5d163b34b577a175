"""One training step of a table that eight devices share, against what one would write in plain JAX.

    python -m benchmarks.embedding [--rows 1e6] [--width 64] [--batch 16384] [--sizes 1e6,4e6,16e6]
                                   [--seconds 20] [--json FILE]

The step looks up one row per example, puts a dense layer and a loss on it, and updates the rows. Keys are
Zipf 1.2 and dealt out to rows at random, as hashing does. Every step has the same batch. Interleaved in one
process:

- sbp: the table is split by rows, the optimizer is lazy;
- sbp again: its A/A twin, which shows what the machine's noise alone does;
- jit: `jax.jit`, the table sharded by a NamedSharding, a dense gradient and update;
- gather: a `shard_map` that gathers the table, which only small tables allow (`MOST_GATHERED`);
- by hand: a `shard_map` with a sparse exchange: keys are deduplicated on each device, buckets have the room
  that sbp plans for this batch and no further rounds, so other batches would lose keys; rows are updated in
  place, and keys are not sent a second time with the gradients.

After the first step the rows of the batch are compared. Wire bytes are read from the compiled HLO, without
the rounds that run only if a bucket overflows; the ideal is the distinct keys of each device that others own,
and their vectors there and back. Then: the time over sizes of the table, and the exchanges of 26 tables in
one `Collection`.

The kinds take turns of `TURN_SECONDS` each; a turn counts as the median of its steps but the first. A step
finds caches and cores as the one before has left them, and in a training loop that is one of its own kind.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sbp
from benchmarks.embedding_steps import (
    BY_HAND,
    DEVICES,
    MOST_GATHERED,
    OPTIMIZERS,
    RATE,
    Problem,
    exchanging,
    gathering,
    make_step,
    split_step,
)
from benchmarks.versus_jax import Loop, median_ratio
from sbp import B, S
from sbp.runtime.embedding.collection import Collection
from sbp.runtime.embedding.optimizers import rowwise_adagrad
from sbp.runtime.embedding.tables import FeatureConfig, TableConfig
from sbp.runtime.hlo.meter import Meter, read_compiled

TURN_SECONDS, LEAST_TURNS = 0.5, 4


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of step; ratios are medians over neighbours in time, to sbp's own."""

    optimizer: str
    rows: int
    kind: str
    seconds: float
    ratio: float
    wire_bytes: float
    all_to_alls: int
    difference: float


class Contest:
    """The steps of one optimizer on one table, each with a table of its own."""

    def __init__(self, problem: Problem, optimizer: str, kinds: Sequence[str]) -> None:
        self.problem, self.optimizer, self.kinds = problem, optimizer, tuple(kinds)
        self.placement = sbp.placement("cpu", shape=(DEVICES,))
        self.batch = problem.batches()
        made = [self.made(kind) for kind in kinds]
        self.meters = [meter for _, meter in made]
        self.loops = [loop for loop, _ in made]
        for loop in self.loops:
            loop.advance()
        self.differences = [self.difference(loop) for loop in self.loops]

    def made(self, kind: str) -> tuple[Loop, Meter]:
        """A loop, and the meter of its program."""
        tx, mesh = OPTIMIZERS[self.optimizer](), self.placement.mesh
        split, whole = self.problem.sharded(mesh)
        (axis,) = mesh.axis_names
        args = (*self.problem.start(tx, mesh), jax.device_put(self.batch, split))
        if kind.startswith("sbp"):
            program = sbp.compile(
                make_step(sbp.rows(tx)),
                self.placement,
                in_sbp=({"table": [S(0)], "dense": [B]}, [S(0)], [S(0)]),
                donate_argnums=(0, 1),
            )
            args = program.place(*args)
            return Loop(program, args), read_compiled(program.lower(*args).compile())
        if kind == "jit":
            params = {"table": split, "dense": whole}
            states = jax.tree.map(lambda _: split, args[1])
            results = params, states, whole
            step = jax.jit(make_step(tx), out_shardings=results, donate_argnums=(0, 1))
        elif kind == "gather":
            step = split_step(gathering(self.problem, tx, axis), tx, mesh)
        else:
            room = self.problem.room(self.batch[0])
            step = split_step(exchanging(self.problem, BY_HAND[self.optimizer], room, axis), tx, mesh)
        return Loop(step, args), read_compiled(step.lower(*args).compile())

    def difference(self, loop: Loop) -> float:
        """How far the looked-up rows of a loop are from those of the first one."""
        first, own = (np.asarray(x.args[0]["table"][self.batch[0]]) for x in (self.loops[0], loop))
        return float(np.abs(first - own).max())

    def results(self, times: Sequence[Sequence[float]]) -> list[Measured]:
        """A row for each kind."""
        return [
            Measured(
                self.optimizer,
                self.problem.rows,
                kind,
                statistics.median(own),
                median_ratio(own, times[0]),
                meter.wire_bytes,
                meter.by_kind().get("all_to_all", (0, 0.0))[0],
                difference,
            )
            for kind, own, meter, difference in zip(
                self.kinds, times, self.meters, self.differences, strict=True
            )
        ]


def in_turns(loops: Sequence[Loop], seconds: float) -> list[list[float]]:
    """Advances all loops by turns, in a random order each time; the median step of every turn of each."""
    order, began, turns = random.Random(0), time.perf_counter(), 0
    kept: dict[int, list[float]] = {id(loop): [] for loop in loops}
    while turns < 1 + LEAST_TURNS or time.perf_counter() - began < seconds:
        for loop in order.sample(loops, len(loops)):
            first, start = len(loop.seconds), time.perf_counter()
            while len(loop.seconds) < first + 3 or time.perf_counter() - start < TURN_SECONDS:
                loop.advance()
            kept[id(loop)].append(statistics.median(loop.seconds[first + 1 :]))
        turns += 1
    return [kept[id(loop)][1:] for loop in loops]


def compare(problem: Problem, optimizer: str, seconds: float) -> list[Measured]:
    """All kinds of steps on one table."""
    kinds = ["sbp", "sbp again", "jit", "by hand"]
    kinds += ["gather"] if problem.rows <= MOST_GATHERED else []
    contest = Contest(problem, optimizer, kinds)
    return contest.results(in_turns(contest.loops, seconds))


def sizes(problems: Sequence[Problem], seconds: float) -> list[Measured]:
    """Our step with SGD on tables of several sizes, interleaved; ratios are to the first."""
    contests = [Contest(p, "SGD", ["sbp"]) for p in problems]
    times = in_turns([loop for c in contests for loop in c.loops], seconds)
    found = [c.results([own])[0] for c, own in zip(contests, times, strict=True)]
    return [replace(m, ratio=median_ratio(own, times[0])) for m, own in zip(found, times, strict=True)]


def many_tables(tables: int, problem: Problem) -> tuple[int, int]:
    """All-to-alls of the first rounds of a forward pass over tables of one width, and of what follows it."""
    each = problem.rows // tables
    configs = [TableConfig(f"t{i}", each, problem.width) for i in range(tables)]
    features = [FeatureConfig(f"f{i}", table) for i, table in enumerate(configs)]
    collection = Collection(features, multiple=DEVICES)
    line = sbp.placement("cpu", shape=(DEVICES,))
    tx = sbp.rows(rowwise_adagrad(RATE))
    params = collection.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    inputs = {
        f.name: rng.integers(
            0, f.table.vocabulary_size, problem.batch // tables // DEVICES * DEVICES, np.int32
        )
        for f in features
    }

    def forward(params: Any, inputs: Any) -> Any:
        return sum(jnp.square(v).mean() for v in collection(params, inputs).values())

    def step(params: Any, state: Any, inputs: Any) -> Any:
        value, grads = jax.value_and_grad(forward)(params, inputs)
        added, state = tx.update(grads, state, params)
        return optax.apply_updates(params, added), state, value

    in_sbp = collection.in_sbp(line)
    once = sbp.compile(forward, line, in_sbp=(in_sbp, [S(0)])).lower(params, inputs)
    whole = sbp.compile(step, line, in_sbp=(in_sbp, sbp.AUTO, [S(0)]))
    both = (once, whole.lower(params, tx.init(params), inputs))
    meters = [read_compiled(lowered.compile()) for lowered in both]
    ahead, all_ = (m.by_kind().get("all_to_all", (0, 0.0))[0] for m in meters)
    return ahead, all_ - ahead


def table(rows: Sequence[Measured]) -> str:
    """The rows as Markdown."""
    head = "| optimizer | rows | step | ms | ratio | wire MB | all-to-alls | largest difference |"
    lines = [head, "|" + "---|" * 8]
    lines += [
        f"| {m.optimizer} | {m.rows:,} | {m.kind} | {m.seconds * 1e3:.1f} | {m.ratio:.2f} | "
        f"{m.wire_bytes / 1e6:.3f} | {m.all_to_alls} | {m.difference:.1e} |"
        for m in rows
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.embedding", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=1e6)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16384)
    parser.add_argument("--sizes", default="1e6,4e6,16e6", help="rows of tables whose times are compared")
    parser.add_argument("--seconds", type=float, default=20, help="of timed steps per table of figures")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", DEVICES)

    def problem(rows: str | float) -> Problem:
        return Problem(
            int(float(rows)) // DEVICES * DEVICES, options.width, options.batch // DEVICES * DEVICES
        )

    one = problem(options.rows)
    ids, _ = one.batches()
    distinct = [np.unique(part).size for part in np.split(ids, DEVICES)]
    print(f"jax {jax.__version__}; {one}; distinct keys of a device: {min(distinct)} to {max(distinct)}")
    print(f"ideal: {one.ideal_bytes(ids) / 1e6:.3f} MB per device and step")
    if one.rows > MOST_GATHERED:
        print(f"left out: gather, for tables of more than {MOST_GATHERED} rows")
    rows = [m for name in OPTIMIZERS for m in compare(one, name, options.seconds)]
    print(f"\n{table(rows)}\n", flush=True)
    larger = sizes([problem(n) for n in options.sizes.split(",")], options.seconds) if options.sizes else []
    print(f"{table(larger)}\n", flush=True)
    ahead, behind = many_tables(26, problem(min(options.rows, 1e5)))
    print(f"26 tables of one width: {ahead} all-to-alls forward, {behind} backward")
    if options.json:
        with open(options.json, "w") as f:
            json.dump([asdict(m) for m in (*rows, *larger)], f, indent=1)


if __name__ == "__main__":
    main()
