"""What happens to a process at some operation on files: it is killed or stopped, the disk fails or is full.

Python reports each operation to audit hooks before it is done (PEP 578), those of orbax's Python included. So
the n-th one of a save is the same in each run of a history. What TensorStore does in C++ is not among them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

CHANGES = ("os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir")
LOOKS = ("os.listdir", "os.scandir")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def _kill(_: bool) -> bool:
    os.kill(os.getpid(), signal.SIGKILL)
    return True


def _stop(_: bool) -> bool:
    os.kill(os.getpid(), signal.SIGSTOP)
    return True


def _fail(_: bool) -> bool:
    raise OSError(errno.EIO, "Input/output error")


def _fill(is_growth: bool) -> bool:
    if is_growth:
        raise OSError(errno.ENOSPC, "No space left on device")
    return False


ACTIONS: dict[str, Callable[[bool], bool]] = {"kill": _kill, "stop": _stop, "fail": _fail, "full": _fill}
"""What is done at an operation, which may be one that takes space; whether that was all."""


def _path(event: str, arguments: tuple[Any, ...]) -> str:
    """What an operation is done to; "" for what is known by its number alone."""
    where = arguments[0]
    if not isinstance(where, str | os.PathLike):
        return ""
    folder = arguments[-1] if event in CHANGES else None
    if not isinstance(folder, int) or folder < 0:
        return os.fspath(where)
    with contextlib.suppress(OSError):  # shutil.rmtree names what lies in an open folder
        return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), where)
    return ""


class Faults:
    """Counts the operations on files below a folder, and does something at one of them."""

    def __init__(self) -> None:
        self.folder = ""
        self.count = 0
        self.wanted: tuple[str, int] | None = None
        self.is_armed = False
        sys.addaudithook(self._hear)

    def arm(self, fault: list[Any] | None) -> None:
        """Begins to count.

        Arguments:
          fault: an action, and at the how manieth operation; "full" lasts, the others happen once.
        """
        self.count, self.wanted = 0, None if fault is None else (fault[0], fault[1])
        self.is_armed = True

    def disarm(self) -> int:
        """Ends it; how many operations there were."""
        self.is_armed, self.wanted = False, None
        return self.count

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_armed or (event != "open" and event not in CHANGES and event not in LOOKS):
            return
        if not _path(event, arguments).startswith(self.folder):
            return
        if threading.current_thread().name == "sbp lease":  # beats come when they come
            return
        self.count += 1
        wanted = self.wanted
        if wanted is None or self.count < wanted[1]:
            return
        is_growth = event in ("os.mkdir", "os.link") or (event == "open" and bool(arguments[2] & WRITING))
        if wanted[0] != "full":
            self.wanted = None
        ACTIONS[wanted[0]](is_growth)
