"""Several processes on this machine, for development: what SLURM or Kubernetes does on many.

Each runs the user's script or module as `python -m` would, after it has joined the others. When one ends
that should not have, the others are ended too, and the launcher says which it was: a process that is killed
can say nothing, and JAX's runtime ends the others without a word of the user's program.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import IO

from sbp.errors import Problem
from sbp.runtime.processes.history import left
from sbp.runtime.processes.messages import another_call

POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0
"""Between the request to end and the end: for what a process saves then."""
OUTRIGHT = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)
"""What ends a process from outside, or by its own fault; who sees it end is ended by JAX, with SIGABRT."""
FOLLOWS = 3
"""The exit code of a process that ends since another one does: it is not to blame."""
OTHERS_SECONDS = 15.0
"""What the others have to end by themselves, and to say why, when one has ended wrongly."""


@dataclass(frozen=True)
class LaunchRequest:
    """What is run.

    Arguments:
      argv: as behind `python`: "script.py ..." or "-m module ...".
      processes: how many there are.
      devices: CPU devices of each; 0 for what JAX finds.
      port: of process 0, where they meet; 0 for any that is free.
    """

    argv: tuple[str, ...]
    processes: int
    devices: int = 0
    port: int = 0

    def commands(self, folder: Path) -> list[list[str]]:
        """The command of each process.

        Arguments:
          folder: where each leaves what it calls.
        """
        meeting = f"127.0.0.1:{self.port or free_port()}"
        member = [sys.executable, "-m", "sbp.runtime.processes.member", meeting, str(self.processes)]
        more = [str(self.devices), str(folder), *self.argv]
        return [[*member, str(i), *more] for i in range(self.processes)]


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass(frozen=True)
class Member:
    """One process, and who hands on what it says.

    Arguments:
      index: of the process.
      process: as Python has it.
      pumps: threads that hand on its two streams.
    """

    index: int
    process: subprocess.Popen[str]
    pumps: tuple[threading.Thread, ...]

    def end(self, number: signal.Signals) -> None:
        """Sends it a signal, if it still runs."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    @property
    def is_stopped(self) -> bool:
        """Whether it runs no more and has not ended, as SIGSTOP leaves it: then it hears no other signal."""
        if not self.runs:
            return False
        asked = ["ps", "-o", "stat=", "-p", str(self.process.pid)]
        with suppress(OSError):  # no ps here
            return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.startswith("T")
        return False


def launch(what: LaunchRequest, out: Callable[[str], object], err: Callable[[str], object]) -> int:
    """Runs all processes to their end; 0 if all have ended well.

    What process 0 says is handed on as it is, what others say with their number. SIGTERM and SIGINT go to all
    of them, which may save and end; a second one ends them at once.

    Arguments:
      out, err: take lines.
    """
    with TemporaryDirectory(prefix="sbp-launch-") as folder:
        return _launched(what, Path(folder), out, err)


def _launched(
    what: LaunchRequest, folder: Path, out: Callable[[str], object], err: Callable[[str], object]
) -> int:
    members = [_started(i, command, out, err) for i, command in enumerate(what.commands(folder))]
    asked: list[signal.Signals] = []

    def hand_on(number: int, _: FrameType | None) -> None:
        asked.append(signal.Signals(number))
        for m in members:
            m.end(asked[-1] if len(asked) == 1 else signal.SIGKILL)

    before = {n: signal.signal(n, hand_on) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        failed = _watched(members, err)
    finally:
        for m in members:
            if m.runs:
                m.process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)
    for m in members:
        for pump in m.pumps:
            pump.join()
    if failed is not None and (why := parted(folder, what.processes)):
        err(f"{why}\n")
    return 0 if failed is None else 1


def parted(folder: Path, processes: int) -> Problem | None:
    """What differs between the calls of processes that have ended, as far as they have left them."""
    first, *others = (left(folder, i) for i in range(processes))
    for i, (theirs, words) in enumerate(others, 1):
        number = first[0].parts_from(theirs)
        if number is not None:
            here, there = first[0].at(number)[1], theirs.at(number)[1]
            told = first[1].get(here, ()), words.get(there, ())
            return another_call(number, 0, told[0], i, told[1], before=here == there)
    return None


def _started(
    index: int, command: Sequence[str], out: Callable[[str], object], err: Callable[[str], object]
) -> Member:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    name = f"[{index}] " if index else ""

    def pump(stream: IO[str] | None, to: Callable[[str], object]) -> threading.Thread:
        assert stream is not None

        def work() -> None:
            for line in stream:
                to(name + line)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    return Member(index, process, (pump(process.stdout, out), pump(process.stderr, err)))


def _watched(members: Sequence[Member], err: Callable[[str], object]) -> Member | None:
    """Waits for all; the first that ended wrongly, after which the others are ended."""
    while all(m.runs or m.process.returncode == 0 for m in members):
        if not any(m.runs for m in members):
            return None
        time.sleep(POLL_SECONDS)
    time.sleep(2 * POLL_SECONDS)  # who was killed and who saw it end a moment apart
    first, said = _blamed(members)
    err(f"{said}; the others are ended\n")
    left = [m for m in members if m.runs]
    for m in left:
        if m.is_stopped:
            m.process.kill()  # it would not hear anything else
    _wait(left, OTHERS_SECONDS)
    for m in left:
        m.end(signal.SIGTERM)
    _wait(left, GRACE_SECONDS)
    if left:
        err(f"{said}\n")  # again, behind what they have said
    return first


def _blamed(members: Sequence[Member]) -> tuple[Member, str]:
    """Who is the reason that some have ended wrongly, and what is said of it. One that was stopped has missed
    its heartbeats, after which JAX ends the others; else who was killed, rather than who raised."""
    stopped = [m for m in members if m.is_stopped]
    ended = [m for m in members if not m.runs and m.process.returncode != 0]
    first = min(stopped or ended, key=_by_blame)
    what = "was stopped, and did not answer" if stopped else how(first.process.returncode or 0)
    return first, f"process {first.index} of {len(members)} {what}"


def _by_blame(member: Member) -> tuple[bool, bool, bool, int]:
    code = member.process.returncode or 0
    return code not in OUTRIGHT, code == FOLLOWS, code > 0, member.index


def _wait(members: Sequence[Member], seconds: float) -> None:
    """Until all have ended, at most so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(m.runs for m in members):
        time.sleep(POLL_SECONDS)


def how(code: int) -> str:
    """How a process has ended, in words.

    >>> how(1), how(-9)
    ('ended with code 1', 'was killed by SIGKILL')
    """
    return f"ended with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
