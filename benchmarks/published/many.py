"""Many rows, in several processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.published.estimate import Estimator
from benchmarks.published.figures import Outcome
from benchmarks.published.rows import PublishedStep


def outcome(row: PublishedStep) -> Outcome:
    """The estimate of one row, or why there is none."""
    try:
        return Outcome(row, Estimator(row).estimate())
    except Exception as e:  # whatever a row asks for: one that cannot be expressed must not stop the others
        return Outcome(row, reason=" ".join(f"{type(e).__name__}: {e}".split()))


def outcomes(rows: Iterable[PublishedStep], processes: int) -> Iterator[Outcome]:
    """Of all rows, in their order, each as soon as it is there."""
    if processes == 1:
        yield from map(outcome, rows)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(outcome, rows)
