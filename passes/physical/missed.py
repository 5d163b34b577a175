"""What the search under a limit does not count: bytes that the evaluator finds, and when.

The search counts values (plan/room.py), the evaluator what XLA's kernels leave, in XLA's order. Where a plan
that keeps the limit by the count does not keep it by the evaluator, less room at the time of its peak is all
that is wrong: at other times, where the limit binds, nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.program import Compute, Version
from sbp.passes.plan.budget import Budget, Load
from sbp.passes.plan.room import RoomModel
from sbp.passes.program.graph import Const

AROUND = 0.01
"""Before and after the time of the peak, as a part of the program."""


def missed_load(evaluator: Evaluator, model: RoomModel, budget: Budget, states: Sequence[int]) -> Load | None:
    """What is not counted around the time of a plan's peak; None where more is counted there, or nothing says
    when it is.

    Arguments:
      evaluator: of the plan's program.
      states: of the model, what was chosen.
    """
    at = time_of_peak(evaluator, model)
    if at is None:
        return None
    around = max(1, round(AROUND * model.end))
    start, end = at - around, at + around + 1
    more = evaluator.peak_bytes() - budget.peak_bytes(states, start, end)
    return Load(-1, start, end, np.array([more])) if more > 0.0 else None


def time_of_peak(evaluator: Evaluator, model: RoomModel) -> int | None:
    """When a plan has its peak, by the times of the model: when the last is made of what is there."""
    p = evaluator.physical
    makers = {v: s.node.id for s in p.steps if isinstance(s, Compute) for v in s.node.outputs}
    ends: set[Version] = {*zip(p.graph.inputs, p.inputs, strict=True)}
    ends |= {(x, nd) for x, nd in zip(p.graph.outputs, p.outputs, strict=True) if not isinstance(x, Const)}
    made = (makers.get(x.version[0], -1) for x in evaluator.at_peak if x.version not in ends)
    times = model.times
    return max((times[i][0] for i in made if i in times), default=None)
