"""The end of Python: what has to be done before executors refuse work, which `atexit` comes too late for."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable


def before_exit(action: Callable[[], object]) -> None:
    """Has something done when Python ends, before executors of threads refuse work; the last one comes first.

    `concurrent.futures` shuts its executors down before `atexit` calls anything, and asyncio, orbax and the
    clients of object stores use them.

    Arguments:
      action: that takes nothing.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    register(action)
