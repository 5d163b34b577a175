"""What the planner says of a step with overlap, beside the simulation of the program that XLA:GPU compiled.

    python -m benchmarks.overlap [--rows gpt@2/data:8,...] [--results benchmarks/results/gpu_target.json]
    python -m benchmarks.overlap --auto [--rows gpt@2/auto:8,...]

Nothing is compiled: the simulated figures are those that benchmarks.gpu_target has left. Per row: what the
plan takes one thing after the other, what it takes with overlap and what of it is exposed, and the simulated
step. Then the same with the simulator's own times: collectives by sbp/rates, kernels scaled so that all of
them together take as long as the simulated ones. What is still apart then is due to the model of overlap;
the rest of the difference is due to what kernels and collectives are said to take.

With `--auto`: the steps that plans estimate of AUTO and of all parallelisms by name on the same placement.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
import numpy as np

import sbp
from benchmarks.gpu_target import KIND, read
from benchmarks.large import LARGE
from benchmarks.versus_jax import parse
from sbp.communication.protocol import Communication
from sbp.passes.boxing.links import Network
from sbp.passes.face import Plan
from sbp.passes.physical.evaluate import Evaluator, executions
from sbp.passes.physical.fusion import KernelOp, ShardSizes
from sbp.passes.physical.program import Box, Compute, Step
from sbp.passes.physical.sections import Sections
from sbp.passes.physical.step_schedule import schedule_step
from sbp.rates.chips import CHIPS
from sbp.rates.collectives import LIKE, collective_seconds, sent_share

SAVED = Path(__file__).parent / "results" / "gpu_target.json"
AS_COMPILED = sbp.Options(cache=False)
"""Plans that benchmarks.gpu_target has compiled too."""


@dataclass(frozen=True)
class SimulatedCosts:
    """What steps take by the simulator's rates.

    Arguments:
      takes: the plan's own evaluator.
      kernel_seconds: what all kernels of the compiled program take together, simulated.
    """

    takes: Evaluator
    kernel_seconds: float

    @cached_property
    def scale(self) -> float:
        """Simulated seconds of kernels, as a share of those of the plan."""
        steps = executions(self.takes.physical.steps)
        return self.kernel_seconds / sum(e.assumed_count * self._planned(e.step) for e in steps)

    def _planned(self, step: Step) -> float:
        """What the plan says of a step, without what it sends."""
        if isinstance(step, Box):
            return 0.0 if self.takes.box_bytes(step) else self.takes.seconds_of(step)
        if isinstance(step, Compute):
            return self.takes.seconds_of(step) - sum(s for _, s in self.takes.communication_times(step))
        return 0.0

    def _sent(self, kind: str, axes: Sequence[int], wire_bytes: float) -> float:
        """The simulator's time of a collective of which a device sends so many bytes."""
        placement, chip = self.takes.physical.placement, CHIPS[KIND]
        axes = tuple(range(placement.ndim)) if kind == "permute" else tuple(axes)
        groups, ranks = placement.groups(axes), math.prod(placement.shape[a] for a in axes)
        domains = max(len({int(r) // chip.domain_devices for r in group}) for group in groups)
        whole, tabled = wire_bytes / sent_share(kind, ranks), LIKE.get(kind, kind)
        return collective_seconds(chip, tabled, whole, ranks, groups=len(groups), domains=domains).seconds

    def seconds_of(self, step: Step) -> float:
        """The time of a step, once."""
        if isinstance(step, Box) and self.takes.box_bytes(step):
            return self._sent(step.move.kind, step.move.axes, self.takes.box_bytes(step))
        talked = sum(s for _, s in self.communication_times(step)) if isinstance(step, Compute) else 0.0
        return self.scale * self._planned(step) + talked

    def communication_times(self, step: Compute) -> list[tuple[Communication, float]]:
        """What an op sends itself, each with its time."""
        return [
            (t, self._sent(t.kind, t.axes, t.wire_bytes)) for t, _ in self.takes.communication_times(step)
        ]

    def combined_seconds(self, boxes: Sequence[Box]) -> float:
        """The time of moves that are sent as one."""
        move = boxes[0].move
        return self._sent(move.kind, move.axes, sum(map(self.takes.box_bytes, boxes)))

    @property
    def beside_share(self) -> float:
        """The share of its rate that a kernel keeps beside a collective."""
        return self.takes.beside_share

    @property
    def sizes(self) -> ShardSizes:
        """How large tensors are."""
        return self.takes.sizes

    def scheduled_seconds(self, op: KernelOp, *more: KernelOp) -> float:
        """What XLA's scheduler takes an op to be."""
        return self.takes.scheduled_seconds(op, *more)

    def copy_seconds(self, size: float) -> float:
        """The time of a kernel that copies so many bytes."""
        return self.takes.copy_seconds(size)

    def sections_if_large(self, most_bytes: float) -> Sections | None:
        """The sections in which the program runs, if it does so."""
        return self.takes.sections_if_large(most_bytes)

    def serial_seconds(self) -> float:
        """The time of all steps, one after the other."""
        return sum(e.assumed_count * self.seconds_of(e.step) for e in executions(self.takes.physical.steps))


@dataclass(frozen=True, slots=True)
class OverlapRow:
    """One row; `model_` are the figures of the overlap with the simulator's times."""

    row: str
    serial_seconds: float
    step_seconds: float
    exposed_seconds: float
    simulated_seconds: float
    simulated_exposed_seconds: float
    model_serial_seconds: float
    model_seconds: float
    model_exposed_seconds: float


def measure(row: str, simulated_seconds: float, simulated_exposed_seconds: float) -> OverlapRow:
    """One row of the table."""
    model, layers, choice, shape = parse(row)
    case = LARGE[model](choice, shape, layers)
    program = sbp.compile(
        case.step,
        sbp.placement(KIND, shape=shape),
        in_sbp=case.in_sbp,
        donate_argnums=(0, 1),
        options=AS_COMPILED,
    )
    plan = program.plan(*case.shapes())
    assert plan.physical is not None
    takes = Evaluator(plan.physical, Network(plan.placement, plan.hardware))
    costs = SimulatedCosts(takes, simulated_seconds - simulated_exposed_seconds)
    step = schedule_step(takes.whole, costs, {})
    return OverlapRow(
        row,
        plan.seconds,
        plan.step_seconds,
        plan.exposed_seconds,
        simulated_seconds,
        simulated_exposed_seconds,
        costs.serial_seconds(),
        step.seconds,
        step.exposed_seconds,
    )


HEAD = (
    "| | plan ms: serial | overlapped | exposed | simulated ms: step | exposed | ratio "
    "| with the simulator's times, ms: serial | overlapped | exposed | ratio |"
)


def table(rows: Sequence[OverlapRow]) -> str:
    """The rows as Markdown."""
    lines = [HEAD, "|" + "---|" * 11]
    for r in rows:
        planned = (r.serial_seconds, r.step_seconds, r.exposed_seconds)
        simulated = (r.simulated_seconds, r.simulated_exposed_seconds)
        model = (r.model_serial_seconds, r.model_seconds, r.model_exposed_seconds)
        cells = (
            r.row,
            *(f"{x * 1e3:.2f}" for x in (*planned, *simulated)),
            f"{r.step_seconds / r.simulated_seconds:.2f}",
            *(f"{x * 1e3:.2f}" for x in model),
            f"{r.model_seconds / r.simulated_seconds:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's; NaN of fewer than two.

    >>> round(rank_correlation([1, 2, 3], [10, 30, 20]), 3)
    0.5
    """
    if len(xs) < 2:
        return math.nan
    return float(np.corrcoef(np.argsort(np.argsort(xs)), np.argsort(np.argsort(ys)))[0, 1])


def summary(rows: Sequence[OverlapRow]) -> str:
    """How far the figures are from the simulated ones."""
    steps, exposed = [r.simulated_seconds for r in rows], [r.simulated_exposed_seconds for r in rows]
    estimates = {
        "the plan": [(r.step_seconds, r.exposed_seconds) for r in rows],
        "with the simulator's times": [(r.model_seconds, r.model_exposed_seconds) for r in rows],
    }
    lines = []
    for name, pairs in estimates.items():
        found, waited = [step for step, _ in pairs], [x for _, x in pairs]
        apart = [abs(a / b - 1) for a, b in zip(found, steps, strict=True)]
        shares = [abs(a - b) / c for a, b, c in zip(waited, exposed, steps, strict=True)]
        lines.append(
            f"{name}: rank correlation of steps {rank_correlation(found, steps):.3f}, of exposed "
            f"{rank_correlation(waited, exposed):.3f}; steps apart by {statistics.median(apart):.1%} in the "
            f"median, {max(apart):.1%} at most; exposed apart by {statistics.median(shares):.1%} of the step "
            "in the median"
        )
    hidden = statistics.median(b / c for b, c in zip(exposed, steps, strict=True))
    serial = statistics.median(r.model_serial_seconds / r.simulated_seconds - 1 for r in rows)
    lines.append(
        f"for comparison, steps with the simulator's times: apart by {hidden:.1%} in the median if all were "
        f"hidden, by {serial:.1%} if nothing were"
    )
    return "\n".join(lines)


AUTO_ROWS = tuple(f"{model}@2/auto:{shape}" for model in ("gpt", "gpt-bf16") for shape in ("8", "2x4")) + (
    "llama@8/auto:8",
)
BY_HAND = {1: ("data", "zero1", "zero", "tensor", "sequence"), 2: ("data", "zero", "tensor", "2d", "fsdp")}
"""Parallelisms to compare with, by the number of placement axes."""


@dataclass(frozen=True, slots=True)
class AutoRow:
    """The plan that the search chose, beside the best parallelism by name.

    Arguments:
      plan: that of AUTO.
      by_hand: estimated seconds of a step, per parallelism.
      cpu_seconds: of planning AUTO, tracing included.
    """

    row: str
    plan: Plan
    by_hand: Mapping[str, float]
    cpu_seconds: float

    @property
    def best(self) -> str:
        """The parallelism by name with the shortest step."""
        return min(self.by_hand, key=self.by_hand.__getitem__)

    @property
    def ratio(self) -> float:
        """The step of AUTO as a share of that."""
        return self.plan.step_seconds / self.by_hand[self.best]


def plan_of(row: str) -> tuple[Plan, float]:
    """The plan of a row, and the CPU seconds that it took."""
    model, layers, choice, shape = parse(row)
    case = LARGE[model](choice, shape, layers)
    program = sbp.compile(
        case.step,
        sbp.placement(KIND, shape=shape),
        in_sbp=case.in_sbp,
        donate_argnums=(0, 1),
        options=AS_COMPILED,
    )
    args = case.shapes()
    began = time.process_time()
    return program.plan(*args), time.process_time() - began


def beside_hands(row: str) -> AutoRow:
    """A row of AUTO, and the same model under every parallelism by name."""
    plan, seconds = plan_of(row)
    model, layers, _, shape = parse(row)
    by_hand: dict[str, float] = {}
    for choice in BY_HAND[len(shape)]:
        if not (model.startswith("llama") and choice in ("zero1", "sequence")):
            on = "x".join(map(str, shape))
            by_hand[choice] = plan_of(f"{model}@{layers}/{choice}:{on}")[0].step_seconds
    return AutoRow(row, plan, by_hand, seconds)


AUTO_HEAD = "| | AUTO ms: step | serial | cheapest serial | by hand ms, the best first | ratio | CPU s |"


def auto_table(rows: Sequence[AutoRow]) -> str:
    """The rows as Markdown."""
    lines = [AUTO_HEAD, "|" + "---|" * 7]
    for r in rows:
        hands = sorted(r.by_hand.items(), key=lambda x: x[1])
        cheapest = r.plan.seconds if r.plan.cheapest_seconds is None else r.plan.cheapest_seconds
        cells = (
            r.row,
            *(f"{x * 1e3:.3f}" for x in (r.plan.step_seconds, r.plan.seconds, cheapest)),
            ", ".join(f"{choice} {seconds * 1e3:.3f}" for choice, seconds in hands),
            f"{r.ratio:.3f}",
            f"{r.cpu_seconds:.1f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.overlap", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", help="model@layers/parallelism:placement, ... (all of the results)")
    parser.add_argument(
        "--results", metavar="FILE", type=Path, default=SAVED, help="of benchmarks.gpu_target"
    )
    parser.add_argument("--auto", action="store_true", help="AUTO beside parallelisms by name, estimated")
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    if options.auto:
        print(auto_table([]))
        for row in options.rows.split(",") if options.rows else AUTO_ROWS:
            print(auto_table([beside_hands(row)]).splitlines()[-1], flush=True)
        return
    saved = {m.row: m.sbp for m in read(options.results)}
    rows: list[OverlapRow] = []
    print(table([]))
    for row in options.rows.split(",") if options.rows else saved:
        rows.append(measure(row, saved[row].step_seconds, saved[row].exposed_seconds))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(f"\n{summary(rows)}")


if __name__ == "__main__":
    main()
