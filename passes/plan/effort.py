"""Effort: work that is counted, so that a search is the same on every machine, however busy it is.

What a search does is counted in seconds of a core of 2023 that does nothing else: so many for each cell of a
table that a sweep goes through, for each node of a program that is looked at. A search ends when it has done
so much. A limit on time is another thing: it cuts a search off between two counted steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace


class WorkCount:
    """Work that is done.

    Arguments:
      is_over: whether the time of the user is over.

    `is_cut` says whether that has ended anything.
    """

    def __init__(self, is_over: Callable[[], bool] = lambda: False) -> None:
        self.seconds, self.is_cut, self._is_over = 0.0, False, is_over

    def add(self, seconds: float) -> None:
        """Counts work."""
        self.seconds += seconds

    def is_over(self) -> bool:
        """Whether a search has to end now, wherever it is."""
        self.is_cut = self.is_cut or self._is_over()
        return self.is_cut


@dataclass(frozen=True)
class Effort:
    """What a search, or a part of it, may do.

    Arguments:
      count: of all work of one planning.
      end: where this part ends, by the count.

    >>> effort = Effort().at_most(2.0)
    >>> effort.count.add(1.5)
    >>> effort.seconds_left, effort.at_most(9.0).seconds_left, effort.part(0.5).seconds_left, effort.is_spent
    (0.5, 0.5, 0.25, False)
    """

    count: WorkCount = field(default_factory=WorkCount, compare=False)
    end: float = math.inf

    @property
    def seconds_left(self) -> float:
        """Seconds of work that may still be done."""
        return 0.0 if self.count.is_over() else max(0.0, self.end - self.count.seconds)

    @property
    def is_spent(self) -> bool:
        """Whether nothing may be done any more."""
        return self.count.seconds >= self.end or self.count.is_over()

    def at_most(self, seconds: float) -> Effort:
        """A part of so many seconds, or of what is left if that is less."""
        return replace(self, end=min(self.end, self.count.seconds + seconds))

    def part(self, share: float) -> Effort:
        """A part of what is left."""
        return self.at_most(share * self.seconds_left)


def until_over(time_limit_seconds: float | None) -> Effort:
    """Effort that is cut off after so many seconds from now; None for never."""
    if time_limit_seconds is None:
        return Effort()
    end = time.monotonic() + time_limit_seconds
    return Effort(WorkCount(lambda: time.monotonic() >= end))
