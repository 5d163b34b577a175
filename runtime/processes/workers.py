"""The processes of a launch: each in a session of its own, with threads that forward its output."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, TypeAlias

from sbp.runtime.processes.failure_cause import Death, TraceFold

LineWriter: TypeAlias = Callable[[str], object]
DRAIN_SECONDS = 2.0
"""For what an ended process has said last; one that it has left behind may hold its streams for longer."""


@dataclass
class Worker:
    """One process of a launch.

    Arguments:
      index: of the process.
      process: as Python has it.
      fold: holds back stack traces of the C++ runtime.
      is_asked: whether it was asked to end.
      ended_seconds: when it ended, by the monotonic clock; None while it runs.
      threads: forward its two streams, and wait for its end.
    """

    index: int
    process: subprocess.Popen[str]
    fold: TraceFold = field(default_factory=TraceFold)
    is_asked: bool = False
    ended_seconds: float | None = None
    threads: list[threading.Thread] = field(default_factory=list)

    def ask_to_end(self) -> None:
        """Sends SIGTERM, once, if it still runs: a second signal may end it before it has saved."""
        if not self.is_asked:
            self.is_asked = True
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.ended_seconds is None

    @property
    def has_failed(self) -> bool:
        """Whether it ended without success."""
        return not self.runs and self.process.returncode != 0

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped, as SIGSTOP leaves it: then it takes no other signal."""
        if not self.runs:
            return False
        asked = ["ps", "-o", "stat=", "-p", str(self.process.pid)]
        with suppress(OSError):  # no ps here
            return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.startswith("T")
        return False

    def death(self, unheard: set[int]) -> Death:
        """How it ended, or that it is stopped.

        Arguments:
          unheard: processes whose heartbeats were missed.
        """
        code = None if self.runs else self.process.returncode
        at = time.monotonic() if self.ended_seconds is None else self.ended_seconds
        return Death(self.index, code, at, self.fold.has_lost_others, self.index in unheard)

    def kill(self) -> None:
        """Ends it and all processes that it has started, at once."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def join(self) -> None:
        """Waits until its whole output was forwarded."""
        until = time.monotonic() + DRAIN_SECONDS
        for thread in self.threads:
            thread.join(max(0.0, until - time.monotonic()))


def start_worker(index: int, command: Sequence[str], pipe: int, out: LineWriter, err: LineWriter) -> Worker:
    """Starts a process.

    Arguments:
      pipe: a file descriptor that it inherits.
      out, err: take its lines.

    Raises:
      OSError: if it cannot be started.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        pass_fds=(pipe,),
        start_new_session=True,  # Ctrl-C in a terminal goes to the launcher alone, which hands it on once
    )
    member = Worker(index, process)

    def await_end() -> None:
        code = process.wait()
        if code:
            member.kill()  # what it has started and left behind
        member.ended_seconds = time.monotonic()

    name = f"[{index}] " if index else ""
    work = [
        threading.Thread(target=_pump, args=(process.stdout, out, name, None), daemon=True),
        threading.Thread(target=_pump, args=(process.stderr, err, name, member.fold), daemon=True),
        threading.Thread(target=await_end, daemon=True),
    ]
    member.threads.extend(work)
    for thread in work:
        thread.start()
    return member


def _pump(stream: IO[str] | None, to: LineWriter, name: str, fold: TraceFold | None) -> None:
    """Forwards a stream line by line to its end, even if nobody reads it: the writer must not wait."""
    assert stream is not None
    with stream:
        for line in stream:
            if fold is None or fold.shows(line):
                with suppress(OSError, ValueError):
                    to(name + line)
