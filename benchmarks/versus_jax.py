"""The same train step through `jax.jit` with NamedShardings and through sbp, interleaved in one process.

    python -m benchmarks.versus_jax [--rows gpt/data:8,mlp/zero:8,...] [--layers 2] [--steps 30] [--json FILE]

Per row: wire bytes per device and step (read from the compiled HLO of both, by the same meter), number of
collectives, temporary memory, compile time, and the step time as a ratio of medians with its A/A twin: the
peer against a second copy of itself, which shows what the machine's noise alone does.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import sbp
from benchmarks.cases import CASES, Case
from sbp.resolve import resolve, to_partition_spec
from sbp.runtime.look.meter import Meter, read_compiled

ROWS = "gpt/data:8,gpt/tensor:8,gpt/2d:2x4,gpt/zero:8"


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
    plan_seconds: float
    jit_temporary_bytes: float
    temporary_bytes: float
    jit_step_seconds: float
    step_ratio: float
    noise_ratio: float
    gap: float

    @property
    def byte_ratio(self) -> float:
        """Our bytes as a share of the peer's."""
        return self.wire_bytes / self.jit_wire_bytes if self.jit_wire_bytes else math.nan


def peer_shardings(case: Case, args: Any, placement: sbp.Placement) -> Any:
    """The NamedShardings that say the same as the case's signatures."""
    flat, tree = jax.tree.flatten(args)
    sbps, problems = resolve(case.in_sbp, args, ["argument"] * len(flat), placement, "in_sbp")
    assert not problems, problems
    whole = (sbp.B,) * placement.ndim  # AUTO is the peer's to choose too, but jit has no such choice
    mesh = placement.mesh
    named = [
        NamedSharding(mesh, to_partition_spec(nd or whole, jnp.ndim(x), placement))
        for nd, x in zip(sbps, flat, strict=True)
    ]
    return jax.tree.unflatten(tree, named)


def compiled(lowered: Any) -> tuple[Any, float]:
    """The executable and the seconds that it took."""
    start = time.perf_counter()
    return lowered.compile(), time.perf_counter() - start


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


def interleave(loops: Sequence[Loop], steps: int, warm: int = 3) -> list[list[float]]:
    """Advances all loops in turn, in rotating order; returns the timed steps of each."""
    for i in range(steps + warm):
        for k in range(len(loops)):
            loops[(i + k) % len(loops)].advance()
    return [loop.seconds[warm:] for loop in loops]


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """The median over steps of the ratio of neighbours in time."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def measure(row: str, layers: int, steps: int) -> Measured:
    """One row."""
    model, _, rest = row.partition("/")
    choice, _, text = rest.partition(":")
    shape = tuple(map(int, text.split("x")))
    placement = sbp.placement("cpu", shape=shape)
    case = CASES[model](choice, shape, layers)
    args = case.make()
    named = peer_shardings(case, args, placement)
    peer = jax.jit(case.step, in_shardings=named, out_shardings=(*named[:2], None), donate_argnums=(0, 1))
    program = sbp.compile(case.step, placement, in_sbp=case.in_sbp, donate_argnums=(0, 1))
    start = time.perf_counter()
    plan = program.plan(*args)
    plan_seconds = time.perf_counter() - start
    peer_exe, peer_seconds = compiled(peer.lower(*args))
    exe, seconds = compiled(program.lower(*args))
    theirs, ours = read_compiled(peer_exe), read_compiled(exe)
    loops = [Loop(peer, jax.device_put(case.make(), named)) for _ in range(2)]
    loops.append(Loop(program, case.make()))
    a, twin, b = interleave(loops, steps) if steps else ([math.nan],) * 3
    return Measured(
        row,
        theirs.wire_bytes,
        ours.wire_bytes,
        plan.wire_bytes,
        executions(theirs),
        executions(ours),
        peer_seconds,
        seconds,
        plan_seconds,
        peer_exe.memory_analysis().temp_size_in_bytes,
        exe.memory_analysis().temp_size_in_bytes,
        statistics.median(a),
        median_ratio(b, a),
        median_ratio(twin, a),
        plan.gap,
    )


def executions(meter: Meter) -> int:
    """How many collectives one step executes."""
    return sum(n for n, _ in meter.by_kind().values())


def table(rows: Sequence[Measured]) -> str:
    """The rows as Markdown."""
    head = (
        "| annotation | wire MB: jit | sbp | ratio | collectives: jit | sbp | step: sbp / jit | A/A | "
        "compile s: jit | sbp | temporary MB: jit | sbp |"
    )
    lines = [head, "|" + "---|" * 12]
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
            f"{m.compile_seconds + m.plan_seconds:.1f}",
            f"{m.jit_temporary_bytes / 1e6:.0f}",
            f"{m.temporary_bytes / 1e6:.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.versus_jax", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=ROWS, help=f"model/parallelism:placement, ... (default {ROWS})")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30, help="timed steps; 0 compares bytes only")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 8)
    rows = []
    for row in options.rows.split(","):
        rows.append(measure(row, options.layers, options.steps))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    ratios = [m.byte_ratio for m in rows if m.byte_ratio == m.byte_ratio]
    print(f"\nGPT of {options.layers} layers, jax {jax.__version__}\n\n{table(rows)}")
    print(f"\ngeometric mean of bytes: {statistics.geometric_mean(ratios):.2f}")
    if options.steps:
        print(f"median of step ratios: {statistics.median(m.step_ratio for m in rows):.2f}")
    if options.json:
        with open(options.json, "w") as f:
            json.dump([asdict(m) for m in rows], f, indent=1)


if __name__ == "__main__":
    main()
