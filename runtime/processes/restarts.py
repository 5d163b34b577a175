"""When a run that has failed is started again, with how many processes, and after how long."""

from __future__ import annotations

from dataclasses import dataclass, replace

SOON_SECONDS = 600.0
"""A run that fails sooner has failed "in a row" with the one before it."""
FIRST_WAIT_SECONDS = 1.0
MOST_WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class Restarts:
    """What is left of the restarts of a launch.

    Arguments:
      most: how many there may be.
      fewest: processes with which it is still started.
      processes: with which it runs now.
      count: of the restarts so far.
      in_a_row: of these, those that a run has failed soon after.
      failed: the process that was to blame for the last end; None before the first.
    """

    most: int
    fewest: int
    processes: int
    count: int = 0
    in_a_row: int = 0
    failed: int | None = None

    @property
    def wait_seconds(self) -> float:
        """Before the next start: longer the oftener a run has failed soon.

        >>> [Restarts(9, 2, 2, in_a_row=n).wait_seconds for n in (1, 2, 5, 40)]
        [1.0, 2.0, 16.0, 60.0]
        """
        exponent = min(max(0, self.in_a_row - 1), 10)
        return min(MOST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0**exponent)

    def after(self, index: int, lasted_seconds: float) -> Restarts | None:
        """What is left after a failure; None if it is not started again.

        The run goes on with one process fewer when the same process is to blame twice in a row: its place is
        taken for lost, as that of a device that is broken, or of memory that does not suffice for all.

        Arguments:
          index: of the process that is to blame.
          lasted_seconds: of the run that has failed.
        """
        if self.count >= self.most:
            return None
        is_soon = lasted_seconds < SOON_SECONDS
        is_lost = is_soon and index == self.failed and self.processes > self.fewest
        return replace(
            self,
            processes=self.processes - is_lost,
            count=self.count + 1,
            in_a_row=self.in_a_row + 1 if is_soon else 1,
            failed=None if is_lost else index,
        )

    def text(self, before: int, what: str) -> str:
        """What is said of a restart.

        Arguments:
          before: how many processes there were.
          what: has happened to one of them.

        >>> Restarts(5, 1, 2, 2, 1).text(2, "process 1 of 2 was killed by SIGKILL")
        'restart 2 of 5: process 1 of 2 was killed by SIGKILL; all 2 are started again in 1 s'
        >>> Restarts(5, 1, 2, 3, 2).text(3, "process 1 of 3 ended with code 1")
        'restart 3 of 5: process 1 of 3 ended with code 1, twice in a row; 2 are started instead of 3 in 2 s'
        """
        again = f"all {before} are started again"
        if self.processes < before:
            again = f"{self.processes} {'is' if self.processes == 1 else 'are'} started instead of {before}"
            what = f"{what}, twice in a row"
        if before == 1:
            again = "it is started again"
        return f"restart {self.count} of {self.most}: {what}; {again} in {self.wait_seconds:.0f} s"
