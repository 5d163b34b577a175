"""Out of memory: the runtime's error becomes one that says which tensors were alive, from the plan."""

from __future__ import annotations

from collections.abc import Sequence

from sbp.errors import MemoryLimitError
from sbp.passes.explain.memory import ran_out
from sbp.passes.explain.plan import PlanData
from sbp.passes.face import PipelinePlan, Plan

EXHAUSTED = "RESOURCE_EXHAUSTED"


def is_exhausted(error: BaseException) -> bool:
    """Whether an error of JAX says that a device, or XLA's compiler, found too little memory."""
    return EXHAUSTED in str(error)


def out_of_memory(error: BaseException, plan: Plan, donated: Sequence[int]) -> MemoryLimitError:
    """The error of a program that found too little memory, when it was compiled or when it ran.

    Arguments:
      donated: positions of arguments whose memory the results may take.
    """
    line = next((x.strip() for x in str(error).splitlines() if EXHAUSTED in x), EXHAUSTED)
    part: PlanData = plan
    given = tuple(donated)
    if isinstance(plan, PipelinePlan):  # the placement that needs most
        part = max(plan.stages, key=lambda p: p.memory_bytes)
        given = part.donated
    return MemoryLimitError(ran_out(part, line, given))
