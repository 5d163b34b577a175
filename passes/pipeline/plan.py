"""The plan of a pipeline: those of its placements, its schedule, and what is sent between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from sbp import compat
from sbp.passes.explain import Collective, Plan
from sbp.passes.pipeline.chain import Stages
from sbp.passes.report import bytes_text, seconds_text
from sbp.passes.schedule.actions import Schedule
from sbp.passes.schedule.spans import Timeline


@dataclass(frozen=True)
class PipelinePlan:
    """What a program with stages will do, and why.

    Arguments:
      name: the function's name.
      stages: per placement, its plan; a loop over micro-batches counts as often as it runs.
      sends: what goes from one placement to another.
      schedule: in which order; None without micro-batches.
      timeline: the schedule as simulated with the estimated times; likewise.
      notes: remarks.
    """

    name: str
    stages: tuple[Plan, ...]
    sends: tuple[Collective, ...]
    schedule: Schedule | None
    timeline: Timeline | None
    notes: tuple[str, ...] = ()
    physical: None = field(default=None, compare=False, repr=False)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives of all placements, and what is sent between them."""
        return (*(c for p in self.stages for c in p.collectives), *self.sends)

    @property
    def wire_bytes(self) -> float:
        """What one device sends per step at the most, bytes."""
        return max((p.wire_bytes for p in self.stages), default=0.0) + sum(c.wire_bytes for c in self.sends)

    @property
    def memory_bytes(self) -> float:
        """Peak per device, estimated: of the placement that needs most."""
        return max((p.memory_bytes for p in self.stages), default=0.0)

    @property
    def seconds(self) -> float:
        """The estimated time of one step."""
        alone = sum(p.seconds for p in self.stages)
        return alone if self.timeline is None else float(self.timeline.makespan)

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
            f"sends   {c.count} x {c.tensor} {c.dtype}{list(c.shape)}: {bytes_text(c.wire_bytes)}; {c.reason}"
            for c in self.sends
        ]
        head += [f"note    {n}" for n in self.notes]
        return "\n\n".join(["\n".join(head), *map(str, self.stages)])


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
