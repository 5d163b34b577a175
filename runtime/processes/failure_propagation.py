"""Ends all processes when one of them raises.

A process that waits for a collective hears nothing: the wait is in XLA. So a thread of each process waits for
the notice that some process has raised, prints it, and ends its process. A killed process leaves no notice;
JAX's coordination service misses its heartbeat, and ends the others. The same thread publishes the calls of
this process, and ends it if the others make other calls.

Errors of JAX's runtime that mean that another process is gone.
"""

import atexit
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from types import TracebackType
from typing import TypeAlias, cast

import jax

from sbp.compat.errors import has_lost_another
from sbp.compat.forks import FORK
from sbp.compat.processes import KVStore, how_many
from sbp.errors import ProcessError, SbpError
from sbp.runtime.processes.call_order import at_the_end, explain_error, publish_and_compare
from sbp.runtime.processes.calls import calls_of
from sbp.runtime.processes.failure_cause import FOLLOWS
from sbp.runtime.processes.liveness import LivenessWatch
from sbp.runtime.processes.straggler_log import StragglerLog

_WHERE = re.compile(r"\[external/\S+\] ?")


def in_one_line(error: BaseException) -> str:
    r"""An error in one line, as the last line of a traceback.

    >>> in_one_line(ValueError("of two lines:\nthis one and that")), in_one_line(KeyboardInterrupt())
    ('ValueError: of two lines:', 'KeyboardInterrupt')
    """
    name, said = type(error).__name__, (str(error).splitlines() or [""])[0]
    if isinstance(error, SbpError) and error.problems:
        said = "; ".join((error.problems[0].where.splitlines() or [""])[:1] + [error.problems[0].got])
    return f"{name}: {said}" if said else name


def loss_text(error: BaseException) -> str:
    """The loss of another process, in one line.

    >>> import jax
    >>> gone = "UNKNOWN: Gloo AllGather failed: [external/pair.cc:547] Connection closed by peer [10.0.0.2]:4"
    >>> loss_text(jax.errors.JaxRuntimeError(gone))
    'has lost another process: UNKNOWN: Gloo AllGather failed: Connection closed by peer [10.0.0.2]:4'
    """
    return f"has lost another process: {_WHERE.sub('', (str(error).splitlines() or [''])[0])}"


Hook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]

KEY = "sbp/raised"
POLL_SECONDS = 0.5
LOOK_SECONDS = 5.0
"""After which calls are compared again with those of other processes."""
SERVICE_SECONDS = 2.0
"""What a process waits before it ends: the others hear why, before they see their connections break; and
process 0 has the board."""


def watch(kv_store: KVStore, index: int, silence: LivenessWatch) -> None:
    """Ends this process when another one raises, and notifies the others when this one does.

    Arguments:
      index: of this process.
      silence: names the processes whose heartbeats stopped.
    """
    done = threading.Event()
    thread = threading.Thread(target=_listen, args=(kv_store, index, done), daemon=True, name="sbp processes")
    thread.start()
    beats = silence.watch(done)

    def stop() -> None:  # before JAX takes the board away
        if FORK.parent is not None:  # a fork is no member, and has no thread to wait for
            return
        done.set()
        for waits in (thread, *beats):
            waits.join()
        wrong = at_the_end(kv_store, index, calls_of(cast(Hashable, kv_store)))
        if wrong is not None:
            _end(kv_store, index, wrong)

    atexit.register(stop)
    sys.excepthook = _telling(kv_store, index, sys.excepthook)


def tell(kv_store: KVStore, index: int, error: BaseException) -> None:
    """Leaves the notice that this process has raised, and ends it; JAX would wait for the others first."""
    is_lost, calls = has_lost_another(error), calls_of(cast(Hashable, kv_store))
    said, code = f"has raised {type(error).__name__}: {error}", _code(error)
    if is_lost:
        said, code = loss_text(error), FOLLOWS
    try:
        kv_store.key_value_set_bytes(KEY, json.dumps([index, said]).encode())
    except jax.errors.JaxRuntimeError:  # another one was earlier, or the service is gone
        code = FOLLOWS
    if calls.fails is not None and code != FOLLOWS:
        calls.fails(in_one_line(error))
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(SERVICE_SECONDS)
    os._exit(code)


def _code(error: BaseException) -> int:
    """The exit code of a process that raises: its own, if it has one that means nothing else."""
    own = error.code if isinstance(error, SystemExit) else None
    return own if isinstance(own, int) and own not in (0, FOLLOWS) else 1


def _telling(kv_store: KVStore, index: int, before: Hook) -> Hook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_lost = has_lost_another(error)
        if not is_lost or before is not sys.__excepthook__:  # where it was lost says nothing
            before(kind, error, trace)
        if FORK.parent is not None:  # its parent is the member, and hears of it as it likes
            return
        # A result that is fetched raises in the user's code: nobody but this hook sees it.
        why = explain_error(error, kv_store, index, how_many(), calls_of(cast(Hashable, kv_store)))
        if why is not None:
            _end(kv_store, index, why)
        if is_lost:
            sys.stderr.write(f"sbp: process {index} ends: it {loss_text(error)}\n")
        tell(kv_store, index, error)

    return hook


def _end(kv_store: KVStore, index: int, error: ProcessError) -> None:
    """Ends this process with an error that nobody can catch."""
    sys.stdout.flush()
    sys.stderr.write(f"sbp: process {index} ends: {type(error).__name__}: {error}\n")
    tell(kv_store, index, error)


def _listen(kv_store: KVStore, index: int, done: threading.Event) -> None:
    """Waits for the notice of another process; publishes and compares calls now and then."""
    word, calls, looked = None, calls_of(cast(Hashable, kv_store)), time.monotonic()
    waiting = StragglerLog(calls, index, how_many())
    while word is None:
        if done.wait(POLL_SECONDS):
            return
        with suppress(jax.errors.JaxRuntimeError):  # none is there; where the service is gone JAX ends all
            word = kv_store.key_value_try_get_bytes(KEY)
        calls.answer(kv_store, index)
        if word is None and time.monotonic() - looked >= LOOK_SECONDS:
            looked, wrong = time.monotonic(), publish_and_compare(kv_store, index, calls)
            waiting.look(kv_store, looked)
            if wrong is not None:
                _end(kv_store, index, wrong)
    other, error = json.loads(word)
    if other == index:
        return
    first = str(error).splitlines()[0]
    sys.stdout.flush()
    sys.stderr.write(f"sbp: process {index} ends, since process {other} {first}\n")
    sys.stderr.flush()
    time.sleep(0.0 if index else SERVICE_SECONDS)
    os._exit(FOLLOWS)
