"""Where the metrics of a run go: a table as CSV, TensorBoard, and functions. All from process 0.

A run that goes on from a checkpoint, or goes back to one, does steps again that were noted: what is noted of
these is dropped first, so that each step is there once.
"""

import contextlib
import csv
import importlib
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias

from sbp.errors import ArgumentError, Problem

LOG = logging.getLogger("sbp")
StepMetrics: TypeAlias = Mapping[str, float]
"""The metrics of a step, with its number as "step"."""
Log: TypeAlias = str | os.PathLike[str] | Callable[[StepMetrics], object]
Logs: TypeAlias = Log | tuple[Log, ...] | list[Log]
"""A .csv file, a folder for TensorBoard, or a function of the metrics of a step; or several."""

HEAD = ("step", "metric", "value")


class Sink(Protocol):
    """Takes the metrics of steps."""

    def begin(self, step: int) -> None:
        """Drops what was noted behind a step; the next one is that behind it."""

    def take(self, row: StepMetrics) -> None:
        """Takes the metrics of a step."""

    def close(self) -> None:
        """Nothing more comes."""


def sinks(logs: Logs | None) -> list[Sink]:
    """Where the metrics go.

    Raises:
      ArgumentError: for logs of which there are no others, and where TensorBoard's library is missing.
    """
    given = logs if isinstance(logs, tuple | list) else () if logs is None else (logs,)
    return [_sink(x) for x in given]


class CsvFile:
    """A row per metric. The file is made anew as a whole, then only grows; of a full disk there is a warning.

    Arguments:
      path: of the file; folders are made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None
        self._out: Any = None
        self._has_failed = False

    def begin(self, step: int) -> None:
        """Drops the rows behind a step."""
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = self._rows(step) if step else []
        made = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}.tmp")
        try:
            with made.open("w", newline="") as file:
                csv.writer(file).writerows([HEAD, *kept])
                file.flush()
                os.fsync(file.fileno())
            os.replace(made, self.path)
        finally:
            made.unlink(missing_ok=True)
        self._file = self.path.open("a", newline="")
        self._out = csv.writer(self._file)

    def take(self, row: StepMetrics) -> None:
        """Adds the rows of a step."""
        assert self._file is not None
        rows = [(int(row["step"]), name, repr(x)) for name, x in row.items() if name != "step"]
        try:
            self._out.writerows(rows)
            self._file.flush()
        except OSError as e:  # a full disk ends no run: it might be freed
            if not self._has_failed:
                LOG.warning("%s: step %d and those behind it may be missing: %s", self.path, row["step"], e)
            self._has_failed = True

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _rows(self, step: int) -> list[list[str]]:
        if not self.path.exists():
            return []
        with self.path.open(newline="", errors="replace") as file:
            # Who is killed may leave a row that is not whole.
            rows = [row for row in csv.reader(file) if len(row) == len(HEAD) and row[0].isdigit()]
        return [row for row in rows if int(row[0]) <= step]


class TensorBoardFolder:
    """A folder for TensorBoard, which drops what earlier runs have noted behind the first step.

    Arguments:
      folder: for its files.

    Raises:
      ArgumentError: if the library that writes them is missing.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._library = importlib.import_module("tensorboardX")
        except ImportError:
            raise ArgumentError(_no_tensorboard(folder)) from None
        self.folder = folder
        self._writer: Any = None

    def begin(self, step: int) -> None:
        """Begins a file that says behind which step what is older does not count."""
        self.close()
        self._writer = self._library.SummaryWriter(str(self.folder), purge_step=step + 1 if step else None)

    def take(self, row: StepMetrics) -> None:
        """Writes scalars."""
        for name, x in row.items():
            if name != "step":
                self._writer.add_scalar(name, x, int(row["step"]))

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class FunctionSink:
    """A function that is given the metrics of a step; of steps that are done again it is given them again.

    Arguments:
      function: takes them, with the step's number as "step".
    """

    def __init__(self, function: Callable[[StepMetrics], object]) -> None:
        self.function = function

    def begin(self, step: int) -> None:
        """It is given what comes."""

    def take(self, row: StepMetrics) -> None:
        """Gives it the metrics of a step."""
        self.function(row)

    def close(self) -> None:
        """It has nothing to close."""


def _sink(log: Log) -> Sink:
    if callable(log):
        return FunctionSink(log)
    path = Path(log)
    if path.suffix not in ("", ".csv"):
        raise ArgumentError(_no_log(path))
    return CsvFile(path) if path.suffix else TensorBoardFolder(path)


def _no_log(path: Path) -> Problem:
    return Problem(
        "argument",
        "sbp.fit(..., log=...)",
        str(path),
        "a .csv file, a folder for TensorBoard, or a function",
        "how metrics are written is told by the name",
        f"log={str(path.with_suffix('.csv'))!r}",
    )


def _no_tensorboard(folder: Path) -> Problem:
    return Problem(
        "argument",
        f"sbp.fit(..., log={str(folder)!r}), a folder for TensorBoard",
        "no tensorboardX",
        "the package tensorboardX",
        "it writes the files that TensorBoard reads",
        "pip install 'sbp-jax[tensorboard]', or a .csv file",
    )
