"""The end of the processes of a launch when the launcher is gone, even where it was killed: within 2 seconds.

Only the launcher has the end of a pipe that is written to, and nobody writes: who reads from it hears when
the launcher is gone, however that went. A thread of each process does. A process that was stopped, or holds
Python's lock, has no thread that runs: for these a shell waits beside them, and ends them.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_GUARD = 'read -r nothing; kill -s KILL -- "$@"'


@contextmanager
def lifeline() -> Iterator[int]:
    """A descriptor at which others hear of the end of this process."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


def end_with_launcher(pipe: int) -> None:
    """Ends this process, and those that it has started in its session, when the launcher is gone.

    Arguments:
      pipe: the descriptor where that is heard; the processes that this one starts do not get it.
    """
    os.set_inheritable(pipe, False)
    threading.Thread(target=_wait, args=(pipe,), daemon=True, name="sbp launcher").start()


def _wait(pipe: int) -> None:
    os.read(pipe, 1)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def guard_sessions(pipe: int, sessions: Sequence[int]) -> Iterator[None]:
    """Ends processes that lead sessions, and all that these have started, when this process is gone.

    Arguments:
      pipe: the descriptor where that is heard.
      sessions: their numbers.
    """
    command = ["sh", "-c", _GUARD, "sh", *(f"-{number}" for number in sessions)]
    guard = subprocess.Popen(command, stdin=pipe, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        guard.kill()
        guard.wait()
