"""What plans of one model are estimated to take on this machine's CPU, beside what their steps take.

    python -m benchmarks.measured [--devices 4] [--layers 2] [--seconds 60] [--hardware machine.toml]

The machine is calibrated first (`python -m sbp calibrate`), unless a file of its figures is given. The plans
are of a GPT of width 256: the usual kinds of parallelism on one axis and on two, and what would be best on
machines quite unlike this one. Their steps run in turn, in a random order each round; of each the median
counts. The devices are forced ones that share the cores: other work on the machine spoils the figures.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy.stats import spearmanr

import sbp
from benchmarks import cases
from benchmarks.versus_jax import Loop, interleave
from sbp.hardware.catalogue import Hardware
from sbp.hardware.file import hardware_from
from sbp.passes.boxing.links import Network
from sbp.passes.physical.evaluate import Evaluator
from sbp.runtime.calibrate.measure import calibrate

ONE_AXIS = ("data", "tensor", "zero", "sequence", "auto")
TWO_AXES = ("data", "tensor", "2d", "fsdp", "auto")
PLANS = 20


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan's row: what it is, and its seconds estimated and measured."""

    name: str
    estimated: float
    measured: float


def candidates(
    hardware: Hardware, devices: int, layers: int, seed: int = 0
) -> Iterator[tuple[str, tuple[int, ...], Any, Hardware]]:
    """Names, hierarchies and signatures of the plans, and the machine that each is made for."""
    square = 2, devices // 2
    for choices, shape in ((ONE_AXIS, (devices,)), (TWO_AXES, square)):
        for choice in choices:
            in_sbp = cases.gpt_case(choice, shape, layers).in_sbp
            yield f"{choice}:{'x'.join(map(str, shape))}", shape, in_sbp, hardware
    draw = random.Random(seed)
    for k in range(PLANS - len(ONE_AXIS) - len(TWO_AXES)):
        shape = draw.choice([(devices,), square])
        yield f"odd {k}:{'x'.join(map(str, shape))}", shape, sbp.AUTO, distorted(hardware, draw)


def distorted(hardware: Hardware, draw: random.Random) -> Hardware:
    """A machine whose parts are up to a hundred times faster or slower: its plans are bad ones here."""

    def factor() -> float:
        return 10 ** draw.uniform(-2, 2)

    links = tuple(
        replace(
            link,
            bytes_per_second=link.bytes_per_second * factor(),
            latency_seconds=link.latency_seconds * factor(),
        )
        for link in hardware.links
    )
    flops = factor()
    return replace(
        hardware,
        flops_per_second=tuple((size, rate * flops) for size, rate in hardware.flops_per_second),
        memory_bytes_per_second=hardware.memory_bytes_per_second * factor(),
        links=links,
        curves=(),
    )


def measured(hardware: Hardware, devices: int, layers: int, seconds: float) -> list[MeasuredPlan]:
    """All plans' rows. Whatever machine a plan is made for, it is estimated on this one."""
    loops, found = [], []
    for name, shape, in_sbp, machine in candidates(hardware, devices, layers):
        case = cases.gpt_case("data", shape, layers)
        placement = sbp.placement("cpu", shape=shape)
        options = sbp.Options(hardware=machine)
        program = sbp.compile(case.step, placement, in_sbp=in_sbp, donate_argnums=(0, 1), options=options)
        args = case.make()
        physical = program.plan(*args).physical
        assert physical is not None
        found.append((name, Evaluator(physical, Network(placement, hardware)).schedule.seconds))
        loops.append(Loop(program, program.place(*args)))
    times = interleave(loops, seconds)
    return [
        MeasuredPlan(name, estimated, statistics.median(taken))
        for (name, estimated), taken in zip(found, times, strict=True)
    ]


def rank_correlation(rows: Sequence[MeasuredPlan]) -> float:
    """Spearman's, of estimated and measured seconds."""
    return float(spearmanr([r.estimated for r in rows], [r.measured for r in rows]).statistic)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.measured", description=__doc__)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring")
    parser.add_argument("--hardware", type=Path, help="figures of this machine, as calibrate writes them")
    given = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", given.devices)
    hardware = hardware_from(given.hardware) if given.hardware else calibrate().hardware
    rows = sorted(measured(hardware, given.devices, given.layers, given.seconds), key=lambda r: r.measured)
    print("| plan | estimated ms | measured ms | estimated / measured |\n|---|---|---|---|")
    for r in rows:
        ratio = r.estimated / r.measured
        print(f"| {r.name} | {r.estimated * 1e3:.1f} | {r.measured * 1e3:.1f} | {ratio:.2f} |")
    off = float(np.median([abs(r.estimated / r.measured - 1) for r in rows]))
    print(f"\n{len(rows)} plans: rank correlation {rank_correlation(rows):.2f}; median {off:.0%} apart")


if __name__ == "__main__":
    main()
