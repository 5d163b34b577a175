"""What the planner chooses under a limit on memory, from what the fastest plan needs down to the smallest.

    python -m benchmarks.limits [--models gpt,llama] [--layers 4,12] [--placements 8,2x4] [--rows 1]
        [--parts 0.5] [--above 1.2]

Nothing runs: the train steps of benchmarks/large.py are planned for absent H100s. Seconds and the peak are
the evaluator's, the gap is against the bound of all plans that fit, and planning is wall-clock time.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace

import sbp
from benchmarks import cases, large
from benchmarks.cases import Case
from sbp.options import bytes_of
from sbp.passes.physical.program import Box, Physical
from sbp.signature import Split
from sbp.text.units import bytes_text

PARTS = "0.9,0.75,0.5"
"""Limits, as parts of what the fastest plan needs."""
ABOVE = "1.2,1.01"
"""Limits, as multiples of the smallest peak that was found."""


def case_of(model: str, shape: Sequence[int], layers: int, rows: int) -> Case:
    """A train step with so many sequences a device."""
    if model == "llama":
        config = replace(large.llama.PRESETS["1b"], layers=layers, sequence=2048, scan=False, remat=False)
        return large.llama_case(config, rows, "auto", shape)
    return cases.gpt_case("auto", shape, layers, large.GPT, rows * math.prod(shape))


def planned(case: Case, shape: Sequence[int], limit: float) -> sbp.Plan | str:
    """The plan under a limit, or why there is none."""
    placement, options = sbp.placement("h100", shape=tuple(shape)), sbp.Options(memory_limit=limit)
    program = sbp.compile(case.step, placement, donate_argnums=(0, 1), options=options)
    try:
        return program.plan(*case.shapes())
    except sbp.SbpError as e:
        return e.problems[0].why


def smallest_peak(case: Case, shape: Sequence[int], fastest: sbp.Plan) -> float | None:
    """The smallest peak that is found; None if the search does not say it."""
    # Nothing fits into a hundredth: the error says the smallest peak.
    refused = planned(case, shape, 0.01 * fastest.memory_bytes)
    found = re.search(r"found is (\S+ \wB)", refused) if isinstance(refused, str) else None
    return None if found is None else bytes_of(found[1], "the smallest peak")


def chosen(plan: sbp.Plan) -> str:
    """How much of the state lies in parts, what is gathered again, and what is recomputed."""
    physical = plan.physical
    assert isinstance(physical, Physical)
    state = {"weights": "params", "moments": "opt_state"}
    said = []
    for word, name in state.items():
        own = [
            (math.prod(physical.graph.values[v].shape), any(isinstance(s, Split) for s in nd))
            for v, nd, path in zip(physical.graph.inputs, plan.in_sbp, plan.in_paths, strict=False)
            if path.startswith(name) and physical.graph.values[v].shape
        ]
        split = sum(n for n, is_split in own if is_split) / max(1, sum(n for n, _ in own))
        said.append(f"{word} {split:.0%} split")
    boxes = [s for s in physical.steps if isinstance(s, Box)]
    gathers = sum(s.move.kind == "all_gather" for s in boxes)
    again = sum(s.after is not None for s in boxes)
    recomputed = len(plan.choice.recomputed) if plan.choice is not None else 0
    return ", ".join([*said, f"{gathers} gathers", f"{again} of them again", f"{recomputed} ops run again"])


def row(case: Case, shape: Sequence[int], words: Sequence[str], limit: float) -> sbp.Plan | str:
    """Prints a row of the table."""
    began = time.perf_counter()
    plan = planned(case, shape, limit)
    taken = f"{time.perf_counter() - began:.1f} s"
    if isinstance(plan, str):
        cells = ["none", "", "", plan.split("; ", maxsplit=1)[0]]
    else:
        cells = [
            f"{plan.seconds * 1e3:.2f} ms",
            bytes_text(plan.memory_bytes),
            f"{plan.cheapest_gap:.2%}",
            chosen(plan),
        ]
    print("| " + " | ".join([*words, *cells, taken]) + " |", flush=True)
    return plan


def rows(model: str, shape: Sequence[int], layers: int, options: argparse.Namespace) -> None:
    """Prints the rows of a program on a placement."""
    per_device, parts, above = (
        options.rows,
        *([float(x) for x in text.split(",") if x] for text in (options.parts, options.above)),
    )
    case, name = case_of(model, shape, layers, per_device), f"{model} {layers} on {'x'.join(map(str, shape))}"
    fastest = row(case, shape, (name, "none"), math.inf)
    assert not isinstance(fastest, str)
    smallest = smallest_peak(case, shape, fastest) if above else None
    limits = [(f"{part} x", part * fastest.memory_bytes) for part in parts]
    limits += [(f"{part} x smallest", part * smallest) for part in above if smallest is not None]
    for words, limit in limits:
        row(case, shape, (name, f"{words} = {bytes_text(limit)}"), limit)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.limits")
    parser.add_argument("--models", default="gpt,llama")
    parser.add_argument("--layers", default="4,12")
    parser.add_argument("--placements", default="8,2x4", help="sizes, such as 2x4")
    parser.add_argument("--rows", type=int, default=1, help="sequences a device")
    parser.add_argument("--parts", default=PARTS, help="limits, as parts of what the fastest plan needs")
    parser.add_argument("--above", default=ABOVE, help="limits, as multiples of the smallest peak found")
    options = parser.parse_args(argv)
    print("| program | limit | step | peak | gap | what it chose | planning |\n|---|---|---|---|---|---|---|")
    for model in options.models.split(","):
        for placement in options.placements.split(","):
            for layers in map(int, options.layers.split(",")):
                rows(model, tuple(map(int, placement.split("x"))), layers, options)


if __name__ == "__main__":
    main()
