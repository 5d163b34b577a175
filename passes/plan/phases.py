"""What planning does, phase by phase: when each began, and what it took.

A limit on time is kept by what has begun before it is over. So every phase is noted, with whether a plan can
be had without it; the clock can be another one than that of the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlanningPhase:
    """A phase of planning.

    Arguments:
      name: what is done.
      needed: whether there is no plan without it.
      begun: by the clock.
      seconds: that it took.
      inside: of how many others it is a part.
    """

    name: str
    needed: bool
    begun: float
    seconds: float
    inside: int = 0


class Phases:
    """The phases of one planning, in the order in which they ended.

    Arguments:
      now: the clock, in seconds.

    `optional_seconds` is what was taken by that which is not needed for a plan.

    >>> ticks = iter([3.0, 5.0])
    >>> phases = Phases(lambda: next(ticks))
    >>> with phases.of("search"):
    ...     pass
    >>> phases.done
    [PlanningPhase(name='search', needed=True, begun=3.0, seconds=2.0, inside=0)]
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.done: list[PlanningPhase] = []
        self.optional_seconds = 0.0
        self._open = self._optional = 0

    @contextmanager
    def of(self, name: str, *, needed: bool = True) -> Iterator[None]:
        """Notes what is done meanwhile.

        Arguments:
          needed: whether there is no plan without it.
        """
        begun, inside, optional = self.now(), self._open, self._optional
        self._open, self._optional = inside + 1, optional + (not needed)
        try:
            yield
        finally:
            self._open, self._optional = inside, optional
            seconds = self.now() - begun
            self.done.append(PlanningPhase(name, needed, begun, seconds, inside))
            if not needed and not optional:
                self.optional_seconds += seconds

    def again(self) -> Phases:
        """None yet, by the same clock."""
        return type(self)(self.now)
