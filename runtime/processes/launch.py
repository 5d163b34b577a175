"""Several processes on this machine: what SLURM or Kubernetes does on many, restarts included.

Each runs the user's script or module as `python -m` would, after it has joined the others. When one ends
that should not have, the others are ended too, and the launcher says which it was: a process that is killed
can say nothing, and JAX's runtime ends the others without a word of the user's program. All are started again
as often as was asked for: a script that goes on from its last checkpoint then needs nobody.

When a run that has failed is started again, with how many processes, and after how long.
"""

from __future__ import annotations

import platform
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from sbp.errors import Problem
from sbp.runtime.processes.failure_cause import Reason, first_cause, left_out
from sbp.runtime.processes.flight_recorder import recorded_calls, recorded_exception
from sbp.runtime.processes.lifeline import guard_sessions, lifeline
from sbp.runtime.processes.messages import another_call
from sbp.runtime.processes.workers import LineWriter, Worker, start_worker

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
      failed_process: the process that was to blame for the last end; None before the first.
    """

    most: int
    fewest: int
    processes: int
    count: int = 0
    in_a_row: int = 0
    failed_process: int | None = None

    @property
    def wait_seconds(self) -> float:
        """Before the next start: longer the oftener a run has failed soon.

        >>> [Restarts(9, 2, 2, in_a_row=n).wait_seconds for n in (1, 2, 5, 40)]
        [1.0, 2.0, 16.0, 60.0]
        """
        return min(MOST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** min(max(0, self.in_a_row - 1), 10))

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
        is_lost = is_soon and index == self.failed_process and self.processes > self.fewest
        return replace(
            self,
            processes=self.processes - is_lost,
            count=self.count + 1,
            in_a_row=self.in_a_row + 1 if is_soon else 1,
            failed_process=None if is_lost else index,
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


POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0
"""Between the request to end and the end: for what a process saves then."""
OTHERS_SECONDS = 15.0
"""What the others have to end by themselves, and to say why, when one has ended wrongly."""
ASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What asks the launcher to end: a scheduler, Ctrl-C, and a terminal that is closed."""


