"""Shortest paths between all signatures of a tensor, from its single moves."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbp.compat.machine_code import compiled

Array = np.ndarray[Any, Any]
Bools = Sequence[bool] | NDArray[np.bool_]


def shortest_seconds(n: int, ends: NDArray[np.int64], seconds: Array, fills: Bools, local: Bools) -> Array:
    """`[n, 2 n]`: the seconds from each signature to each other, and beside that the same without filling.

    Once zeros are filled in, no collective follows: to reduce such a sum is a roundabout way to what another
    collective does, however its rates were measured.

    Arguments:
      ends: `[moves, 2]`, from where and to where.
      seconds: of each move.
      fills: whether a move makes a sum by filling in zeros.
      local: whether it is no collective.

    >>> shortest_seconds(2, np.array([[0, 1]]), np.array([3.0]), [True], [True])
    array([[ 0.,  3.,  0., inf],
           [inf,  0., inf,  0.]])
    """
    filling, locally = np.asarray(fills, dtype=bool), np.asarray(local, dtype=bool)
    ends = ends.reshape(-1, 2)
    # Rows are targets: one move relaxes a whole row, all sources at once. A few passes over the moves are
    # enough, for no path is long; that is several times faster than Dijkstra's heaps from each source.
    strict = np.full((n, n), np.inf)
    np.fill_diagonal(strict, 0.0)
    _relax(strict, ends[~filling], seconds[~filling])
    filled = np.full((n, n), np.inf)
    _enter(strict, filled, ends[filling], seconds[filling])
    _relax(filled, ends[locally], seconds[locally])
    np.minimum(filled, strict, out=filled)
    return np.ascontiguousarray(np.concatenate([filled, strict]).T)


@compiled
def _enter(before: Array, after: Array, ends: NDArray[np.int64], seconds: Array) -> None:
    """Lowers `after[j]` to `before[k]` and a move from k to j, for each move."""
    for move in range(seconds.size):
        source, target, extra = ends[move, 0], ends[move, 1], seconds[move]
        for column in range(before.shape[1]):
            cost = before[source, column] + extra
            after[target, column] = cost if cost < after[target, column] else after[target, column]


@compiled
def _relax(table: Array, ends: NDArray[np.int64], seconds: Array) -> None:
    """Lowers rows by moves from other rows, until no move lowers any (Bellman, 1958).

    A row is read again only after it changed.
    """
    changed = np.ones(table.shape[0], dtype=np.bool_)
    while changed.any():
        fresh = changed
        changed = np.zeros(table.shape[0], dtype=np.bool_)
        for move in range(seconds.size):
            source, target, extra = ends[move, 0], ends[move, 1], seconds[move]
            if not (fresh[source] or changed[source]):
                continue
            lower = 0
            for column in range(table.shape[1]):
                cost, now = table[source, column] + extra, table[target, column]
                lower += cost < now
                table[target, column] = cost if cost < now else now
            if lower:
                changed[target] = True
