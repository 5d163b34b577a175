"""Out of memory: the runtime's error becomes one that names the tensors alive at the peak, from the plan."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from sbp.compat.errors import EXHAUSTED, is_exhausted
from sbp.errors import MemoryLimitError, SbpError
from sbp.passes.explain.memory import ran_out
from sbp.passes.face import Plan


def out_of_memory(error: BaseException, plan: Plan, donated: Sequence[int]) -> MemoryLimitError:
    """The error of a program that ran out of memory, while it was compiled or while it ran.

    Arguments:
      donated: positions of arguments whose memory the results may take.
    """
    line = next((x.strip() for x in str(error).splitlines() if EXHAUSTED in x), EXHAUSTED)
    part = max(plan.parts, key=lambda p: p.memory_bytes)
    return MemoryLimitError(ran_out(part, line, part.donated if plan.stages else tuple(donated)))


class HasPlan(Protocol):
    """A compiled signature of a program, with its plan."""

    @property
    def plan(self) -> Plan:
        """Its plan."""

    @property
    def donate(self) -> tuple[int, ...]:
        """Positions of arguments whose memory the results may take."""


def check_memory(error: BaseException, built: HasPlan) -> None:
    """Raises a better error if an error of the runtime means that memory ran out.

    Raises:
      MemoryLimitError: with the tensors that are alive at the peak.
    """
    if is_exhausted(error) and not isinstance(error, SbpError):
        raise out_of_memory(error, built.plan, built.donate) from error


@contextmanager
def memory_explained(built: HasPlan) -> Iterator[None]:
    """A context in which errors of memory are explained as in `check_memory`.

    Raises:
      MemoryLimitError: with the tensors that are alive at the peak.
    """
    try:
        yield
    except RuntimeError as e:
        check_memory(e, built)
        raise
