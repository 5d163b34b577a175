"""A terminal that is not there: what a program shows where it believes to be on one."""

import contextlib
import fcntl
import os
import pty
import struct
import sys
import termios
import threading
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, stream: str, columns: int = 100) -> Iterator[list[bytes]]:
    """A terminal of so many columns for "stdout" or "stderr"; gives a list of what is seen there."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "JUPYTER_COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    seen: list[bytes] = []

    def read() -> None:
        # Its other end is closed: an error on Linux, nothing on macOS.
        with contextlib.suppress(OSError):
            while part := os.read(master, 1 << 16):
                seen.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w", encoding="utf-8") as end:
        monkeypatch.setattr(sys, stream, end)
        yield seen
        end.flush()
    reader.join()
    os.close(master)
