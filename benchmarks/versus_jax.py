"""The same train step through `jax.jit` with NamedShardings and through sbp, interleaved in one process.

    python -m benchmarks.versus_jax [--rows gpt/data:8,gpt@12/zero:8,...] [--seconds 20] [--json FILE]

A row is a model (`@` its layers), a parallelism and a placement. Per row: wire bytes per device and step
(from the compiled HLO of both, by the same meter), number of collectives, step time as a ratio of medians
with its A/A twin (the peer against a second copy of itself, which shows what the machine's noise alone does),
compile time (from the Python function to the executable), and temporary memory. The last column is what AUTO
needs if bytes are all that counts and the batch alone is annotated. The peer of the row "auto" is data
parallel: jit has no AUTO.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

import sbp
from benchmarks.cases import CASES, Case
from sbp.hardware.catalogue import BYTES_ONLY
from sbp.notation.resolve import resolve, to_partition_spec
from sbp.runtime.hlo.meter import Meter, read_compiled

ROWS = (
    "gpt/data:8,gpt/tensor:8,gpt/2d:2x4,gpt/2d:2x2x2,gpt/zero1:8,gpt/zero2:8,gpt/zero:8,gpt/sequence:8,gpt/auto:8,"
    "gpt@12/data:8,gpt@12/tensor:8,gpt@12/2d:2x4,gpt@12/zero1:8,gpt@12/zero:8,gpt@12/auto:8,"
    "mlp/data:8,mlp/tensor:8,mlp/zero1:8,mlp/zero:8,classifier/classes:8,"
    "flax/data:8,flax/zero:8,equinox/data:8,equinox/zero:8"
)
WARM_STEPS, LEAST_STEPS, MOST_STEPS = 3, 8, 100


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of the table; `jit_` is the peer, bytes are per device and step."""

    row: str
    jit_wire_bytes: float
    wire_bytes: float
    plan_wire_bytes: float
    jit_collectives: int
    collectives: int
    jit_compile_seconds: float
    compile_seconds: float
    jit_temporary_bytes: float
    temporary_bytes: float
    jit_step_seconds: float
    step_ratio: float
    noise_ratio: float
    gap: float
    auto_wire_bytes: float

    @property
    def byte_ratio(self) -> float:
        """Our bytes as a share of the peer's."""
        return self.wire_bytes / self.jit_wire_bytes if self.jit_wire_bytes else math.nan


def peer_shardings(case: Case, args: Any, placement: sbp.Placement, mesh: Mesh) -> Any:
    """The NamedShardings over a mesh of a placement that say the same as the case's signatures."""
    flat, tree = jax.tree.flatten(args)
    sbps, problems = resolve(
        case.peer_sbp or case.in_sbp, args, ["argument"] * len(flat), placement, "in_sbp"
    )
    assert not problems, problems
    whole = (sbp.B,) * placement.ndim  # AUTO is the peer's to choose too, but jit has no such choice
    named = [
        NamedSharding(mesh, to_partition_spec(nd or whole, jnp.ndim(x), placement))
        for nd, x in zip(sbps, flat, strict=True)
    ]
    return jax.tree.unflatten(tree, named)


def peer_of(case: Case, args: Any, placement: sbp.Placement, mesh: Mesh) -> tuple[Any, Any]:
    """The case's step through `jax.jit`, and the shardings of its arguments."""
    named = peer_shardings(case, args, placement, mesh)
    step = case.peer_step(mesh, placement) if case.peer_step else case.step
    return jax.jit(step, in_shardings=named, out_shardings=(*named[:2], None), donate_argnums=(0, 1)), named


def compiled(lower: Callable[..., Any], args: Any) -> tuple[Any, float]:
    """The executable and the seconds from the Python function to it: tracing, planning, lowering, XLA."""
    start = time.perf_counter()
    return lower(*args).compile(), time.perf_counter() - start


