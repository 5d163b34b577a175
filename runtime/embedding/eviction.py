"""Which key of a full vocabulary loses its row: policies, and a heap whose work is that of the changes.

A lookup never makes a key leave earlier. So what the heap knows of a row is a lower bound, and is brought up
to date only when the row comes to the top: rows that are looked up again and again cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sbp.compat.machine_code import compile_loops
from sbp.errors import EmbeddingError
from sbp.runtime.embedding.key_index import Rows
from sbp.runtime.embedding.keys import problem

Counts: TypeAlias = NDArray[np.float64]


class Policy(Protocol):
    """Which key loses its row to a new key when all rows are taken."""

    def order(self, used: Counts, count: Counts) -> Sequence[NDArray[Any]] | None:
        """One or two columns to sort the rows by: the lowest row is evicted first, the next column, then the
        number of the row, breaks ties.

        None means that no row is ever evicted. A lookup raises both `used` and `count`, and must not lower
        the columns.

        Arguments:
          used: per row, the number of the last batch that had the key.
          count: per row, how often the key was looked up since it has the row; less for lookups of long ago
            where there is a `half_life`.
        """


@dataclass(frozen=True, slots=True)
class Refuse:
    """No key is evicted; a new key in a full vocabulary is an error."""

    def order(self, used: Counts, count: Counts) -> Sequence[NDArray[Any]] | None:
        """None: no row is evicted."""
        return None


@dataclass(frozen=True, slots=True)
class LeastRecentlyUsed:
    """Evicts the key that was not seen for the longest time; ties: the less frequent key."""

    def order(self, used: Counts, count: Counts) -> Sequence[NDArray[Any]] | None:
        """By age, then by frequency."""
        return used, count


@dataclass(frozen=True, slots=True)
class LeastFrequentlyUsed:
    """Evicts the key with the fewest lookups; ties: the key that was not seen for longer.

    Arguments:
      half_life: after so many batches a lookup counts half, so that keys that were frequent long ago leave;
        None for lookups that always count the same. Source: Cormode et al., "Forward Decay", 2009.

    Raises:
      EmbeddingError: if it is less than a batch.
    """

    half_life: float | None = None

    def __post_init__(self) -> None:
        if self.half_life is not None and not self.half_life >= 1:
            why, fix = (
                "counts of one batch must not grow without bound",
                "LeastFrequentlyUsed(half_life=1000)",
            )
            raise EmbeddingError(problem("LeastFrequentlyUsed", f"{self}", "1 batch or more", why, fix))

    def order(self, used: Counts, count: Counts) -> Sequence[NDArray[Any]] | None:
        """By frequency, then by age."""
        return count, used


@dataclass(slots=True)
class EvictionHeap:
    """The rows of a vocabulary, the one that leaves first on top.

    Arguments:
      first, second: what each row was ordered by when it came into the heap, as the heap lies.
      rows: the rows, as the heap lies.
      size: how many are in it; what lies behind is room.
    """

    first: Counts
    second: Counts
    rows: Rows
    size: int

    @staticmethod
    def of(first: Counts, second: Counts, room: int) -> EvictionHeap:
        """The heap of rows `0..n - 1`, with room for more."""
        made = EvictionHeap(np.empty(room), np.empty(room), np.arange(room, dtype=np.int32), first.size)
        made.first[: made.size], made.second[: made.size] = first, second
        _build(made.first, made.second, made.rows, made.size)
        return made

    def take(self, count: int, first: Counts, second: Counts, held: NDArray[np.bool_]) -> tuple[Rows, Rows]:
        """Takes out the rows that leave, and those that came to the top but are held.

        Arguments:
          count: of rows that leave.
          first, second: of all rows, what they are ordered by now.
          held: of all rows, which must not leave.
        """
        leaves, stays = np.empty(count, np.int32), np.empty(np.count_nonzero(held), np.int32)
        kept = int(_take(self.first, self.second, self.rows, self.size, first, second, held, leaves, stays))
        self.size -= count + kept
        return np.sort(leaves), stays[:kept]

    def put(self, rows: Rows, first: Counts, second: Counts) -> None:
        """Puts rows back that were taken out."""
        _put(self.first, self.second, self.rows, self.size, rows, first[rows], second[rows])
        self.size += rows.size


def columns_of(policy: Policy, used: Counts, count: Counts) -> tuple[Counts, Counts] | None:
    """What rows are ordered by; None if none is evicted. The columns of the policies here are no copies."""
    found = policy.order(used, count)
    if found is None:
        return None
    first, *rest = (np.ascontiguousarray(column, np.float64) for column in found)
    return first, rest[0] if rest else np.zeros(first.size)


@compile_loops
def _less(a: Any, b: Any, row: Any, other_a: Any, other_b: Any, other: Any) -> Any:
    return a < other_a or (a == other_a and (b < other_b or (b == other_b and row < other)))


@compile_loops
def _sink(first: Any, second: Any, rows: Any, size: Any, at: Any) -> None:
    """Moves an element of a heap down to its place."""
    a, b, row = first[at], second[at], rows[at]
    while 2 * at + 1 < size:
        child, other = 2 * at + 1, 2 * at + 2
        if other < size and _less(
            first[other], second[other], rows[other], first[child], second[child], rows[child]
        ):
            child = other
        if not _less(first[child], second[child], rows[child], a, b, row):
            break
        first[at], second[at], rows[at] = first[child], second[child], rows[child]
        at = child
    first[at], second[at], rows[at] = a, b, row


@compile_loops
def _build(first: Any, second: Any, rows: Any, size: Any) -> None:
    for at in range(size // 2 - 1, -1, -1):
        _sink(first, second, rows, size, at)


@compile_loops
def _take(
    heap_first: Any,
    heap_second: Any,
    rows: Any,
    size: Any,
    first: Any,
    second: Any,
    held: Any,
    leaves: Any,
    stays: Any,
) -> Any:
    """How many rows were taken out that stay; what was looked up meanwhile sinks to where it belongs now."""
    left, kept = 0, 0
    while left < leaves.size:
        row = rows[0]
        if not held[row] and (heap_first[0] != first[row] or heap_second[0] != second[row]):
            heap_first[0], heap_second[0] = first[row], second[row]
        else:
            if held[row]:
                stays[kept] = row
                kept += 1
            else:
                leaves[left] = row
                left += 1
            size -= 1
            heap_first[0], heap_second[0], rows[0] = heap_first[size], heap_second[size], rows[size]
        _sink(heap_first, heap_second, rows, size, 0)
    return kept


@compile_loops
def _put(heap_first: Any, heap_second: Any, rows: Any, size: Any, new: Any, first: Any, second: Any) -> None:
    for i in range(new.size):
        at = size + i
        while at > 0:
            above = (at - 1) // 2
            if not _less(first[i], second[i], new[i], heap_first[above], heap_second[above], rows[above]):
                break
            heap_first[at], heap_second[at], rows[at] = heap_first[above], heap_second[above], rows[above]
            at = above
        heap_first[at], heap_second[at], rows[at] = first[i], second[i], new[i]