@dataclass(frozen=True)
class LaunchRequest:
    """What is run.

    Arguments:
      argv: as behind `python`: "script.py ..." or "-m module ...".
      processes: how many there are.
      devices: CPU devices of each; 0 for what JAX finds.
      port: of process 0, where they meet; 0 for any that is free.
      restarts: how often all are started again after a failure, at most.
      min_processes: how few may go on where a process fails twice in a row; 0 for all.
    """

    argv: tuple[str, ...]
    processes: int
    devices: int = 0
    port: int = 0
    restarts: int = 0
    min_processes: int = 0

    def commands(self, processes: int, folder: Path, pipe: int, job: str) -> list[list[str]]:
        """The command of each process.

        Arguments:
          processes: how many there are now.
          folder: where each leaves what it calls.
          pipe: the descriptor by which each hears that the launcher is gone.
          job: what the run is called.
        """
        meeting = f"127.0.0.1:{self.port or free_port()}"
        member = [sys.executable, "-m", "sbp.runtime.processes.worker", str(pipe), job, meeting]
        more = [str(self.devices), str(folder), *self.argv]
        return [[*member, str(processes), str(i), *more] for i in range(processes)]


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class EndRequest:
    """What the launcher was asked by signals, and who is to hear of it.

    Arguments:
      count: of the signals that ask to end.
      members: the processes that run now.
    """

    count: int = 0
    members: list[Worker] = field(default_factory=list)

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Hands a signal on, once; the second one ends all at once."""
        self.count += 1
        self.hand_on()

    def hand_on(self) -> None:
        """Asks the processes to end: by SIGTERM, upon which they save."""
        for m in self.members:
            if self.count == 1:
                m.ask_to_end()
            elif self.count:
                m.kill()


@dataclass(frozen=True)
class _Failure:
    """Why a run has ended that should not have: the number of the process to blame, and what is said."""

    index: int
    said: str
    lasted_seconds: float


def launch(what: LaunchRequest, out: LineWriter, err: LineWriter) -> int:
    """Runs all processes to their end; 0 if all have ended well, at last.

    What process 0 says is handed on as it is, what others say with their number. SIGTERM, SIGINT and SIGHUP
    ask all of them to end, which may save; a second one ends them at once. What was asked to end is not
    started again. When the launcher is killed its processes end, too.

    Arguments:
      out, err: take lines. The last one of `err` names the process that is to blame.
    """
    name = f"launch {platform.node()}/{uuid.uuid4().hex[:12]}"
    left_restarts = Restarts(what.restarts, what.min_processes or what.processes, what.processes)
    with _listening() as asked, lifeline() as pipe:
        while True:
            processes = left_restarts.processes
            failure = _run(what, processes, asked, pipe, name, out, err)
            if failure is None:
                return 0
            more = None if asked.count else left_restarts.after(failure.index, failure.lasted_seconds)
            if more is not None:
                err(f"{more.text(processes, failure.said)}\n")
                _wait_to_start(asked, more.wait_seconds)
                left_restarts = more
            if more is None or asked.count:
                err(f"{_last_words(failure.said, left_restarts, asked.count)}\n")
                return 1


def _last_words(said: str, restarts: Restarts, asked: int) -> str:
    """What is said of a run that is not started again.

    Arguments:
      said: of the process that is to blame.
      asked: how often the launcher was asked to end.
    """
    if asked > 1:
        return f"all {restarts.processes} processes were ended at once: the launcher was asked to end twice"
    if asked:
        return f"{said}; the launcher was asked to end"
    times = f"{restarts.count} restart{'s' if restarts.count > 1 else ''}"
    return f"{said}, after {times}" if restarts.count else said


@contextmanager
def _listening() -> Iterator[EndRequest]:
    """Hears signals; one that was ignored from the start, as `nohup` does, stays ignored."""
    asked = EndRequest()
    before = {n: signal.signal(n, asked.hear) for n in ASKS if signal.getsignal(n) != signal.SIG_IGN}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_to_start(asked: EndRequest, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not asked.count and time.monotonic() < until:
        time.sleep(POLL_SECONDS)


def _run(
    what: LaunchRequest,
    processes: int,
    asked: EndRequest,
    pipe: int,
    job: str,
    out: LineWriter,
    err: LineWriter,
) -> _Failure | None:
    """Runs all processes once; None if all have ended well."""
    began, members = time.monotonic(), asked.members
    members.clear()
    with TemporaryDirectory(prefix="sbp-launch-") as folder:
        commands = what.commands(processes, Path(folder), pipe, job)
        try:
            for i, command in enumerate(commands):
                members.append(start_worker(i, command, pipe, out, err))
            asked.hand_on()  # to those that were started since
            with guard_sessions(pipe, [m.process.pid for m in members]):
                failed = _watched(members, err)
        except OSError as e:
            index = len(members)
            failed = index, f"process {index} of {processes} cannot be started: {e}"
        finally:
            for m in members:
                if m.runs:
                    m.kill()
            for m in members:
                m.join()
        if failed is None:
            return None
        _say_rest(members, failed[0], err)
        if why := call_difference(Path(folder), processes):
            err(f"{why}\n")
        index, said = failed
        if error := recorded_exception(Path(folder), index):
            said = f"{said}: {error}"
        return _Failure(index, said, time.monotonic() - began)


def _say_rest(members: Sequence[Worker], index: int, err: LineWriter) -> None:
    """Shows what was held back of the process that is to blame, if it is all that there is; else how much."""
    folds = [(m.index, m.fold) for m in members]
    if index < len(folds) and members[index].fold.has_lost_others:
        for line in folds.pop(index)[1].held_lines:
            err(f"[{index}] {line}" if index else line)
    if summary := left_out(folds):
        err(f"{summary}\n")


def call_difference(folder: Path, processes: int) -> Problem | None:
    """What differs between the calls of processes that have ended, as far as they have left them."""
    first, *others = (recorded_calls(folder, i) for i in range(processes))
    for i, (theirs, words) in enumerate(others, 1):
        number = first[0].parts_from(theirs)
        if number is not None:
            here, there = first[0].at(number)[1], theirs.at(number)[1]
            told = first[1].get(here, ()), words.get(there, ())
            return another_call(number, 0, told[0], i, told[1], before=here == there)
    return None


def _watched(members: Sequence[Worker], err: LineWriter) -> tuple[int, str] | None:
    """Waits for all; who is to blame where one ended wrongly, after which the others are ended."""
    while not any(m.has_failed for m in members):
        if not any(m.runs for m in members):
            return None
        time.sleep(POLL_SECONDS)
    time.sleep(2 * POLL_SECONDS)  # who was killed and who saw it end a moment apart
    stopped = [m for m in members if m.is_stopped]
    early = [m.death(set()) for m in members if m.has_failed or m in stopped]
    first = first_cause(early)
    if first.reason <= Reason.FAILED and any(m.runs for m in members):
        err(f"{first.text(len(members))}; the others are ended\n")
    still = [d for d in early if d.code is None]
    for m in stopped:
        m.kill()  # it would not hear anything else
    _wait(members, OTHERS_SECONDS)
    unheard = {i for m in members for i in m.fold.unheard}
    dead = [m.death(unheard) for m in members if not m.runs and m not in stopped]
    for m in members:
        m.ask_to_end()
    _wait(members, GRACE_SECONDS)
    found = first_cause([*still, *dead])
    return found.index, found.text(len(members))


def _wait(members: Sequence[Worker], seconds: float) -> None:
    """Until all have ended, at most so long."""
    until = time.monotonic() + seconds
    while any(m.runs for m in members) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
