"""Runs actions when Python ends, before executors refuse work; `atexit` is too late for that."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable


def before_exit(action: Callable[[], object]) -> None:
    """Runs an action when Python ends, before executors refuse work; the last registered runs first.

    `concurrent.futures` shuts its executors down before `atexit` calls anything, and asyncio, orbax and the
    clients of object stores use them.

    Arguments:
      action: a function without arguments.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    register(action)
