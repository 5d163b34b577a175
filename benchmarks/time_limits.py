"""What planning takes under a limit on time, phase by phase.

    python -m benchmarks.time_limits [gpt/4x8x8/96 resnet/8x8/50 ...] [--limits 1,2,5] [--cpu]

Rows are models, placements and layers as benchmarks.planner has them. "needed" is what there is no plan
without; where that is more than the limit, the plan says so, and nothing else is begun. With `--cpu` the
clock is that of the processor, so that what else a machine does matters less. Phases inside of others are
indented.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

import jax

from benchmarks.musts import MODELS, traced
from sbp.passes.chain import PLACEMENT
from sbp.passes.explain.plan import PlanData
from sbp.passes.plan.phases import Phases, PlanningPhase

ROWS = ("gpt/4x8x8/96", "gpt/8x8/12", "llama-scan/8x8/96", "resnet/8x8/50")
SHORTEST_SECONDS = 0.05
"""Phases that take less are not printed."""


def planned(
    row: str, limit: float, by_cpu: bool, memory_limit: float | None
) -> tuple[PlanData, Phases, float]:
    """The plan of a row, its phases, and the seconds in all."""
    model, shape, layers = row.split("/")
    logical = traced(MODELS[model], tuple(map(int, shape.split("x"))), int(layers))
    request, phases = logical.request, Phases(time.process_time if by_cpu else time.monotonic)
    terms = replace(request.terms, time_limit_seconds=limit, memory_limit_bytes=memory_limit)
    began = phases.now()
    request = replace(request, terms=terms, phases=phases).timed()
    plan: PlanData = PLACEMENT.run(replace(logical, request=request), phases=request.phases)
    return plan, request.phases, phases.now() - began


def in_order(phases: Sequence[PlanningPhase]) -> list[PlanningPhase]:
    """Those that are worth a line, as they began, whole before part."""
    long = [p for p in phases if p.seconds >= SHORTEST_SECONDS]
    return sorted(long, key=lambda p: (p.begun, p.inside))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.time_limits", description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", default=ROWS, metavar="MODEL/PLACEMENT/LAYERS")
    parser.add_argument("--limits", default="1,2,5", help="seconds")
    parser.add_argument("--cpu", action="store_true", help="by the clock of the processor")
    parser.add_argument("--memory-limit", type=float, help="bytes per device; else that of the device")
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    print("| program | limit | taken | needed | gap | step |\n|---|---|---|---|---|---|")
    for row in options.rows:
        for limit in map(float, options.limits.split(",")):
            plan, phases, taken = planned(row, limit, options.cpu, options.memory_limit)
            needed = taken - phases.optional_seconds
            gap, step = f"{plan.cheapest_gap:.2%}", f"{1e3 * plan.step_seconds:.4g} ms"
            print(f"| {row} | {limit:g} s | {taken:.2f} s | {needed:.2f} s | {gap} | {step} |")
            for p in in_order(phases.done):
                said = p.name if p.needed else f"{p.name} (not needed)"
                print(f"| {'. ' * p.inside}{said} | | {p.seconds:.2f} s | | | |", flush=True)


if __name__ == "__main__":
    main()
