"""What a process waits for while it joins the others: JAX says nothing for minutes, and then ends it."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sbp.errors import Problem, ProcessError
from sbp.runtime.processes.messages import nobody_answers, not_all_have_come

LOG = logging.getLogger("sbp")
MOST_SECONDS = 300
"""What all processes have to come in."""
SAID_AGAIN_SECONDS = 30.0
CONNECT_SECONDS = 5.0


@contextmanager
def joining(
    where: Callable[[], tuple[int, int, str]],
    most_seconds: float = MOST_SECONDS,
    said_again_seconds: float = SAID_AGAIN_SECONDS,
) -> Iterator[None]:
    """Says now and then what is waited for, and ends this process with it after a time.

    Arguments:
      where: gives the number of this process, how many there are, and "host:port" of process 0; "" where that
        is not known yet.
      most_seconds: after which it ends.
      said_again_seconds: after which it says again that it waits.
    """
    done = threading.Event()

    def wait() -> None:
        began = time.monotonic()
        while not done.wait(said_again_seconds):
            index, count, coordinator = where()
            if not coordinator:  # JAX still asks a cluster where it is
                continue
            waited = time.monotonic() - began
            problem = missing(index, count, coordinator, waited)
            if done.is_set():
                return
            if waited >= most_seconds:
                sys.stderr.write(f"sbp: process {index} ends: ProcessError: {ProcessError(problem)}\n")
                sys.stderr.flush()
                os._exit(1)
            LOG.warning("%s: %s", problem.where, problem.got)

    thread = threading.Thread(target=wait, daemon=True, name="sbp joining")
    thread.start()
    try:
        yield
    finally:
        done.set()


def missing(index: int, count: int, coordinator: str, seconds: float) -> Problem:
    """What has not come so far.

    Arguments:
      index, count: of this process, and of all.
      coordinator: "host:port" of process 0.
      seconds: how long it was waited.
    """
    if index and (said := unanswered(coordinator)):
        return nobody_answers(index, coordinator, said, seconds)
    return not_all_have_come(index, count, coordinator, seconds)


def unanswered(coordinator: str) -> str:
    """Why nobody answers at "host:port", in the words of the system; "" where somebody does.

    >>> unanswered("127.0.0.1:1")
    'Connection refused'
    """
    host, _, port = coordinator.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError) as e:
        return str(getattr(e, "strerror", None) or e)
    return ""
