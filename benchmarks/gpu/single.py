"""Train steps on one GPU: through sbp against plain `jax.jit`, and both against the simulator.

    python -m benchmarks.gpu.single [--rows gpt@12,gpt-bf16@12,...] [--seconds 20] [--json FILE]

On one device nothing is distributed: what sbp adds is what its program costs there. The steps of `jit`, its
twin and sbp interleave in one process; the ratio is the median of neighbours in time, and A/A the same of
`jit` and its twin. Kernel time is that in which any stream of the device is busy, by JAX's profiler. Beside
it stands what `sbp.runtime.target.simulation` says of the same executable, if it knows the chip.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

import sbp
from benchmarks.cases import Case
from benchmarks.large import LARGE
from benchmarks.versus_jax import Loop, interleave, median_ratio
from sbp.rates.chips import CHIPS, Chip
from sbp.runtime.target.simulation import simulate

ROWS = "gpt@2,gpt@12,gpt-bf16@2,gpt-bf16@12,llama@8,llama-scan@8,resnet@50,dlrm,flax,equinox"
PROFILED_STEPS = 5
AIM = 0.20
"""How far the simulator's kernel time may be from the measured one, relative."""


@dataclass(frozen=True, slots=True)
class SingleRow:
    """One row of the table, in seconds; kernel times are of one step."""

    row: str
    jit_step_seconds: float
    step_ratio: float
    noise_ratio: float
    jit_kernel_seconds: float
    kernel_seconds: float
    jit_simulated_seconds: float
    simulated_seconds: float

    @property
    def simulation_error(self) -> float:
        """How far the simulator is from sbp's kernels, relative to these."""
        return self.simulated_seconds / self.kernel_seconds - 1 if self.kernel_seconds else math.nan


def gpu(asked: str = "benchmarks.gpu.single") -> Any:
    """The first GPU.

    Arguments:
      asked: who needs it.

    Raises:
      SystemExit: if there is none, with what can be done without one.
    """
    try:
        return jax.devices("gpu")[0]
    except (RuntimeError, IndexError) as error:
        raise SystemExit(
            f"{asked}: no GPU here, and these steps are run. On a machine with one: "
            "pip install -e '.[test,cuda]'. Without one, python -m benchmarks.gpu_target compiles for GPUs "
            f"and simulates them. JAX says: {error}"
        ) from None


def chip_of(description: str) -> Chip | None:
    """The chip that a driver calls so; None if its rates are not known.

    >>> chip_of("NVIDIA H200").name
    'h200'
    """
    found = [c for c in CHIPS.values() if c.description == description or description in c.description]
    return found[0] if found else None


def busy_seconds(events: Iterable[tuple[float, float]]) -> float:
    """The time in which anything runs, of events that begin and end in nanoseconds.

    >>> busy_seconds([(0, 10), (5, 20), (30, 40)])
    3e-08
    """
    total, until = 0.0, -math.inf
    for start, end in sorted(events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total * 1e-9


def kernel_seconds(profile: Any) -> float:
    """The time in which streams of a GPU are busy, of a `jax.profiler.ProfileData`; NaN without one."""
    streams = [
        line
        for plane in profile.planes
        if plane.name.startswith("/device:GPU:0")
        for line in plane.lines
        if line.name.startswith("Stream")
    ]
    if not streams:
        return math.nan
    return busy_seconds((e.start_ns, e.start_ns + e.duration_ns) for line in streams for e in line.events)


def profiled(loop: Loop) -> float:
    """The kernel seconds of one step."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED_STEPS):
                loop.advance()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return kernel_seconds(jax.profiler.ProfileData.from_file(str(file))) / PROFILED_STEPS


def measure(row: str, case: Case, placement: sbp.Placement, chip: Chip | None, seconds: float) -> SingleRow:
    """One row, on a placement of one device."""
    args = case.shapes()
    peer = jax.jit(case.step, donate_argnums=(0, 1))
    program = sbp.compile(case.step, placement, in_sbp=case.in_sbp, donate_argnums=(0, 1))
    device = placement.mesh.devices.item()
    simulated = [math.nan] * 2
    if chip is not None:
        simulated = [simulate(f.lower(*args).compile(), chip).kernel_seconds for f in (peer, program)]
    loops = [Loop(peer, jax.device_put(case.make(), device)) for _ in range(2)]
    loops.append(Loop(program, program.place(*case.make())))
    a, twin, b = interleave(loops, seconds)
    return SingleRow(
        row,
        jit_step_seconds=statistics.median(a),
        step_ratio=median_ratio(b, a),
        noise_ratio=median_ratio(twin, a),
        jit_kernel_seconds=profiled(loops[0]),
        kernel_seconds=profiled(loops[2]),
        jit_simulated_seconds=simulated[0],
        simulated_seconds=simulated[1],
    )


def table(rows: Sequence[SingleRow]) -> str:
    """The rows as Markdown."""
    head = "| | step ms: jit | sbp / jit | A/A | kernel ms: jit | sbp | simulated: jit | sbp | error |"
    lines = [head, "|" + "---|" * 9]
    for m in rows:
        kernels = m.jit_kernel_seconds, m.kernel_seconds, m.jit_simulated_seconds, m.simulated_seconds
        cells = (
            m.row,
            f"{m.jit_step_seconds * 1e3:.2f}",
            f"{m.step_ratio:.3f}",
            f"{m.noise_ratio:.3f}",
            *(f"{x * 1e3:.2f}" for x in kernels),
            f"{m.simulation_error:+.0%}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(rows: Sequence[SingleRow]) -> str:
    """The means, and where the simulator is further from the kernels than it should be."""
    far = [f"{m.row} {m.simulation_error:+.0%}" for m in rows if not abs(m.simulation_error) <= AIM]
    return (
        f"geometric mean of steps: {statistics.geometric_mean(m.step_ratio for m in rows):.3f} of jit's; A/A "
        f"{min(m.noise_ratio for m in rows):.3f} to {max(m.noise_ratio for m in rows):.3f}\n"
        f"simulated kernel time not within {AIM:.0%}: {', '.join(far) or 'none'}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.single", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=ROWS, help=f"model@layers, ... (default {ROWS})")
    parser.add_argument("--seconds", type=float, default=20, help="of timed steps per row")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    device = gpu()
    chip, placement = chip_of(device.device_kind), sbp.placement("gpu", shape=(1,))
    if chip is None:
        print(f"no rates of {device.device_kind!r}: nothing is simulated", file=sys.stderr)
    rows = []
    for row in options.rows.split(","):
        model, _, layers = row.partition("@")
        case = LARGE[model]("rows" if model == "dlrm" else "data", (1,), int(layers or 2))
        rows.append(measure(row, case, placement, chip, options.seconds))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(f"\njax {jax.__version__}, {device.device_kind}\n\n{table(rows)}\n\n{summary(rows)}")
    if options.json:
        with open(options.json, "w") as f:
            json.dump([asdict(m) for m in rows], f, indent=1)


if __name__ == "__main__":
    main()
