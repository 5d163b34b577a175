"""Internals of orbax: it closes asyncio's loops under reads that have not ended."""

import asyncio
import contextlib
import importlib
from collections.abc import Coroutine
from typing import Any

DRAIN_SECONDS = 60.0
"""For what was begun; what takes longer may hang, and an error must come out."""


def drain_loops() -> None:
    """Makes orbax wait, after a failed read or write of a call, until the others have ended.

    Otherwise TensorStore reports their results to a closed loop, which prints tracebacks that nobody can
    catch. An orbax without such a function is left alone.
    """
    with contextlib.suppress(ImportError):
        found: Any = importlib.import_module("orbax.checkpoint._src.asyncio_utils")
        if hasattr(found, "_run_sync_via_new_loop"):
            found._run_sync_via_new_loop = run_and_drain


def run_and_drain(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, in a loop of its own, once all its tasks have ended."""
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
