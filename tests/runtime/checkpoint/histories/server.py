"""Starts the processes of histories: it imports what they need once, and forks one for each connection.

It never touches a device itself, so that what it forks can. It ends with the process that has started it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys

import numpy as np
import orbax.checkpoint  # noqa: F401  (imported for those that are forked)

from sbp.runtime.arrays.checksums import checksum
from tests.runtime.checkpoint.histories.contents import arrays_of
from tests.runtime.checkpoint.histories.worker import Worker


def serve(path: str) -> None:
    """Forks a worker for each that connects, until the standard input ends."""
    for x in arrays_of(1)["params"].values():  # compiles, or reads from disk, what computes checksums
        checksum(np.asarray(x), tuple((0, n) for n in x.shape), x.shape)
    checksum(np.asarray(1), (), ())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who has ended leaves no zombie
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            Worker(connection).run()
            os._exit(0)
        connection.close()


if __name__ == "__main__":
    serve(sys.argv[1])
