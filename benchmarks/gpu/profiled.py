"""A GPT's train step on the GPUs that are here, measured and laid over its plan.

    python -m benchmarks.gpu.profiled [--layers 12] [--choice auto] [--out gpt.html]

`Program.profile` divides the step by JAX's profiler: kernels by line, collectives by row, and what nobody
claims, beside the estimates; `--out` writes the page with both. Beside it stands the simulated step of the
same executable, where the chip is known. Fails if kernels are not led back to the program: a profile of this
GPU then has another form than the one that is read.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax

import sbp
from benchmarks import large
from benchmarks.gpu.single import chip_of, gpu
from sbp.rates.chips import CHIPS
from sbp.runtime.profile.profile import Profile
from sbp.runtime.target.simulation import simulate

KNOWN = 0.9
"""Of the kernels' time, the least part that must be of steps of the program."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the profile."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.profiled", description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--choice", default="auto", help="data, tensor, zero, sequence or auto")
    parser.add_argument("--out", metavar="FILE", help="the page")
    options = parser.parse_args(argv)
    device = gpu("benchmarks.gpu.profiled")
    chip = chip_of(device.device_kind)
    kind = next((name for name, c in CHIPS.items() if c is chip), "gpu")
    shape = (len(jax.devices("gpu")),)
    case = large.LARGE["gpt"](options.choice, shape, options.layers)
    placement = sbp.placement(kind, shape=shape)
    program = sbp.compile(case.step, placement, in_sbp=case.in_sbp, donate_argnums=(0, 1))
    args = program.place(*case.make())
    profile = program.profile(*args)
    print(f"jax {jax.__version__}, {len(jax.devices('gpu'))} x {device.device_kind}\n\n{profile.text(100)}")
    if chip is not None:
        step = simulate(program.lower(*args).compile(), chip)
        kernels, exposed = step.kernel_seconds * 1e3, step.exposed_seconds * 1e3
        print(f"\nsimulated: {step.seconds * 1e3:.2f} ms, kernels {kernels:.2f}, exposed {exposed:.2f}")
    if options.out:
        program.plan(*args).save(options.out, profile=profile)
        print(f"saved {options.out}")
    check(profile)


def check(profile: Profile) -> None:
    """Says if the kernels of a profile were not led back to the program.

    Raises:
      SystemExit: with what is missing.
    """
    if profile.step is None:
        raise SystemExit(f"not divided: {profile.no_breakdown_reason}")
    known = sum(profile.step.step_seconds) / (profile.step.kernel_seconds or 1)
    if known < KNOWN:
        raise SystemExit(f"only {known:.0%} of the kernels' time leads back to the program")


if __name__ == "__main__":
    main()
