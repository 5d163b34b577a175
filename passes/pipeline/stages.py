"""A program taken apart: what every placement computes, and its plan.

Words: docs/glossary.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from sbp.passes.explain.plan import PlanData
from sbp.passes.physical.program import Physical
from sbp.passes.pipeline.cut import cut
from sbp.passes.pipeline.labels import Labels
from sbp.passes.pipeline.op_placement import OpPlacements
from sbp.passes.pipeline.slots import Cut
from sbp.passes.pipeline.split import StageShare
from sbp.passes.program.trace import Traced
from sbp.passes.request import Request


@dataclass(frozen=True)
class Stages:
    """A program taken apart.

    Arguments:
      name: the function's name.
      traced: the whole.
      where: its placements.
      stages: per stage, the position of its placement.
      microbatches: how many there are; 0 for a program without a loop over them.
      shares, plans: per placement.
      labels: the words for what goes from one placement to another.
      asked: per placement, what its plan was asked for: what a plan that is made again begins with.
    """

    name: str
    traced: Traced
    where: OpPlacements
    stages: tuple[int, ...]
    microbatches: int
    shares: tuple[StageShare, ...]
    plans: tuple[PlanData, ...]
    labels: Labels
    asked: tuple[tuple[Traced, Request], ...] = field(default=(), compare=False, repr=False)

    def cuts(self, merged: bool) -> tuple[Cut, ...]:
        """The pieces of every placement; `merged` as of `cut`."""
        return self._merged if merged else self._apart

    @cached_property
    def _merged(self) -> tuple[Cut, ...]:
        return tuple(cut(s, physical_of(p), True) for s, p in zip(self.shares, self.plans, strict=True))

    @cached_property
    def _apart(self) -> tuple[Cut, ...]:
        return tuple(cut(s, physical_of(p), False) for s, p in zip(self.shares, self.plans, strict=True))


def physical_of(plan: PlanData) -> Physical:
    """The program of a plan that was made just now."""
    assert plan.physical is not None
    return plan.physical
