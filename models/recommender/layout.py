"""What the columns of a file of clicks are, and what is raised where one cannot be read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sbp.errors import Problem, SbpError


class DataError(SbpError):
    """A file that cannot be read, or a line of it."""


@contextmanager
def needs_pyarrow() -> Iterator[None]:
    """Files are read and written by pyarrow: where it is missing, the error says which extra brings it.

    Raises:
      DataError: if pyarrow is imported inside, and is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "pyarrow":
            raise
        why, fix = "files of clicks are read and written by it", "pip install -e '.[recommender]'"
        problem = Problem("data", "pyarrow", "it is not installed", "the extra `recommender`", why, fix)
        raise DataError(problem) from None


def log_counts(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """log(1 + max(x, 0)): what is usual for the raw counts of Criteo."""
    return np.log1p(np.maximum(x, 0))


def as_is(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Numbers that somebody has scaled already."""
    return x


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a file, in the order of a TSV.

    Arguments:
      label: a column of 0 and 1.
      dense: columns of numbers.
      categorical: columns of keys: hexadecimal text, integers, or lists of either (Parquet only).
      scale: what is done to the dense numbers; a blank is 0 after it.
    """

    label: str
    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    scale: Callable[[NDArray[np.float64]], NDArray[np.float64]] = log_counts

    @property
    def names(self) -> list[str]:
        """All columns."""
        return [self.label, *self.dense, *self.categorical]


CRITEO = Layout("label", tuple(f"I{i}" for i in range(1, 14)), tuple(f"C{i}" for i in range(1, 27)))
"""Criteo's own columns with raw counts, as in the Kaggle set and the terabyte set."""
PREPARED = replace(CRITEO, scale=as_is)
"""The same columns after NVTabular or the like: dense features are scaled, keys are integers or lists."""
