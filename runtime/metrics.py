"""Where the metrics of a run go: a table as CSV, TensorBoard, functions, and a bar on a terminal. All from
process 0.

A run that goes on from a checkpoint does steps again that an earlier one has noted: what is noted of these is
dropped first, so that each step is there once.
"""

from __future__ import annotations

import csv
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TypeAlias

import jax

from sbp.errors import ArgumentError, Problem

StepMetrics: TypeAlias = Mapping[str, float]
"""The metrics of a step, with its number as "step"."""
Log: TypeAlias = str | os.PathLike[str] | Callable[[StepMetrics], object]
Logs: TypeAlias = Log | tuple[Log, ...] | list[Log]
"""A .csv file, a folder for TensorBoard, or a function of the metrics of a step; or several."""

HEAD = ("step", "metric", "value")


@contextmanager
def written(
    logs: Logs | None, history: list[dict[str, float]], first: int, steps: int
) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """Takes the metrics of each step: for the history, the logs, and a bar on a terminal.

    Arguments:
      first: the step that the run begins behind.

    Raises:
      ArgumentError: for logs of which there are no others, and where TensorBoard's library is missing.
    """
    paths = logs if isinstance(logs, tuple | list) else () if logs is None else (logs,)
    leads = jax.process_index() == 0
    with ExitStack() as stack:
        takers = [stack.enter_context(_log(p, first)) for p in paths if leads]
        if leads and sys.stderr.isatty():
            takers.append(stack.enter_context(_bar(first, steps)))

        def write(at: int, metrics: dict[str, float]) -> None:
            history.append({"step": at, **metrics})
            for take in takers:
                take(history[-1])

        yield write


def _log(log: Log, first: int) -> AbstractContextManager[Callable[[StepMetrics], object]]:
    if callable(log):
        return nullcontext(log)
    path = Path(log)
    if path.suffix not in ("", ".csv"):
        raise ArgumentError(_no_log(path))
    return _csv(path, first) if path.suffix else _tensorboard(path, first)


@contextmanager
def _csv(path: Path, first: int) -> Iterator[Callable[[StepMetrics], None]]:
    """Writes a row per metric, behind those of the steps up to the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept: list[list[str]] = []
    if first and path.exists():
        with path.open(newline="") as file:
            # Who is killed may leave a row that is not whole.
            kept = [row for row in csv.reader(file) if len(row) == len(HEAD) and row[0].isdigit()]
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(HEAD)
        out.writerows(row for row in kept if int(row[0]) <= first)
        file.flush()

        def write(row: StepMetrics) -> None:
            out.writerows((int(row["step"]), name, repr(x)) for name, x in row.items() if name != "step")
            file.flush()

        yield write


@contextmanager
def _tensorboard(folder: Path, first: int) -> Iterator[Callable[[StepMetrics], None]]:
    """Writes scalars by their steps; TensorBoard drops what earlier runs have noted behind the first."""
    try:
        library = importlib.import_module("tensorboardX")
    except ImportError:
        raise ArgumentError(_no_tensorboard(folder)) from None
    writer = library.SummaryWriter(str(folder), purge_step=first + 1 if first else None)
    try:

        def write(row: StepMetrics) -> None:
            for name, x in row.items():
                if name != "step":
                    writer.add_scalar(name, x, int(row["step"]))

        yield write
    finally:
        writer.close()


@contextmanager
def _bar(first: int, steps: int) -> Iterator[Callable[[StepMetrics], None]]:
    """Shows how far it is, and the last metrics."""
    from rich.progress import Progress

    with Progress(transient=True) as progress:
        task = progress.add_task("training", total=steps, completed=first)

        def show(row: StepMetrics) -> None:
            words = " ".join(f"{name} {x:.4g}" for name, x in row.items() if name != "step")
            progress.update(task, advance=1, description=f"training {words}")

        yield show


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
