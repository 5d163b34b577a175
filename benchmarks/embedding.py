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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import sbp
from benchmarks.versus_jax import Loop, median_ratio
from sbp import B, S
from sbp.runtime.embedding.collection import Collection
from sbp.runtime.embedding.optimizers import rowwise_adagrad
from sbp.runtime.embedding.stacks import lookup
from sbp.runtime.embedding.tables import FeatureConfig, TableConfig
from sbp.runtime.look.meter import Meter, read_compiled
from sbp.talk.keys import NO_KEY

DEVICES, RATE, ZIPF = 8, 0.05, 1.2
TURN_SECONDS, LEAST_TURNS = 0.5, 4
MOST_GATHERED = 1 << 18
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: optax.sgd(RATE),
    "row-wise Adagrad": lambda: rowwise_adagrad(RATE),
}
# From table, state, places and rows to table and state.
HandUpdate = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Problem:
    """What is trained.

    Arguments:
      rows, width: of the table.
      batch: keys.
    """

    rows: int
    width: int
    batch: int

    @property
    def chunk(self) -> int:
        """Rows of one device."""
        return self.rows // DEVICES

    def batches(self) -> tuple[Any, Any]:
        """Ids and what is wanted of them, on the host."""
        rng = np.random.default_rng(0)
        weight = np.cumsum(np.arange(1, self.rows + 1, dtype=np.float64) ** -ZIPF)
        ranks = np.searchsorted(weight, rng.random(self.batch) * weight[-1])
        ids = rng.permutation(self.rows)[np.minimum(ranks, self.rows - 1)]
        return ids.astype(np.int32), rng.normal(size=(self.batch, 1)).astype(np.float32)

    def sharded(self, mesh: Any) -> tuple[NamedSharding, NamedSharding]:
        """Split along dim 0, and whole."""
        return NamedSharding(mesh, PartitionSpec(*mesh.axis_names)), NamedSharding(mesh, PartitionSpec())

    def start(self, tx: Any, mesh: Any) -> tuple[Any, Any]:
        """Parameters and the optimizer's state, on the devices."""
        split, whole = self.sharded(mesh)

        def init() -> Any:
            at = lax.broadcasted_iota(np.int32, (self.rows, self.width), 0)
            table = ((at + 7 * lax.broadcasted_iota(np.int32, at.shape, 1)) % 1013) / np.float32(1013) - 0.5
            params = {"table": table, "dense": jnp.full((self.width, 1), 0.1, np.float32)}
            return params, tx.init(table)

        states = jax.tree.map(lambda _: split, jax.eval_shape(init)[1])
        return jax.jit(init, out_shardings=({"table": split, "dense": whole}, states))()

    def ideal_bytes(self, ids: Any) -> float:
        """What a device must send on average: keys of rows that others own, and vectors there and back."""
        parts = [(d, np.unique(part)) for d, part in enumerate(np.split(ids, DEVICES))]
        away = sum(int(np.count_nonzero(keys // self.chunk != d)) for d, keys in parts)
        return away / DEVICES * (4 + 2 * 4 * self.width)

    def room(self, ids: Any) -> int:
        """The most keys that one device sends to one owner."""
        parts = [np.unique(part) // self.chunk for part in np.split(ids, DEVICES)]
        return max(int(np.bincount(p).max()) for p in parts)


def loss_of(rows: Any, dense: Any, wanted: Any) -> Any:
    """A dense layer and a sum of squares: a device's part adds up to the whole."""
    return jnp.square(rows @ dense - wanted).sum()


def make_step(tx: Any) -> Callable[..., Any]:
    """The step as one writes it for one device."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            rows = lookup(params["table"], batch[0])
            return loss_of(rows, params["dense"], batch[1]) / len(batch[0])

        value, grad = jax.value_and_grad(loss)(params)
        added, state = tx.update(grad["table"], state, params["table"])
        table = optax.apply_updates(params["table"], added)
        return {"table": table, "dense": params["dense"] - RATE * grad["dense"]}, state, value

    return step


def split_step(body: Callable[..., Any], tx: Any, mesh: Any) -> Any:
    """A step from the body of a shard_map: parameters, state, keys and what is wanted, of one device."""
    split, whole = PartitionSpec(*mesh.axis_names), PartitionSpec()
    params = {"table": split, "dense": whole}
    state = jax.tree.map(lambda _: split, jax.eval_shape(tx.init, jax.ShapeDtypeStruct((8, 1), np.float32)))
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(params, state, split), out_specs=(params, state, whole), check_vma=False
    )
    return jax.jit(mapped, donate_argnums=(0, 1))


def gathering(problem: Problem, tx: Any, axis: str) -> Callable[..., Any]:
    """The body that gathers the table; its gradient is a reduce-scatter."""

    def body(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            whole = lax.all_gather(params["table"], axis, tiled=True)
            return loss_of(whole[batch[0]], params["dense"], batch[1]) / problem.batch

        value, grad = jax.value_and_grad(loss)(params)
        value, dense = lax.psum((value, grad["dense"]), axis)
        added, state = tx.update(grad["table"], state, params["table"])
        return {"table": params["table"] + added, "dense": params["dense"] - RATE * dense}, state, value

    return body


def sgd_by_hand(table: Any, state: Any, at: Any, rows: Any) -> tuple[Any, Any]:
    """Rows with the same place add up by themselves."""
    return table.at[at].add(-RATE * rows, mode="drop", wrap_negative_indices=False), state


def adagrad_by_hand(table: Any, state: Any, at: Any, rows: Any) -> tuple[Any, Any]:
    """Sums by place, then the rows of table and state written once."""
    count = at.shape[0]
    at, order = lax.sort((at, lax.iota(np.int32, count)), num_keys=1)
    new = jnp.concatenate([jnp.ones(1, bool), at[1:] != at[:-1]])
    ranks = jnp.cumsum(new, dtype=np.int32) - 1
    sums = jax.ops.segment_sum(rows[order], ranks, count, indices_are_sorted=True)
    # Places of sums that are none lie behind the shard, all different.
    beyond = table.shape[0] + lax.iota(np.int32, count)
    once = beyond.at[ranks].set(jnp.where(at < table.shape[0], at, beyond))
    added, total = rowwise_adagrad(RATE).update(sums, state.at[once].get(mode="fill", fill_value=1))
    flags: dict[str, Any] = {"mode": "drop", "unique_indices": True, "wrap_negative_indices": False}
    return table.at[once].add(added, **flags), state.at[once].set(total, **flags)


BY_HAND: dict[str, HandUpdate] = {"SGD": sgd_by_hand, "row-wise Adagrad": adagrad_by_hand}


def exchanging(problem: Problem, update: HandUpdate, room: int, axis: str) -> Callable[..., Any]:
    """The body with a sparse exchange by hand.

    Arguments:
      room: keys that a device can send to one owner; more are lost.
    """
    send = partial(lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0, tiled=True)
    bounds = np.arange(DEVICES + 1, dtype=np.int32) * np.int32(problem.chunk)

    def body(params: Any, state: Any, batch: Any) -> Any:
        (ids, wanted), table = batch, params["table"]
        count = ids.shape[0]
        ordered, order = lax.sort((ids, lax.iota(np.int32, count)), num_keys=1)
        new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
        ranks = jnp.cumsum(new, dtype=np.int32) - 1
        keys = jnp.full(count, NO_KEY).at[ranks].set(ordered, indices_are_sorted=True)
        starts = jnp.searchsorted(keys, bounds).astype(np.int32)
        window = starts[:-1, None] + lax.iota(np.int32, room)
        there = window < starts[1:, None]
        asked = send(jnp.where(there, keys.at[window].get(mode="clip"), NO_KEY)).reshape(-1)
        at = jnp.where(asked == NO_KEY, problem.chunk, asked - lax.axis_index(axis) * problem.chunk)
        served = table.at[at].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        back = send(served.reshape(DEVICES, room, -1)).reshape(DEVICES * room, -1)
        # Examples in the order of their keys: the loss is a sum, and needs no other.
        owner = ordered // problem.chunk
        rows = back[owner * room + ranks - starts[owner]]
        value, (grad, dense) = jax.value_and_grad(loss_of, (0, 1))(rows, params["dense"], wanted[order])
        sums = jax.ops.segment_sum(grad / problem.batch, ranks, count, indices_are_sorted=True)
        away = jnp.where(there[..., None], sums.at[window].get(mode="clip"), 0)
        came = send(away).reshape(DEVICES * room, -1)
        value, dense = lax.psum((value / problem.batch, dense / problem.batch), axis)
        table, state = update(table, state, at, came)
        return {"table": table, "dense": params["dense"] - RATE * dense}, state, value

    return body


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
