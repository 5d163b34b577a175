"""Finds the process that made a run fail: not simply the first that ended, nor the first by number.

A failing process ends the others too, and some of these may end before it: a process that raises notifies the
others, and waits until they have the notice. So how a process ended counts first, and when it ended second.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

FOLLOWS = 3
"""The exit code of a process that ends since another one does: it is not to blame."""


class Reason(IntEnum):
    """How a process ended; a smaller value means more likely the cause."""

    KILLED = 0
    """By a signal, from outside or by its own fault. Who loses another process ends by SIGABRT or a code."""
    STOPPED = 1
    """It has not ended, but runs no more: its heartbeats are missed, after which JAX ends the others."""
    FAILED = 2
    """It has ended by itself, with a code that is no success, or by SIGABRT of its own."""
    UNHEARD = 3
    """Its heartbeats were missed, though it ran: it was stopped for a while, or cut off."""
    LEFT = 4
    """It has ended with success, but too early: others still ran, and have failed without it."""
    FOLLOWED = 5
    """It has ended since it has lost another process."""


@dataclass(frozen=True)
class Death:
    """The end of a process.

    Arguments:
      index: of the process.
      code: as Python has it: negative for a signal. None: it has not ended, but is stopped.
      at_seconds: when, by the monotonic clock.
      has_lost_others: whether JAX has written that it ends it because others are gone.
      is_unheard: whether the coordination service has missed its heartbeats.
    """

    index: int
    code: int | None
    at_seconds: float = 0.0
    has_lost_others: bool = False
    is_unheard: bool = False

    @property
    def reason(self) -> Reason:
        """How it ended."""
        if self.code is None:
            return Reason.STOPPED
        if self.code < 0 and self.code != -signal.SIGABRT:
            return Reason.KILLED
        if self.code == FOLLOWS or self.has_lost_others:
            return Reason.UNHEARD if self.is_unheard else Reason.FOLLOWED
        return Reason.FAILED if self.code else Reason.LEFT

    def text(self, processes: int) -> str:
        """The process and its end, in words.

        Arguments:
          processes: how many there were.

        >>> Death(1, -9).text(2), Death(0, 1).text(2)
        ('process 1 of 2 was killed by SIGKILL', 'process 0 of 2 ended with code 1')
        """
        how = {
            Reason.STOPPED: "was stopped, and did not answer",
            Reason.UNHEARD: "was not heard of: its heartbeats were missed",
            Reason.LEFT: "ended with code 0, while others still ran",
            Reason.FOLLOWED: "has lost another process, and nothing says which",
        }.get(self.reason)
        return f"process {self.index} of {processes} {how or code_text(self.code or 0)}"


def blamed(deaths: Sequence[Death]) -> Death:
    """The cause among several ended processes: by how each ended, then by when.

    Arguments:
      deaths: of all that ended by themselves; at least one without success.
    """
    failed_at = min(d.at_seconds for d in deaths if d.code != 0)
    return min(
        (d for d in deaths if d.code != 0 or d.at_seconds <= failed_at),
        key=lambda d: (d.reason, d.at_seconds, d.index),
    )


def code_text(code: int) -> str:
    """An exit code in words.

    >>> code_text(1), code_text(-9), code_text(-40)
    ('ended with code 1', 'was killed by SIGKILL', 'was killed by signal 40')
    """
    if code >= 0:
        return f"ended with code {code}"
    known = {int(s): s.name for s in signal.Signals}
    return f"was killed by {known.get(-code, f'signal {-code}')}"
