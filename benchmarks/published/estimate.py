"""From a row to seconds: stages are planned, their times go through a schedule, the end of the step is added."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import astuple, dataclass, field

from benchmarks.published.chips import hardware_of, kind_of
from benchmarks.published.layout import Lying
from benchmarks.published.model import Stage
from benchmarks.published.program import StageProgram, parts_of
from benchmarks.published.recompute import EVERYTHING, NOTHING, kept_results
from benchmarks.published.rows import PublishedStep
from sbp.hardware import Hardware
from sbp.passes.face import Plan
from sbp.passes.schedule.orders import make
from sbp.passes.schedule.simulate import simulate
from sbp.passes.schedule.times import Times


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """What one stage takes.

    Arguments:
      forward, backward: of one micro-batch, what is computed again counted in the backward pass.
      sum, send: of a step's gradients over copies of the weights, and of new weights to them.
      update: of the optimizer.
    """

    forward: float = 0.0
    backward: float = 0.0
    sum: float = 0.0
    send: float = 0.0
    update: float = 0.0

    def times(self, n: float) -> StageSeconds:
        """Of n such stages in one."""
        return StageSeconds(*(n * x for x in astuple(self)))

    def __add__(self, other: StageSeconds) -> StageSeconds:
        return StageSeconds(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a step and where they are.

    Arguments:
      seconds: of the step.
      passes: forward and backward passes without any wait, of the busiest rank.
      bubble: in which that rank waits for others.
      exposed: sums of gradients and new weights, where no pass hides them.
      update: of the optimizer.
      kept: names of results that are kept for the backward pass.
    """

    seconds: float
    passes: float
    bubble: float
    exposed: float
    update: float
    kept: tuple[str, ...]


@dataclass
class Estimator:
    """Estimates a row; equal stages are planned once."""

    row: PublishedStep
    hardware: Hardware = field(init=False)
    kept: Collection[str] = field(init=False)
    _known: dict[Stage, StageSeconds] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.hardware = hardware_of(self.row.chip)
        self.kept = kept_results(self.row, self.hardware)

    def estimate(self) -> Estimate:
        """What a step takes."""
        ways, trips = self.row.layout, self.row.micro_batches
        stages = [self._seconds(stage) for stage in stages_of(self.row)]
        ranks = [stages[rank :: ways.pp] for rank in range(ways.pp)]
        passes = max(trips * sum(s.forward + s.backward for s in rank) for rank in ranks)
        makespan = passes if ways.pp == 1 else self._makespan(stages)
        # Buckets of gradients leave while the last backward pass goes on, and new weights arrive while the
        # next forward pass does, as in Megatron and in PyTorch.
        ends = [
            (
                sum(s.update for s in rank),
                max(0.0, sum(s.sum for s in rank) - sum(s.backward for s in rank))
                + max(0.0, sum(s.send for s in rank) - sum(s.forward for s in rank)),
            )
            for rank in ranks
        ]
        update, exposed = max(ends, key=sum)
        return Estimate(
            makespan + update + exposed, passes, makespan - passes, exposed, update, tuple(sorted(self.kept))
        )

    def _makespan(self, stages: list[StageSeconds]) -> float:
        """Of the passes of all micro-batches through the pipeline."""
        ways = self.row.layout
        rank_of = tuple(range(ways.pp)) * ways.vp
        name = "1f1b" if ways.vp == 1 else "interleaved"
        times = Times(
            tuple(s.forward for s in stages),
            tuple(s.backward for s in stages),
            (0.0,) * len(stages),
            transfer=self._hop_seconds(),
        )
        return float(simulate(make(name, rank_of, self.row.micro_batches), times).makespan)

    def _hop_seconds(self) -> float:
        """Of the activations of one micro-batch from one stage to the next, each device sending its part."""
        row, ways = self.row, self.row.layout
        own = range(row.gpus // ways.pp)
        link = self.hardware.between(own, [r + len(own) for r in own])
        sent = 2 * row.micro_batch * row.sequence * row.width / (ways.cp * ways.tp)
        return link.latency_seconds + sent / link.bytes_per_second

    def _seconds(self, stage: Stage) -> StageSeconds:
        """Of a stage: planned as it is, or of a pipeline as the sum of its parts, which stages have in common.

        Layers are the body of a loop, so that this is the same sum.
        """
        if self.row.layout.pp == 1:
            return self._plan(stage)
        layers = ((stage.dense, Stage(1, 0, False, False)), (stage.sparse, Stage(0, 1, False, False)))
        ends = ((stage.first, Stage(0, 0, True, False)), (stage.last, Stage(0, 0, False, True)))
        return sum((self._part(part).times(n) for n, part in (*layers, *ends) if n), StageSeconds())

    def _part(self, part: Stage) -> StageSeconds:
        if part not in self._known:
            self._known[part] = self._plan(part)
        return self._known[part]

    def _plan(self, stage: Stage) -> StageSeconds:
        lying = Lying(kind_of(self.row.chip), self.row.layout)
        program = StageProgram(self.row, stage, lying, self.hardware, self.kept)
        both = parts_of(program.passes_plan()).seconds
        # A backward pass has two products for each of a forward pass, and those that are computed again. How
        # both share the time of a micro-batch hardly matters to a pipeline: its bubble is of their sum.
        forward = both / (3 + _recomputed(self.kept))
        ends = [plan for plan in map(program.update_plan, (False, True)) if plan is not None]
        return StageSeconds(
            forward,
            both - forward,
            sum(_communication(p, "reduce_scatter", "all_reduce") for p in ends),
            sum(_communication(p, "all_gather") for p in ends),
            sum(p.seconds - sum(c.seconds for c in p.collectives) for p in ends),
        )


def _recomputed(kept: Collection[str]) -> float:
    """Roughly which share of a forward pass is computed again."""
    if kept == NOTHING:
        return 1.0
    return 0.0 if kept == EVERYTHING else 0.5


def _communication(plan: Plan, *kinds: str) -> float:
    return sum(c.seconds for c in plan.collectives if c.kind in kinds)


def stages_of(row: PublishedStep) -> list[Stage]:
    """The stages of a pipeline, as even as layers divide; the first and the last have less if they do not."""
    count = row.layout.pp * row.layout.vp
    each, more = divmod(row.layers, count)
    # Embedding and head are work too: what is left over goes to the others first, from behind.
    order = [*range(count - 2, 0, -1), 0, count - 1] if count > 1 else [0]
    layers = [each + (i in order[:more]) for i in range(count)]
    dense = row.experts.dense_layers if row.experts else row.layers
    found = []
    for i, n in enumerate(layers):
        begin = sum(layers[:i])
        mine = max(0, min(n, dense - begin))
        found.append(Stage(mine, n - mine, i == 0, i == count - 1))
    return found
