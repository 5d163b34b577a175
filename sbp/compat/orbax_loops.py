"""What orbax keeps for itself: loops of asyncio, which it closes under reads that have not ended."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Coroutine
from typing import Any

DRAIN_SECONDS = 60.0
"""For what was begun; what takes longer may hang, and an error must come out."""


def drain_loops() -> None:
    """Has orbax wait, where one of the reads or writes of a call has failed, until the others have ended.

    TensorStore else tells a closed loop how they went, and has tracebacks written that nobody can catch. An
    orbax without such a function is left alone.
    """
    with contextlib.suppress(ImportError):
        found: Any = importlib.import_module("orbax.checkpoint._src.asyncio_utils")
        if hasattr(found, "_run_sync_via_new_loop"):
            found._run_sync_via_new_loop = run_and_drain


def run_and_drain(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine gives, in a loop of its own, once all tasks there have ended."""
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(coroutine)
    finally:
        if left := _unfinished(loop):
            loop.run_until_complete(asyncio.wait(left, timeout=DRAIN_SECONDS))
        asyncio.set_event_loop(None)
        loop.close()


def _unfinished(loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
    while True:
        with contextlib.suppress(RuntimeError):  # loops of other threads have changed the set that is read
            return {task for task in asyncio.all_tasks(loop) if not task.done()}
