"""AUTO against hand annotations: the same GPT step under each, interleaved in one process.

    python -m benchmarks.auto [--placement 8] [--hands data,tensor,zero1,zero] [--layers 2] [--seconds 120]

Per annotation: the estimate, the wire bytes, and the measured step as a ratio to AUTO's (median of neighbours
in time), with AUTO's own twin for the noise.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import jax

import sbp
from benchmarks.cases import gpt_case
from benchmarks.versus_jax import Loop, interleave, median_ratio


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.auto")
    parser.add_argument("--placement", default="8", help="sizes, such as 2x4")
    parser.add_argument("--hands", default="data,tensor,zero1,zero")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120, help="of timed steps, all annotations together")
    options = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 8)
    shape = tuple(map(int, options.placement.split("x")))
    choices = ("auto", "auto", *options.hands.split(","))
    loops, plans = [], []
    for choice in choices:
        case = gpt_case(choice, shape, options.layers)
        placement = sbp.placement("cpu", shape=shape)
        program = sbp.compile(case.step, placement, in_sbp=case.in_sbp, donate_argnums=(0, 1))
        args = program.place(*case.make())
        plans.append(program.plan(*args))
        loops.append(Loop(program, args))
    times = interleave(loops, options.seconds)
    print("| annotation | estimated ms | wire MB | measured ms | measured / auto |\n|---|---|---|---|---|")
    for choice, plan, own in zip(choices, plans, times, strict=True):
        ratio = median_ratio(own, times[0])
        ms = statistics.median(own) * 1e3
        print(
            f"| {choice} | {plan.seconds * 1e3:.1f} | {plan.wire_bytes / 1e6:.1f} | {ms:.0f} | {ratio:.2f} |"
        )


if __name__ == "__main__":
    main()
