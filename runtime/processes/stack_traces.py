"""Stack traces that JAX's C++ runtime prints when it ends a process because another one is gone.

They are pages long, come from every process, and do not name the cause, which the failed process and the
launcher print. So they are held back until the cause is known, and shown if there is no other.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

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
      kept: lines that were held back.
      has_lost_others: whether JAX has written that it ends the process because others are gone.
      unheard: processes whose heartbeats the coordination service of this process has missed.
    """

    kept: list[str] = field(default_factory=list)
    has_lost_others: bool = False
    unheard: set[int] = field(default_factory=set)
    _is_within: bool = False
    _names_tasks: bool = False

    def shown(self, line: str) -> bool:
        """Whether a line is shown to the user; else it is held back."""
        is_head = _HEAD.match(line) is not None
        is_filler = self._is_within and _FILLER.match(line) is not None
        self._is_within = is_head or is_filler or (bool(self.kept) and _NEXT.match(line) is not None)
        if not self._is_within:
            return True
        self._learn(line, is_filler=is_filler)
        self.kept.append(line)
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
    held = [(index, len(fold.kept)) for index, fold in folds if fold.kept]
    if not held:
        return None
    who = ", ".join(str(index) for index, _ in held)
    many = f"processes {who}, which have" if len(held) > 1 else f"process {who}, which has"
    return f"left out: {sum(n for _, n in held)} lines of the C++ runtime of {many} lost another process"
