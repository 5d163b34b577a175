"""The memory budget of each placement of a pipeline, so that its plan can be made to fit.

The plan of a placement holds the transfers of all micro-batches at once, and the residuals of one. A schedule
holds the transfers of a few, and the residuals of several. So the needs of a plan are counted from its pieces
and the schedule; if they are too much, the plan is made again with a limit that is lower by the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sbp.errors import MemoryLimitError, SbpError
from sbp.passes.explain.plan import PlanData
from sbp.passes.pipeline.cut import cut
from sbp.passes.pipeline.figures import Sizes
from sbp.passes.pipeline.split import StageShare
from sbp.passes.pipeline.stages import physical_of
from sbp.passes.request import Request
from sbp.passes.schedule.actions import Schedule
from sbp.passes.schedule.memory import Footprint, peaks
from sbp.passes.schedule.orders import GENERATORS, make

TRIES = 3
"""How often a placement is planned again because its plan needs too much."""
FEWEST = "1f1b"
"""The schedule that is reckoned with where another one is to be found."""


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that the placements of a program with micro-batches may need.

    Arguments:
      schedule: the order in which stages run, or one that holds about as much.
      stages: per stage, the position of its placement.
      limit_bytes: per device.
    """

    schedule: Schedule
    stages: tuple[int, ...]
    limit_bytes: float

    def needed(self, share: StageShare, plan: PlanData) -> float:
        """The peak of a device of a placement with such a plan, bytes."""
        sizes = Sizes(cut(share, physical_of(plan), False))
        own = [s == share.place for s in self.stages]
        kept = [sizes.residuals(s) if mine else (0.0, 0.0) for s, mine in enumerate(own)]
        footprint = Footprint(tuple(k for k, _ in kept), tuple(late for _, late in kept))
        held = peaks(self.schedule, footprint)[share.place]
        place = sizes.place(plan.memory_bytes, self.schedule.microbatches)
        return max(place.outside_bytes, place.steady_bytes + held)

    def planned(
        self, share: StageShare, request: Request, plan_one: Callable[[Request], PlanData]
    ) -> PlanData:
        """A plan of a placement that fits, if one is found; else the nearest."""
        plan = plan_one(request)
        need, limit = self.needed(share, plan), plan.memory_bytes
        for _ in range(TRIES):
            limit -= need - self.limit_bytes
            if need <= self.limit_bytes or limit <= 0:
                break
            try:
                other = plan_one(replace(request, most_bytes=limit))
            except MemoryLimitError:
                break  # that it does not fit is said of the program as a whole
            if (less := self.needed(share, other)) >= need:
                break
            plan, need = other, less
        return plan


def budget_of(
    stages: Sequence[int], microbatches: int, schedule: str | Schedule | None, limit_bytes: float
) -> MemoryBudget | None:
    """The budget of a program; None without micro-batches, or with a schedule that does not suit its stages.

    Arguments:
      stages: per stage, the position of its placement.
    """
    if not microbatches:
        return None
    name = schedule if isinstance(schedule, str) and schedule in GENERATORS else FEWEST
    try:
        found = schedule if isinstance(schedule, Schedule) else make(name, stages, microbatches)
    except SbpError:
        return None
    return MemoryBudget(found, tuple(stages), limit_bytes)
