"""Random programs, compiled for GPUs that are not here: every collective is the plan's, and every row known.

    python -m tests.conformance.gpu_programs --count 200 --seed 0 [--kind h100] [--only 17]

needs XLA's compiler for GPUs (the extra `gpu-target`). Nothing runs: random_programs.py compares results.
"""

from __future__ import annotations

import argparse
import collections
import random
import time
from typing import Any

import jax

import sbp
from sbp.runtime.report.report import ProgramReport
from tests.conformance.random_code import Program, draw_program, function, tensor
from tests.conformance.random_programs import SPLITTING, UNMEASURED

TOLERANCE = 0.01


def report_of(program: Program, kind: str) -> ProgramReport:
    """Plan against what XLA makes of a random program for GPUs of a kind."""
    args = [tensor(x.at, x.shape, x.dtype) for x in program.inputs]
    outs: Any = [nd for _, nd in program.outs]
    compiled = sbp.compile(
        function(program),
        sbp.placement(kind, program.grid),
        in_sbp=tuple(x.sbp for x in program.inputs),
        out_sbp=(outs, None) if program.wrt else outs,
        options=sbp.Options(hardware=SPLITTING if program.splitting else None),
    )
    return compiled.report(*args)


def complaint(program: Program, report: ProgramReport) -> str:
    """What is wrong with a report; "" for nothing."""
    if report.unexplained_differences:
        return "; ".join(report.unexplained_differences)
    if UNMEASURED.search(program.source):
        return ""
    return more_bytes(report)


def more_bytes(report: ProgramReport) -> str:
    """Whether the compiled program sends more than the plan says; "" if it does not."""
    planned = report.plan.wire_bytes
    if report.wire_bytes <= planned * (1 + TOLERANCE):
        return ""
    return f"{planned} bytes planned, {report.wire_bytes} compiled"


def outcome(program: Program, kind: str) -> tuple[str, str]:
    """What happened to a program, and the particulars."""
    try:
        found = complaint(program, report_of(program, kind))
    except sbp.SbpError as e:
        return "refused", str(e)
    except Exception as e:
        return "crashed", f"{type(e).__name__}: {e}"
    return ("unexplained", found) if found else ("explained", "")


def main() -> None:
    """Compiles many programs, and prints those of which something is not explained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default="h100")
    parser.add_argument("--only", type=int, help="one program of the seed")
    asked = parser.parse_args()
    kinds: collections.Counter[str] = collections.Counter()
    began = time.monotonic()
    for number in range(asked.count) if asked.only is None else [asked.only]:
        program = draw_program(random.Random(f"{asked.seed}.{number}").choice)
        found, what = outcome(program, asked.kind)
        kinds[found] += 1
        if found in ("crashed", "unexplained"):
            print(f"\n== seed {asked.seed}, program {number}: {found}\n{what[:2000]}\n{program}", flush=True)
        if number % 50 == 49:
            jax.clear_caches()
            print(f"{number + 1} programs, {time.monotonic() - began:.0f} s: {dict(kinds)}", flush=True)
    print(f"\n{sum(kinds.values())} programs in {time.monotonic() - began:.0f} s: {dict(kinds)}")


if __name__ == "__main__":
    main()
