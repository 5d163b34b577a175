"""The plan of a pipeline: those of its placements, its schedule, and what is sent between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sbp import compat
from sbp.passes.explain import Collective, Plan
from sbp.passes.pipeline.chain import Stages
from sbp.passes.pipeline.edges import edges_of
from sbp.passes.pipeline.times import estimated_times, outside_seconds
from sbp.passes.report import bytes_text, seconds_text
from sbp.passes.schedule.actions import Kind, Schedule
from sbp.passes.schedule.simulate import simulate
from sbp.passes.schedule.spans import Timeline
from sbp.placement import Placement
from sbp.signature import B, NdSbp


@dataclass(frozen=True)
class PipelinePlan(Plan):
    """What a program with stages will do, and why.

    Arguments:
      stages: per placement, its plan; a loop over micro-batches counts as often as it runs. `collectives` are
        those of all of them, then what is sent between placements.
      schedule: in which order; None without micro-batches.
      timeline: the schedule as simulated with the estimated times; likewise.
    """

    stages: tuple[Plan, ...] = ()
    schedule: Schedule | None = None
    timeline: Timeline | None = None

    @property
    def sends(self) -> tuple[Collective, ...]:
        """What goes from one placement to another."""
        return tuple(c for c in self.collectives if c.kind == "send")

    @property
    def wire_bytes(self) -> float:
        """What one device sends per step at the most, bytes: of one placement, and to others."""
        return max((p.wire_bytes for p in self.stages), default=0.0) + sum(c.wire_bytes for c in self.sends)

    @property
    def gap(self) -> float:
        """The largest gap of any placement's plan."""
        return max((p.gap for p in self.stages), default=0.0)

    def __str__(self) -> str:
        head = [f"{self.name}: {len(self.stages)} placements"]
        if self.schedule is not None and self.timeline is not None:
            head[0] += f", {self.schedule.microbatches} micro-batches, schedule {self.schedule.name}"
            head.append(f"time    {seconds_text(self.seconds)} per step, estimated")
            head.append(f"bubble  {self.timeline.bubble_fraction:.0%} of all devices' time")
        head += [
            f"send    {c.count} x {c.tensor} {c.dtype}{list(c.shape)}: {bytes_text(c.wire_bytes)}; {c.reason}"
            for c in self.sends
        ]
        head += [f"note    {n}" for n in self.notes]
        return "\n\n".join(["\n".join(head), *map(str, self.stages)])


def pipeline_plan(name: str, placement: Placement, stages: Stages, schedule: Schedule | None) -> PipelinePlan:
    """The plan of a program that has been taken apart."""
    plans, timeline = stages.plans, None
    seconds = sum(p.seconds for p in plans)
    if schedule is not None:
        cuts = stages.cuts(not any(a.kind is Kind.W for order in schedule.orders for a in order))
        timeline = simulate(schedule, estimated_times(stages, cuts), edges_of(cuts))
        seconds = float(timeline.makespan) + outside_seconds(stages, cuts)
    ins, outs = dict[int, NdSbp](), dict[int, NdSbp]()
    for share, plan in reversed(list(zip(stages.shares, plans, strict=True))):
        ins.update(zip(share.arguments, plan.in_sbp, strict=False))
        outs.update(zip(share.results, plan.out_sbp, strict=False))
    traced = stages.traced
    whole = (B,) * plans[0].placement.ndim
    return PipelinePlan(
        name=name,
        placement=placement,
        hardware=plans[0].hardware,
        collectives=(*(c for p in plans for c in p.collectives), *sends_of(stages)),
        seconds=seconds,
        bound=seconds * (1 - max(p.gap for p in plans)),
        memory_bytes=max(p.memory_bytes for p in plans),
        in_sbp=tuple(ins.get(i, whole) for i in range(len(traced.in_paths))),
        out_sbp=tuple(outs.get(i, whole) for i in range(len(traced.out_paths))),
        in_paths=traced.in_paths,
        out_paths=traced.out_paths,
        notes=tuple(dict.fromkeys(n for p in plans for n in p.notes)),
        stages=plans,
        schedule=schedule,
        timeline=timeline,
    )


def sends_of(stages: Stages) -> tuple[Collective, ...]:
    """What goes between placements, once and per micro-batch."""
    out: list[Collective] = []
    for p, share in enumerate(stages.shares):
        there = stages.plans[p].placement
        for times, values in ((1, share.sent), (stages.microbatches, share.passed)):
            for v in values:
                to = [
                    str(stages.plans[q].placement)
                    for q, other in enumerate(stages.shares)
                    if v in other.fed or v in other.received
                ]
                value = share.graph.values[v]
                size = math.prod(value.shape) * compat.itemsize(value.dtype)
                out.append(
                    Collective(
                        "send",
                        value.name,
                        value.shape,
                        str(value.dtype),
                        (),
                        (),
                        (),
                        1,
                        times,
                        times * len(to) * size / there.size,
                        0.0,
                        "",
                        f"made on {there}, wanted on {_listed(to)}",
                    )
                )
    return tuple(out)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names)
