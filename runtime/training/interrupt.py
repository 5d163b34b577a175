"""How a run ends before its last step: SIGTERM, Ctrl-C, and batches that do not come.

The first signal asks for the end: the step that runs is finished and saved. The second one ends at once. Who
waits for a batch looks for neither, so a thread watches the wait, and interrupts it in the main thread.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TypeVar

import jax
from jax.experimental import multihost_utils

from sbp.runtime.training import messages

LOG = logging.getLogger("sbp")
END_SECONDS = 10.0
"""What a batch has to come in when the end was asked for."""
SAME_SECONDS = 2.0
"""In which SIGTERM, heard twice, is one: a scheduler sends it to all, and a launcher hands it on."""
LOOK_SECONDS = 0.5
SAID_AGAIN_SECONDS = 60.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_T = TypeVar("_T")


class BatchInterruptedError(Exception):
    """A batch that did not come: `asked` if the end was asked for meanwhile."""

    def __init__(self, asked: bool, seconds: float) -> None:
        super().__init__()
        self.asked, self.seconds = asked, seconds


@dataclass
class Interrupt:
    """Whether somebody has asked for the end of a run, and whether its batches come.

    Arguments:
      batch_seconds: what a batch has to come in; None: as long as it takes.
      shared: whether there are other processes, which end at the same step.
      ignored_signals: signals that this process was started to ignore, as a shell does for Ctrl-C in the
        background.
    """

    batch_seconds: float | None
    shared: bool
    ignored_signals: frozenset[int] = frozenset()
    heard: float | None = None
    _waits: tuple[int, float] | None = None
    _expired: bool = False
    _asked: int = 0
    _end: threading.Event = field(default_factory=threading.Event)

    def is_asked(self) -> bool:
        """Whether to end behind a step; all processes ask at every step, and are told the same."""
        if not self.shared:
            return self.is_heard
        self._asked += 1  # not the step, which a run that goes back reaches twice
        return bool(multihost_utils.reached_preemption_sync_point(self._asked))

    @property
    def is_heard(self) -> bool:
        """Whether this process was asked to end, and is alone."""
        return not self.shared and self.heard is not None

    def draw_batch(self, at: int, draw: Callable[[], _T]) -> _T:
        """What `draw` gives for a step.

        Raises:
          BatchInterruptedError: if it took too long.
        """
        self._waits = at, time.monotonic()
        try:
            return draw()
        finally:
            self._waits = None

    # -- signals, in the main thread

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Takes a signal."""
        if self._expired:
            self._expired = False
            if self._waits is not None:
                raise BatchInterruptedError(self.heard is not None, time.monotonic() - self._waits[1])
            return
        if number in self.ignored_signals:
            return
        name = signal.Signals(number).name
        if self.heard is not None:
            if number == signal.SIGTERM and time.monotonic() - self.heard < SAME_SECONDS:
                return
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            signal.raise_signal(number)
            return
        self.heard = time.monotonic()
        LOG.warning("%s", messages.end_request(name))
        if self.shared:  # JAX hears it, and tells the others
            os.kill(os.getpid(), signal.SIGTERM)

    # -- the thread that watches

    def watch(self) -> None:
        """Interrupts a wait for a batch that takes too long, and says now and then that there is one."""
        main, said = threading.main_thread().ident, 0
        while not self._end.wait(LOOK_SECONDS):
            waits, now = self._waits, time.monotonic()
            if waits is None:
                said = 0
                continue
            at, since = waits
            if (now - since) // SAID_AGAIN_SECONDS > said:
                said += 1
                LOG.warning("%s", messages.batch_is_late(at, now - since))
            if now > self._deadline(since) and not self._expired and main is not None:
                self._expired = True
                signal.pthread_kill(main, signal.SIGINT)

    def _deadline(self, since: float) -> float:
        limits = [] if self.batch_seconds is None else [since + self.batch_seconds]
        if self.heard is not None:
            limits.append(max(since, self.heard) + END_SECONDS)
        return min(limits, default=float("inf"))

    def end(self) -> None:
        """Ends the watch."""
        self._end.set()


@contextmanager
def interruptible(batch_seconds: float | None) -> Iterator[Interrupt]:
    """Hears signals for a run, and watches its batches; the handlers before are there again afterwards.

    Outside the main thread, which alone may hear signals, nothing is heard, and nothing is watched.
    """
    shared = jax.process_count() > 1
    found = Interrupt(batch_seconds, shared)
    # Of several processes JAX hears SIGTERM: it finds the step that all of them reach.
    numbers = _SIGNALS[1:] if shared else _SIGNALS
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    before = {n: signal.signal(n, found.hear) for n in numbers}
    found.ignored_signals = frozenset(n for n, handler in before.items() if handler == signal.SIG_IGN)
    thread = threading.Thread(target=found.watch, name="sbp batches", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.end()
        thread.join()
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was set in C
