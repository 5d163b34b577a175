"""The metrics of a run, which come to the host a step late: the devices have their next step by then."""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import jax
import numpy as np

from sbp.compat.untyped import PyTree
from sbp.errors import NonFiniteError
from sbp.runtime.training import messages
from sbp.runtime.training.metrics import StepMetrics

MOST_ROWS = 10_000
"""Of the history that is kept in memory: a run of weeks has a hundred times as many steps."""
AHEAD = 2
"""Steps that the host is ahead of the devices at the most, where metrics are not read: each holds a batch."""


class BadStepError(Exception):
    """A step whose metrics or state are not finite."""

    def __init__(self, step: int, error: NonFiniteError) -> None:
        super().__init__()
        self.step, self.error = step, error


class Taker(Protocol):
    """Takes the metrics of steps, and drops those of steps that are done again."""

    def begin(self, step: int) -> None:
        """The next step is that behind this one."""

    def take(self, row: StepMetrics) -> None:
        """Takes the metrics of a step."""


@dataclass
class Recorder:
    """Takes what the steps give, and reads it later.

    Arguments:
      takers: of the metrics of each step that is noted.
      every: how many steps there are from one that is noted to the next.
      raise_known: says more of an error of the runtime: the step ran while the host went on, so that its
        errors come with its results.
    """

    takers: Sequence[Taker]
    every: int
    raise_known: Callable[[BaseException], None]
    history: collections.deque[dict[str, float]] = field(
        default_factory=lambda: collections.deque(maxlen=MOST_ROWS)
    )
    _unread: collections.deque[tuple[int, PyTree, Mapping[str, float], bool]] = field(
        default_factory=collections.deque
    )

    def begin(self, step: int) -> None:
        """A run begins behind a step, or goes back there."""
        self._unread.clear()
        while self.history and self.history[-1]["step"] > step:
            self.history.pop()
        for taker in self.takers:
            taker.begin(step)

    def add(self, step: int, found: PyTree, evaluated: Mapping[str, float], is_noted: bool) -> None:
        """Takes what a step gave, and reads what those before it did.

        Arguments:
          found: a number, or a dict of numbers, on the devices.
          evaluated: further metrics, on the host.
          is_noted: whether it is noted, whatever its number is.

        Raises:
          BadStepError: if a metric of a step before it is not finite.
        """
        noted = is_noted or bool(evaluated) or step % self.every == 0
        self._unread.append((step, found, evaluated, noted))
        while len(self._unread) > (1 if self._unread[0][3] else AHEAD):
            self._read()

    def flush(self) -> None:
        """Reads what all steps gave.

        Raises:
          BadStepError: if a metric is not finite.
        """
        while self._unread:
            self._read()

    def _read(self) -> None:
        step, found, evaluated, noted = self._unread.popleft()
        try:
            if not noted:
                jax.tree.map(lambda x: x.block_until_ready() if isinstance(x, jax.Array) else x, found)
                return
            named = found if isinstance(found, Mapping) else {"loss": found}
            read = {name: float(np.asarray(x)) for name, x in named.items()}
        except RuntimeError as e:
            self.raise_known(e)
            raise
        if bad := [f"{name} is {x}" for name, x in read.items() if not math.isfinite(x)]:
            raise BadStepError(step, NonFiniteError(messages.metric_not_finite(step, bad)))
        row = {"step": step, **read, **evaluated}
        self.history.append(row)
        for taker in self.takers:
            taker.take(row)
