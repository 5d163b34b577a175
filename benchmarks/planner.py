"""Where planning time goes, pass by pass, without tracing; and what the checks between passes add.

    python -m benchmarks.planner [--models gpt,resnet] [--layers 4] [--placement 2x4] [--checks]

CPU seconds of this process, the least of some rounds. With `--checks` only the totals: what part of planning
the checks between passes take. They are on by default as long as that is below 2 %.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from typing import Any

import jax

import sbp
from benchmarks import cases
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.paths import Boxings
from sbp.passes.chain import PLACEMENT, Logical

ROUNDS = 3
MODELS = {
    "gpt": cases.gpt_case,
    "resnet": cases.resnet_case,
    "classifier": cases.classifier_case,
    "mlp": cases.mlp_case,
}


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


def planned(model: str, shape: Sequence[int], layers: int) -> Logical:
    """What the first pass is given for a model of which nothing is annotated."""
    case = MODELS[model]("auto", shape, layers)
    placement = sbp.placement("h100", shape=tuple(shape))
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.make())
    options = sbp.Options(time_limit=math.inf, cache=False)
    program = sbp.compile(case.step, placement, donate_argnums=(0, 1), options=options)
    program.plan(*args)
    (slot,) = program._built.values()
    built: Any = getattr(slot, "built", slot)
    request = built.request
    return Logical(request, built.traced, Boxings(Network(placement, request.hardware)))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.planner")
    parser.add_argument("--models", default="gpt,resnet,classifier,mlp")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--placement", default="2x4", help="sizes, such as 2x4")
    parser.add_argument("--checks", action="store_true", help="only what the checks between passes take")
    options = parser.parse_args(argv)
    shape = tuple(map(int, options.placement.split("x")))
    print("| model | pass | seconds | its check | check / planning |\n|---|---|---|---|---|")
    for model in options.models.split(","):
        logical = planned(model, shape, options.layers)
        rounds = [timed(logical) for _ in range(ROUNDS)]
        rows = [(r[0][0], min(x[1] for x in r), min(x[2] for x in r)) for r in zip(*rounds, strict=True)]
        whole, checks = sum(r[1] for r in rows), sum(r[2] for r in rows)
        for name, seconds, check in () if options.checks else rows:
            print(f"| {model} | {name} | {seconds:.3f} | {check:.4f} | {check / whole:.2%} |")
        print(f"| {model} | **all** | {whole:.3f} | {checks:.4f} | {checks / whole:.2%} |")


if __name__ == "__main__":
    main()