class Loop:
    """A training loop that is advanced one timed step at a time."""

    def __init__(self, step: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.step, self.args = step, args
        self.seconds: list[float] = []

    def advance(self) -> None:
        """One step, timed until its results are there."""
        start = time.perf_counter()
        params, state, loss = self.step(*self.args)
        jax.block_until_ready((params, state, loss))
        self.seconds.append(time.perf_counter() - start)
        self.args = params, state, *self.args[2:]


def interleave(loops: Sequence[Loop], seconds: float) -> list[list[float]]:
    """Advances all loops in turn, in a random order each time; returns the timed steps of each."""
    order = random.Random(0)
    start, rounds = time.perf_counter(), 0
    while rounds < WARM_STEPS + MOST_STEPS:
        for loop in order.sample(loops, len(loops)):
            loop.advance()
        rounds += 1
        if rounds == WARM_STEPS:
            start = time.perf_counter()
        if rounds >= WARM_STEPS + LEAST_STEPS and time.perf_counter() - start > seconds:
            break
    return [loop.seconds[WARM_STEPS:] for loop in loops]


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """The median over steps of the ratio of neighbours in time."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def parse(row: str) -> tuple[str, int, str, tuple[int, ...]]:
    """Model, layers, parallelism and placement shape of a row such as "gpt@12/2d:2x4"."""
    model, _, rest = row.partition("/")
    name, _, layers = model.partition("@")
    choice, _, shape = rest.partition(":")
    return name, int(layers or 2), choice, tuple(map(int, shape.split("x")))


def measure(row: str, seconds: float, *, auto: bool = True) -> Measured:
    """One row; `auto`: with its last column, for which the step is planned once more."""
    model, layers, choice, shape = parse(row)
    placement = sbp.placement("cpu", shape=shape)
    case = CASES[model](choice, shape, layers)
    args = case.make()
    peer, named = peer_of(case, args, placement, placement.mesh)
    program = sbp.compile(case.step, placement, in_sbp=case.in_sbp, donate_argnums=(0, 1))
    jax.clear_caches()  # the first to trace would pay for what both share
    peer_exe, peer_seconds = compiled(peer.lower, args)
    jax.clear_caches()
    exe, own_seconds = compiled(program.lower, args)
    plan = program.plan(*args)
    theirs, ours = read_compiled(peer_exe), read_compiled(exe)
    loops = [Loop(peer, jax.device_put(case.make(), named)) for _ in range(2)]
    loops.append(Loop(program, program.place(*case.make())))
    a, twin, b = interleave(loops, seconds) if seconds else ([math.nan],) * 3
    return Measured(
        row,
        theirs.wire_bytes,
        ours.wire_bytes,
        plan.wire_bytes,
        executions(theirs),
        executions(ours),
        peer_seconds,
        own_seconds,
        peer_exe.memory_analysis().temp_size_in_bytes,
        exe.memory_analysis().temp_size_in_bytes,
        statistics.median(a),
        median_ratio(b, a),
        median_ratio(twin, a),
        plan.gap,
        fewest_bytes(case, placement, args) if auto else math.nan,
    )


def fewest_bytes(case: Case, placement: sbp.Placement, args: Any) -> float:
    """The wire bytes that AUTO needs, if bytes are all that counts and the batch alone is annotated."""
    in_sbp = (sbp.AUTO, sbp.AUTO, case.in_sbp[2], sbp.AUTO)
    program = sbp.compile(case.step, placement, in_sbp=in_sbp, options=sbp.Options(hardware=BYTES_ONLY))
    return program.plan(*args).wire_bytes


def executions(meter: Meter) -> int:
    """How many collectives one step executes."""
    return sum(n for n, _ in meter.by_kind().values())


def table(rows: Sequence[Measured]) -> str:
    """The rows as Markdown."""
    head = (
        "| annotation | wire MB: jit | sbp | ratio | collectives: jit | sbp | step: sbp / jit | A/A | "
        "compile s: jit | sbp | temporary MB: jit | sbp | AUTO by bytes: MB |"
    )
    lines = [head, "|" + "---|" * 13]
    for m in rows:
        cells = (
            m.row,
            f"{m.jit_wire_bytes / 1e6:.1f}",
            f"{m.wire_bytes / 1e6:.1f}",
            f"{m.byte_ratio:.2f}",
            str(m.jit_collectives),
            str(m.collectives),
            f"{m.step_ratio:.2f}",
            f"{m.noise_ratio:.2f}",
            f"{m.jit_compile_seconds:.1f}",
            f"{m.compile_seconds:.1f}",
            f"{m.jit_temporary_bytes / 1e6:.0f}",
            f"{m.temporary_bytes / 1e6:.0f}",
            f"{m.auto_wire_bytes / 1e6:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(rows: Sequence[Measured], timed: bool) -> str:
    """The means over all rows, and what was lost."""
    ratios = [m.byte_ratio for m in rows if m.byte_ratio == m.byte_ratio]
    lost = [m.row for m in rows if m.wire_bytes > m.jit_wire_bytes * 1.001]
    more = [m.row for m in rows if m.auto_wire_bytes > min(m.wire_bytes, m.jit_wire_bytes) * 1.001]
    compiling = statistics.geometric_mean(m.compile_seconds / m.jit_compile_seconds for m in rows)
    lines = [
        f"geometric mean of bytes: {statistics.geometric_mean(ratios):.2f}; rows lost: {lost or 'none'}",
        f"rows where AUTO by bytes sends more than jit or the annotation: {more or 'none'}",
        f"geometric mean of compile times: {compiling:.2f}",
    ]
    if timed:
        steps, noise = ([getattr(m, f) for m in rows] for f in ("step_ratio", "noise_ratio"))
        lines.append(
            f"geometric mean of step times: {statistics.geometric_mean(steps):.2f}, median "
            f"{statistics.median(steps):.2f}; A/A {min(noise):.2f} to {max(noise):.2f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.versus_jax", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", default=ROWS, help=f"model@layers/parallelism:placement, ... (default {ROWS})"
    )
    parser.add_argument("--seconds", type=float, default=20, help="of timed steps per row; 0: bytes only")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 8)
    rows = []
    for row in options.rows.split(","):
        rows.append(measure(row, options.seconds))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(f"\njax {jax.__version__}\n\n{table(rows)}\n\n{summary(rows, timed=options.seconds > 0)}")
    if options.json:
        with open(options.json, "w") as f:
            json.dump([asdict(m) for m in rows], f, indent=1)


if __name__ == "__main__":
    main()
