"""A line on the terminal with the progress of a search for a plan, if it takes longer than a moment."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sbp.passes.plan.solve import Progress
from sbp.text.units import seconds_text

if TYPE_CHECKING:
    from rich.text import Text

DELAY_SECONDS = 1.0
"""Most plans are there earlier, and nothing is shown."""


class SearchLine:
    """The line; a thread of `rich` draws it again and again, and asks for its text.

    Arguments:
      title: what is planned.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.begun = time.monotonic()
        self.found, self.bound = math.inf, 0.0

    def tell(self, found: float, bound: float) -> None:
        """Takes the solver's progress: the least seconds of a step found so far, and a bound."""
        self.found, self.bound = found, bound

    @property
    def text(self) -> str:
        """The line as it is now.

        >>> line = SearchLine("planning train_step")
        >>> line.tell(0.002, 0.0015)
        >>> line.text
        'planning train_step, 0 s: 2.00 ms a step found, bound 1.50 ms, gap 25 %'
        """
        taken = f"{self.title}, {time.monotonic() - self.begun:.0f} s"
        if not math.isfinite(self.found) or self.found <= 0:
            return taken
        bound = max(0.0, self.bound)
        proven = f"bound {seconds_text(bound)}, gap {100 * max(0.0, 1 - bound / self.found):.2g} %"
        return f"{taken}: {seconds_text(self.found)} a step found, {proven}"

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(self.text)


@contextmanager
def search_line(title: str, wanted: bool = True) -> Iterator[Progress | None]:
    """Shows a line while a search takes long; gives the function that takes the progress.

    None without a terminal at stderr, such as in notebooks or if output goes to a file.

    Arguments:
      title: what is planned.
      wanted: whether to show anything.
    """
    if not wanted or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.status import Status

    line, lock, over = SearchLine(title), threading.Lock(), threading.Event()
    # A spinner's text need not be a text, as long as it can be drawn: it is asked for at each turn.
    status = Status(line, console=Console(stderr=True))

    def show() -> None:
        with lock:
            if not over.is_set():
                status.start()

    timer = threading.Timer(DELAY_SECONDS, show)
    timer.daemon = True
    timer.start()
    try:
        yield line.tell
    finally:
        over.set()
        timer.cancel()
        with lock:
            status.stop()
        timer.join()  # it has been told: nothing is left behind
