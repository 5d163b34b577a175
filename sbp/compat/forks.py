"""Forks of a process that has used JAX: its threads are not in the child, where who waits for them hangs.

Nothing is looked at in a call but a word that the fork itself leaves. Nothing here imports JAX.

Runs actions when Python ends, before executors refuse work; `atexit` is too late for that.
"""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from sbp.errors import Problem, ProcessError


@dataclass
class Fork:
    """Of what process this one is a fork.

    Arguments:
      parent: the number of the process that had used JAX; None where this one was started anew, or before.
    """

    parent: int | None = None

    def note(self) -> None:
        """Notes in a child that its parent had used JAX; without JAX's locks, which may be held for ever."""
        bridge, groups = map(sys.modules.get, ("jax._src.xla_bridge", "jax._src.distributed"))
        is_started = bridge is not None and bool(bridge._backends)
        is_joined = groups is not None and groups.global_state.client is not None
        if self.parent is None and (is_started or is_joined):
            self.parent = os.getppid()


FORK = Fork()


def watch_forks() -> None:
    """Notes every fork of this process from now on; called once, when the package is imported."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=FORK.note)


def check_not_forked(what: str) -> None:
    """Refuses what takes JAX's threads in a process that has none of them.

    Arguments:
      what: is to be done, for the message.

    Raises:
      ProcessError: in a process that was forked from one that had used JAX.
    """
    if FORK.parent is not None:
        raise ProcessError(
            Problem(
                "process",
                what,
                f"process {os.getpid()}, forked from process {FORK.parent}, which had used JAX",
                "a process that was started anew, or forked before JAX was used",
                "a fork does not have JAX's threads, and would wait for them for ever",
                'multiprocessing.get_context("spawn"); forks that only use NumPy, as in a feed, are fine',
            )
        )


def before_exit(action: Callable[[], object]) -> None:
    """Runs an action when Python ends, before executors refuse work; the last registered runs first.

    `concurrent.futures` shuts its executors down before `atexit` calls anything, and asyncio, orbax and the
    clients of object stores use them.

    Arguments:
      action: a function without arguments.
    """
    getattr(threading, "_register_atexit", atexit.register)(action)
