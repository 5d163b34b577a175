"""Kernels of train steps on one GPU, each beside what the simulator says of it.

    python -m benchmarks.gpu.kernels [--rows gpt@2,gpt-bf16@2,...] [--out FOLDER]

Each model is compiled through sbp, once, without CUDA graphs (inside one, kernels have no name), and run
under JAX's profiler. A row says what a step's kernels took, what the simulator and the plan say, and what XLA
and the plan say of memory; below it stand the kernels in which the simulator is wrong by the most time.
`--out` keeps, per row, the text of the executable and the seconds of its instructions.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import sbp
from benchmarks.cases import Case
from benchmarks.gpu.single import ROWS, chip_of, gpu
from benchmarks.large import LARGE
from sbp.compat.untyped import block_until_ready
from sbp.rates.chips import CHIPS, Chip
from sbp.runtime.hlo.meter import text_of
from sbp.runtime.hlo.parser import parse
from sbp.runtime.profile.step_breakdown import GPU_OPTIONS, record_steps
from sbp.runtime.profile.trace import TracedStep, traced_steps
from sbp.runtime.profile.trace_alignment import ProgramReader
from sbp.runtime.target.events import KERNELS
from sbp.runtime.target.simulation import simulate

SHOWN = 8


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One model's step; seconds and bytes of one device.

    Arguments:
      measured, simulated: seconds per instruction of the executable.
      text: of the executable.
      planned_seconds, planned_bytes: of the whole step, by the plan; compiled_bytes: the peak, by XLA.
    """

    row: str
    measured: Mapping[str, float]
    simulated: Mapping[str, float]
    text: str
    planned_seconds: float
    planned_bytes: float
    compiled_bytes: float

    @property
    def errors(self) -> list[tuple[str, float]]:
        """What the simulator says too much per instruction, in seconds, the furthest first."""
        names = {*self.measured, *self.simulated}
        found = [(n, self.simulated.get(n, 0.0) - self.measured.get(n, 0.0)) for n in names]
        return sorted(found, key=lambda x: (-abs(x[1]), x[0]))


def seconds_by_instruction(steps: Sequence[TracedStep], aliases: Mapping[str, str]) -> dict[str, float]:
    """Per instruction, the median over steps of the time of its kernels; "" for those of none."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(steps))
    for k, step in enumerate(steps):
        for event in step.events:
            found[aliases.get(event.instruction, event.instruction)][k] += event.end - event.start
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def measure(row: str, case: Case, placement: sbp.Placement, chip: Chip) -> KernelRow:
    """One row, on a placement of one device."""
    args = case.shapes()
    program = sbp.compile(case.step, placement, in_sbp=case.in_sbp, donate_argnums=(0, 1))
    plan = program.plan(*args)
    consts = plan.physical.graph.consts if plan.physical else ()
    options = dict(GPU_OPTIONS) if placement.platform == "gpu" else None
    compiled = program.lower(*args).compile(compiler_options=options)
    text = text_of(compiled)
    module = parse(text)
    reader = ProgramReader(module, [])

    def run(leaves: Sequence[Any]) -> None:
        block_until_ready(compiled(*leaves, *consts))

    profile = record_steps(lambda: jax.tree.leaves(program.place(*case.make())), run)
    steps = traced_steps(profile, module.header["name"], reader.readers)
    memory: Any = compiled.memory_analysis()
    return KernelRow(
        row,
        seconds_by_instruction(steps, reader.aliases),
        {e.instruction: e.seconds for e in simulate(text, chip).events if e.resource == KERNELS},
        text,
        plan.step_seconds,
        plan.memory_bytes,
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes,
    )


def line(m: KernelRow) -> str:
    """A row as Markdown."""
    measured, simulated = sum(m.measured.values()), sum(m.simulated.values())
    cells = (
        m.row,
        *(f"{x * 1e3:.2f}" for x in (measured, simulated, m.planned_seconds)),
        f"{simulated / measured - 1:+.0%}" if measured else "-",
        f"{sum(abs(e) for _, e in m.errors) / measured:.0%}" if measured else "-",
        *(f"{x / 1e9:.2f}" for x in (m.compiled_bytes, m.planned_bytes)),
    )
    return "| " + " | ".join(cells) + " |"


HEADER = """\
| | kernels ms: measured | simulated | by the plan | error | sum of errors | memory GB: XLA | plan |
|---|---|---|---|---|---|---|---|"""


def furthest(m: KernelRow) -> str:
    """The kernels in which the simulator is wrong by the most time, a line each."""
    lines = []
    for name, error in m.errors[:SHOWN]:
        measured, simulated = m.measured.get(name, 0.0) * 1e6, m.simulated.get(name, 0.0) * 1e6
        lines.append(f"  {error * 1e6:+9.1f} us  {measured:9.1f} measured {simulated:9.1f} simulated  {name}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=ROWS, help=f"model@layers, ... (default {ROWS})")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="keeps programs and seconds there")
    options = parser.parse_args(argv)
    device = gpu("benchmarks.gpu.kernels")
    chip = chip_of(device.device_kind)
    if chip is None:
        raise SystemExit(
            f"benchmarks.gpu.kernels: no rates of {device.device_kind!r}; known: {', '.join(CHIPS)}"
        )
    placement = sbp.placement(chip.name, shape=(1,))
    print(f"jax {jax.__version__}, {device.device_kind}\n\n{HEADER}")
    for row in options.rows.split(","):
        model, _, layers = row.partition("@")
        case = LARGE[model]("rows" if model == "dlrm" else "data", (1,), int(layers or 2))
        found = measure(row, case, placement, chip)
        print(f"{line(found)}\n{furthest(found)}", flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"{row}.txt").write_text(found.text)
            seconds = {"measured": dict(found.measured), "simulated": dict(found.simulated)}
            (options.out / f"{row}.json").write_text(json.dumps(seconds, indent=1))


if __name__ == "__main__":
    main()
