"""Out of memory: the runtime's error becomes one that says which tensors were alive, from the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from sbp.compat.errors import EXHAUSTED, is_exhausted
from sbp.errors import MemoryLimitError, SbpError
from sbp.passes.explain.memory import ran_out
from sbp.passes.explain.plan import PlanData
from sbp.passes.face import PipelinePlan, Plan


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


class HasPlan(Protocol):
    """What is built for one signature of a program, as far as its plan goes."""

    @property
    def plan(self) -> Plan | PipelinePlan:
        """What it does."""

    @property
    def donate(self) -> tuple[int, ...]:
        """Positions of arguments whose memory the results may take."""


def check_memory(error: BaseException, built: HasPlan) -> None:
    """Says more of an error of the runtime, if that is too little memory.

    Raises:
      MemoryLimitError: with the tensors that are alive at the peak.
    """
    if is_exhausted(error) and not isinstance(error, SbpError):
        raise out_of_memory(error, built.plan, built.donate) from error


@contextmanager
def memory_explained(built: HasPlan) -> Iterator[None]:
    """What runs in it raises what `check_memory` says.

    Raises:
      MemoryLimitError: with the tensors that are alive at the peak.
    """
    try:
        yield
    except RuntimeError as e:
        check_memory(e, built)
        raise
