"""How far a run is: a bar on a terminal, else a line now and then on stderr. From process 0."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import jax

from sbp.runtime.training.metrics import StepMetrics
from sbp.runtime.training.throughput import NO_BATCH, NO_WORK, BatchSize, Rate, StepWork

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

BAR_SECONDS = 0.2
"""Between two looks of the bar: more often costs time, and nobody reads faster."""
LINE_SECONDS = 10.0
LINE_GROWTH = 1.5
MOST_LINE_SECONDS = 300.0
"""Between two lines there are more seconds each time, up to five minutes."""
MOST_METRICS = 4


class Display(Protocol):
    """Shows what is known of a run."""

    def show(self, step: int, text: str) -> None:
        """Takes the last step, and what is known in words."""


@dataclass
class Progress:
    """What is known of a run, for whoever looks at it.

    Arguments:
      steps: the number of the last step.
      display: None where nobody looks.
      batch: what is in a batch.
      work: what a step computes.
      more: says what else there is to say, now and then.
    """

    steps: int
    display: Display | None
    batch: BatchSize = NO_BATCH
    work: StepWork = NO_WORK
    more: Callable[[], str] = str
    _rate: Rate = field(default_factory=Rate)
    _next: float = 0.0
    _seconds: float = BAR_SECONDS

    def begin(self, step: int) -> None:
        """A run begins behind a step, or goes back there."""
        self._rate.clear()
        if self.display is not None:
            self._next = 0.0
            self._seconds = LINE_SECONDS if isinstance(self.display, Lines) else BAR_SECONDS

    def take(self, row: StepMetrics) -> None:
        """Takes the metrics of a step."""
        if self.display is None:
            return
        now, step = time.monotonic(), int(row["step"])
        self._rate.add(step, now)
        if now < self._next and step < self.steps:
            return
        self.display.show(step, self.text(row))
        self._next = now + self._seconds
        if isinstance(self.display, Lines):
            self._seconds = min(self._seconds * LINE_GROWTH, MOST_LINE_SECONDS)

    def close(self) -> None:
        """Nothing more comes."""

    def text(self, row: StepMetrics) -> str:
        """What is known, in words.

        >>> progress = Progress(10, None, BatchSize(8, 0))
        >>> for i in range(3): progress._rate.add(i, now=0.5 * i)
        >>> progress.text({"step": 3, "loss": 1.25})
        'loss 1.25, 2 steps/s, 16 examples/s, 4 s left'
        """
        rate = self._rate.steps_per_second
        words = [metrics_text(row)]
        if rate:
            words.append(f"{rate:.3g} steps/s")
            per_step, what = max((self.batch.tokens, "tokens"), (self.batch.examples, "examples"))
            if per_step:
                words.append(f"{_short(per_step * rate)} {what}/s")
            share = self.work.utilisation(rate)
            if share is not None:
                words.append(f"MFU {100 * share:.1f} %")
            words.append(f"{duration((self.steps - int(row['step'])) / rate)} left")
        words.append(self.more())
        return ", ".join(w for w in words if w)


@dataclass
class Lines:
    """A line on stderr.

    Arguments:
      steps: the number of the last step.
    """

    steps: int

    def show(self, step: int, text: str) -> None:
        """Writes a line."""
        sys.stderr.write(f"step {step}/{self.steps}: {text}\n")
        sys.stderr.flush()


@dataclass
class Bar:
    """A bar on a terminal.

    Arguments:
      progress: rich's.
      task: its only one.
    """

    progress: RichProgress
    task: TaskID

    def show(self, step: int, text: str) -> None:
        """Draws the bar."""
        self.progress.update(self.task, completed=step, description=f"step {step}", words=text)


@contextmanager
def display_of(steps: int, wanted: bool) -> Iterator[Display | None]:
    """What shows how far a run is; None in other processes than the first, and where nobody wants it.

    Arguments:
      steps: the number of the last step.
    """
    if not wanted or jax.process_index() or sys.stderr is None:
        yield None
        return
    if not sys.stderr.isatty():
        yield Lines(steps)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress

    columns = TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[words]}")
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Bar(progress, progress.add_task("training", total=steps, words=""))


def metrics_text(row: Mapping[str, float]) -> str:
    """Some metrics in words.

    >>> metrics_text({"step": 3, "loss": 1.23456, "accuracy": 0.5})
    'loss 1.235, accuracy 0.5'
    """
    return ", ".join([f"{name} {x:.4g}" for name, x in row.items() if name != "step"][:MOST_METRICS])


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> duration(4.2), duration(90), duration(7300)
    ('4 s', '1:30 min', '2:01 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"


def _short(x: float) -> str:
    """A number with three digits.

    >>> _short(1234567), _short(950)
    ('1.23 M', '950')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if x >= size:
            return f"{x / size:.3g} {unit}"
    return f"{x:.3g}"
