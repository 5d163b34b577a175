"""What the search under a limit does not count: bytes that the evaluator finds, and when.

The search counts values (plan/room.py), the evaluator what XLA's kernels leave, in XLA's order. Where a plan
that keeps the limit by the count does not keep it by the evaluator, less room at the time of its peak is all
that is wrong: at other times, where the limit binds, nothing changes.
"""

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.program import Compute, Version
from sbp.passes.plan import constants
from sbp.passes.plan.budget import Budget, Load
from sbp.passes.plan.room import RoomModel
from sbp.passes.program.graph import Const
from sbp.signature import NdSbp


def missed_loads(
    evaluator: Evaluator, model: RoomModel, budget: Budget, states: Sequence[int]
) -> tuple[Load, ...]:
    """What is not counted around the time of a plan's peak; nothing where more is counted there, or nothing
    says when it is.

    Arguments:
      evaluator: of the plan's program.
      states: of the model, what was chosen.
    """
    at = time_of_peak(evaluator, model)
    if at is None:
        return ()
    around = max(1, round(constants.NEAR_PART * model.end))
    start, end = at - around, at + around + 1
    waiting = tuple(unsent_loads(evaluator, model, budget, states, end))
    counted = Budget((*budget.loads, *waiting), budget.limit).peak_bytes(states, start, end)
    more = evaluator.peak_bytes() - counted
    return (*waiting, Load(-1, start, end, np.array([more]))) if more > 0.0 else waiting


def unsent_loads(
    evaluator: Evaluator, model: RoomModel, budget: Budget, states: Sequence[int], end: int
) -> Iterator[Load]:
    """What waits until it is sent with others, such as gradients of several layers: choosing to send it
    frees nothing before.

    Arguments:
      end: of the time until which it was seen to wait.
    """
    own = set(map(id, model.loads))
    counted = {x.node: x.end for x in budget.loads if id(x) not in own}
    there, waits = {x.version for x in evaluator.at_peak}, set[Hashable]()
    sent = dict[int, tuple[Hashable, NdSbp]]()
    for v, once in model.boxed_once.items():
        lies, made = model.states[once.copy], once.supply.needs[states[once.supply.variable]]
        value = model.graph.values[v]
        sent[v] = (value.shape, str(value.dtype), made), made
        if states[once.copy] < len(lies) // 2 and (v, made) in there:
            waits.add(sent[v][0])
    for v, (kind, made) in sent.items():
        # Another one that would be sent waits too, as those of other layers do.
        once = model.boxed_once[v]
        half = len(model.states[once.copy]) // 2
        start = max(once.at + 1, counted.get(once.copy, 0))
        is_gone = states[once.copy] < half and (v, made) not in there
        if kind in waits and not is_gone and start < end:
            sizes = np.zeros(2 * half)
            sizes[:half] = model.held(v, (made,))[0]
            yield Load(once.copy, start, end, sizes)


def time_of_peak(evaluator: Evaluator, model: RoomModel) -> int | None:
    """When a plan has its peak, by the times of the model: when the last is made of what is there."""
    p = evaluator.physical
    makers = {v: s.node.id for s in p.steps if isinstance(s, Compute) for v in s.node.outputs}
    ends: set[Version] = {*zip(p.graph.inputs, p.inputs, strict=True)}
    ends |= {(x, nd) for x, nd in zip(p.graph.outputs, p.outputs, strict=True) if not isinstance(x, Const)}
    made = (makers.get(x.version[0], -1) for x in evaluator.at_peak if x.version not in ends)
    times = model.times
    return max((times[i][0] for i in made if i in times), default=None)
