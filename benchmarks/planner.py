"""Where planning time goes, pass by pass, without tracing; and what the checks between passes add.

    python -m benchmarks.planner [--models gpt,resnet] [--layers 4] [--placement 2x4] [--checks]
    python -m benchmarks.planner --large [--rounds 3] [--rows gpt/8x8/12,gpt/4x8x8/96]

CPU seconds of this process, the least of some rounds. With `--checks` only the totals: what part of planning
the checks between passes take. They are on by default as long as that is below 2 %.

With `--large` a table of the train steps of `benchmarks.large`, nothing annotated: CPU seconds of all passes
and the most memory of the process, tracing not counted in the seconds. Each round is a process of its own;
of the rounds the median stands there, beside what the row must keep.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax

import sbp
from benchmarks import cases, large
from models import llama
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.paths import Boxings
from sbp.passes.chain import PLACEMENT, Logical
from sbp.passes.explain.plan import PlanData
from sbp.runtime.reading import request_of

ROUNDS = 3
MODELS = {
    "gpt": cases.gpt_case,
    "resnet": cases.resnet_case,
    "classifier": cases.classifier_case,
    "mlp": cases.mlp_case,
}


@dataclass(frozen=True)
class Must:
    """What planning a row may take: CPU seconds, gigabytes of the process, and the gap.

    Arguments:
      any_size: whether it is planned without a limit on memory: its activations do not fit into a device.
    """

    seconds: float
    gigabytes: float = float("inf")
    gap: float = 0.0
    any_size: bool = False


LARGE_ROWS = {
    "gpt/8x8/12": Must(3.0),
    "gpt/8x8/96": Must(20.0, any_size=True),
    "gpt/4x8x8/24": Must(60.0, gap=0.01),
    "gpt/4x8x8/96": Must(60.0, gap=0.01, any_size=True),
    "gpt/2x2x2x2/12": Must(60.0, 3.0, 0.01),
    "llama/8x8/24": Must(20.0, any_size=True),
    "llama-remat/2x4/24": Must(20.0, any_size=True),
    "llama-remat/8x8/24": Must(20.0, any_size=True),
    "llama-scan/8x8/24": Must(20.0),
}
"""By model of `benchmarks.large`, placement and layers."""


@dataclass(frozen=True)
class PlannerRow:
    """What planning a row took: CPU seconds, gigabytes of the process, and the gap of the plan."""

    seconds: float
    gigabytes: float
    gap: float


def timed(logical: Logical) -> list[tuple[str, float, float]]:
    """Per pass: its name, its seconds and those of its check."""
    found, at = [], logical
    for p in PLACEMENT.passes:
        began = time.process_time()
        at = p.run(at)
        done = time.process_time()
        p.holds(at)
        found.append((p.name, done - began, time.process_time() - done))
    return found


def recomputed(choice: str, shape: Sequence[int], layers: int) -> cases.Case:
    """`layers` layers of Llama 3.2 1B, each by itself and computed twice, 4 x 2,048 tokens a device."""
    config = replace(llama.PRESETS["1b"], layers=layers, sequence=2048, scan=False, remat=True)
    return large.llama_case(config, 4, choice, shape)


def traced(
    make: Callable[[str, Sequence[int], int], cases.Case],
    shape: Sequence[int],
    layers: int,
    memory_limit: float | None = None,
) -> Logical:
    """What the first pass is given for a model of which nothing is annotated."""
    case = make("auto", shape, layers)
    placement = sbp.placement("h100", shape=tuple(shape))
    options = sbp.Options(time_limit=math.inf, memory_limit=memory_limit, cache=False)
    program = sbp.compile(case.step, placement, donate_argnums=(0, 1), options=options)
    reading = program.reading(*jax.eval_shape(case.make))
    signatures = reading.signatures(program.in_sbp, program.out_sbp)
    request = request_of(reading, signatures, placement, program.options)
    return Logical(request, reading.traced, Boxings(Network(placement, request.hardware)))


def measure(name: str) -> PlannerRow:
    """Plans a row of `LARGE_ROWS` in this process."""
    model, placement, layers = name.split("/")
    make = {**large.LARGE, "llama-remat": recomputed}[model]
    any_size = name in LARGE_ROWS and LARGE_ROWS[name].any_size
    limit = math.inf if any_size else None
    logical = traced(make, tuple(map(int, placement.split("x"))), int(layers), limit)
    began = time.process_time()
    plan: PlanData = PLACEMENT.run(logical)
    seconds = time.process_time() - began
    return PlannerRow(
        seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, plan.cheapest_gap
    )


def measured(name: str, rounds: int) -> PlannerRow:
    """The medians of some processes that plan a row each."""
    found = []
    for _ in range(rounds):
        command = [sys.executable, "-m", "benchmarks.planner", "--one", name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found.append(PlannerRow(**json.loads(said.splitlines()[-1])))
    return PlannerRow(
        *(statistics.median(getattr(r, field) for r in found) for field in ("seconds", "gigabytes", "gap"))
    )


def large_line(name: str, row: PlannerRow) -> str:
    """A row of the table, with what it must keep."""
    must = LARGE_ROWS.get(name)
    cells = [name, f"{row.seconds:.1f}", f"{row.gigabytes:.2f}", f"{row.gap:.2%}"]
    if must is None:
        return f"| {' | '.join((*cells, '', ''))} |"
    memory = "" if must.gigabytes == float("inf") else f", {must.gigabytes:g} GB"
    kept = row.seconds <= must.seconds and row.gigabytes <= must.gigabytes and row.gap <= must.gap
    asked = f"{must.seconds:g} s{memory}, gap {must.gap:.0%}"
    return f"| {' | '.join((*cells, asked, 'yes' if kept else 'NO'))} |"


def print_large(names: Sequence[str], rounds: int) -> None:
    """Prints the table of large train steps, each row as soon as it is measured."""
    print("| model/placement/layers | CPU seconds | GB | gap | must | met |\n|---|---|---|---|---|---|")
    for name in names:
        print(large_line(name, measured(name, rounds)), flush=True)


def print_passes(options: argparse.Namespace) -> None:
    """Prints the table of passes."""
    shape = tuple(map(int, options.placement.split("x")))
    print("| model | pass | seconds | its check | check / planning |\n|---|---|---|---|---|")
    for model in options.models.split(","):
        logical = traced(MODELS[model], shape, options.layers)
        rounds = [timed(logical) for _ in range(options.rounds)]
        rows = [(r[0][0], min(x[1] for x in r), min(x[2] for x in r)) for r in zip(*rounds, strict=True)]
        whole, checks = sum(r[1] for r in rows), sum(r[2] for r in rows)
        for name, seconds, check in () if options.checks else rows:
            print(f"| {model} | {name} | {seconds:.3f} | {check:.4f} | {check / whole:.2%} |")
        print(f"| {model} | **all** | {whole:.3f} | {checks:.4f} | {checks / whole:.2%} |")


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.planner")
    parser.add_argument("--models", default="gpt,resnet,classifier,mlp")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--placement", default="2x4", help="sizes, such as 2x4")
    parser.add_argument("--checks", action="store_true", help="only what the checks between passes take")
    parser.add_argument("--large", action="store_true", help="train steps in the size of the machine")
    parser.add_argument("--rows", default=",".join(LARGE_ROWS), help="of --large: model/placement/layers")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        print(json.dumps(vars(measure(options.one))))
    elif options.large:
        print_large(options.rows.split(","), options.rounds)
    else:
        print_passes(options)


if __name__ == "__main__":
    main()
