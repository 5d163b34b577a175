"""A set of keys with a row each, in sorted arrays: found by binary search, changed a batch at a time."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
Rows = NDArray[np.int32]

UNKNOWN = -1
SHARE = 4
"""Late keys are merged with the others when they are more than one in so many."""
FEW = 4096


@dataclass(slots=True)
class Run:
    """Sorted keys and their rows; a key that was removed has row `UNKNOWN`."""

    keys: Keys = field(default_factory=lambda: np.empty(0, np.int64))
    rows: Rows = field(default_factory=lambda: np.empty(0, np.int32))

    def position(self, keys: Keys) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Where the keys stand, and which are there (removed ones too)."""
        if not self.keys.size:
            return np.zeros(keys.shape, np.intp), np.zeros(keys.shape, bool)
        at = np.minimum(np.searchsorted(self.keys, keys), self.keys.size - 1)
        return at, self.keys[at] == keys


def merged(*runs: Run) -> Run:
    """All keys of the runs that were not removed; no key may live in two of them."""
    keys, rows = np.concatenate([r.keys for r in runs]), np.concatenate([r.rows for r in runs])
    keys, rows = keys[rows != UNKNOWN], rows[rows != UNKNOWN]
    order = np.argsort(keys, kind="stable")
    return Run(keys[order], rows[order])


@dataclass(slots=True)
class SortedKeys:
    """Distinct keys and their rows.

    Keys that came late wait in a short run of their own, so that adding a few does not copy them all.
    """

    early: Run = field(default_factory=Run)
    late: Run = field(default_factory=Run)

    def find(self, keys: Keys) -> Rows:
        """The row of each key, `UNKNOWN` where there is none."""
        rows = np.full(keys.shape, UNKNOWN, np.int32)
        for run in (self.early, self.late):
            at, there = run.position(keys)
            alive = np.flatnonzero(there)
            alive = alive[run.rows[at[alive]] != UNKNOWN]
            rows[alive] = run.rows[at[alive]]
        return rows

    def remove(self, keys: Keys) -> None:
        """Forgets keys."""
        for run in (self.early, self.late):
            at, there = run.position(keys)
            run.rows[at[there]] = UNKNOWN

    def add(self, keys: Keys, rows: Rows) -> None:
        """Takes in keys that are not there."""
        self.late = merged(self.late, Run(keys, rows))
        if self.late.keys.size > max(FEW, self.early.keys.size // SHARE):
            self.early, self.late = merged(self.early, self.late), Run()
