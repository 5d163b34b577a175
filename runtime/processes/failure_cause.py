"""Finds the process that made a run fail: not simply the first that ended, nor the first by number.

A failing process ends the others too, and some of these may end before it: a process that raises notifies the
others, and waits until they have the notice. So how a process ended counts first, and when it ended second.

Stack traces that JAX's C++ runtime prints when it ends a process because another one is gone are pages long,
come from every process, and do not name the cause. They are held back until the cause is known, and shown if
there is no other.
"""

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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


def first_cause(deaths: Sequence[Death]) -> Death:
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


_HEAD = re.compile(r"[EFWI]\d{4} [\d:.]+ +\d+ (?:coordination_\w+|preemption_\w+|client)\.(?:cc|h):\d+\] ")
_NEXT = re.compile(
    r"Additional GRPC error|:[A-Z_]+:|=== Source Location|external/|RPC: |\*\*\* Check failure stack|"
    r" +@ +0x[0-9a-f]+ |The (?:following )?tasks |\. This is only expected|\.? ?\[type\.googleapis"
    r"|INTERNAL: Barrier failed|Barrier result: |This suggests that the workers are out of sync"
)
_FILLER = re.compile(r"\s*\d*\s*$")
"""Empty lines, and the numbers of tasks, each on its own line."""
_LOST = "Terminating process because the JAX distributed service detected fatal errors"
_UNHEARD = "unhealthy (stopped sending heartbeats)"


@dataclass
class TraceFold:
    """The lines of one process.

    Arguments:
      held_lines: lines that were held back.
      has_lost_others: whether JAX has written that it ends the process because others are gone.
      unheard: processes whose heartbeats the coordination service of this process has missed.
    """

    held_lines: list[str] = field(default_factory=list)
    has_lost_others: bool = False
    unheard: set[int] = field(default_factory=set)
    _is_within: bool = False
    _names_tasks: bool = False

    def shows(self, line: str) -> bool:
        """Whether a line is shown to the user; else it is held back."""
        is_head = _HEAD.match(line) is not None
        is_filler = self._is_within and _FILLER.match(line) is not None
        self._is_within = is_head or is_filler or (bool(self.held_lines) and _NEXT.match(line) is not None)
        if not self._is_within:
            return True
        self._learn(line, is_filler=is_filler)
        self.held_lines.append(line)
        return False

    def _learn(self, line: str, *, is_filler: bool) -> None:
        self.has_lost_others |= _LOST in line
        if self._names_tasks and is_filler and line.strip():
            self.unheard.add(int(line))
        else:
            self._names_tasks = _UNHEARD in line


def left_out(folds: Iterable[tuple[int, TraceFold]]) -> str | None:
    """One line in place of those that were held back; None if there are none.

    >>> left_out([(0, TraceFold()), (2, TraceFold(["a", "b"]))])
    'left out: 2 lines of the C++ runtime of process 2, which has lost another process'
    """
    held = [(index, len(fold.held_lines)) for index, fold in folds if fold.held_lines]
    if not held:
        return None
    who = ", ".join(str(index) for index, _ in held)
    many = f"processes {who}, which have" if len(held) > 1 else f"process {who}, which has"
    return f"left out: {sum(n for _, n in held)} lines of the C++ runtime of {many} lost another process"
