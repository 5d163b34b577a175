"""Where a sequence says the same again and again: the layers of a network, by the lines of its ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LEAST = 4
"""Ops of what may repeat: fewer are products side by side, and no layer."""
TRIED = 40
"""Distances between equal ops that are tried, the most frequent."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """Equal parts of a sequence, one behind the other.

    Arguments:
      start: where the first begins.
      period: of how many items each is.
      times: how many there are.
      slack: by how many items all of them may be moved to the right and still be equal.
    """

    start: int
    period: int
    times: int
    slack: int = 0

    @property
    def end(self) -> int:
        """Behind the last."""
        return self.start + self.period * self.times

    def moved(self, by: int) -> Repeat:
        """The same a little to the right."""
        return Repeat(self.start + by, self.period, self.times, self.slack - by)

    def parts(self) -> Iterator[range]:
        """The positions of each."""
        return (range(at, at + self.period) for at in range(self.start, self.end, self.period))


def repeats(tokens: Sequence[Hashable], mixed: Callable[[Repeat], int]) -> list[Repeat]:
    """The repeats of a sequence from left to right: the one that covers most, then those beside it.

    Arguments:
      mixed: how badly a repeat is cut, of those that only begin at another of their items: of these the first
        that is cut least is taken.

    >>> repeats("ab" + 4 * "cdefgh" + "cd", mixed=lambda r: 0)
    [Repeat(start=2, period=6, times=4, slack=2)]
    """
    numbers: dict[Hashable, int] = {}
    coded = np.array([numbers.setdefault(t, len(numbers)) for t in tokens], np.int64)
    return list(_within(coded, 0, len(coded), mixed))


def _within(
    coded: npt.NDArray[np.int64], start: int, end: int, mixed: Callable[[Repeat], int]
) -> Iterator[Repeat]:
    best = _widest(coded[start:end])
    if best is None:
        return
    found = Repeat(start + best.start, best.period, best.times, best.slack)
    found = min((found.moved(by) for by in range(found.slack + 1)), key=mixed)
    yield from _within(coded, start, found.start, mixed)
    yield found
    yield from _within(coded, found.end, end, mixed)


def _widest(coded: npt.NDArray[np.int64]) -> Repeat | None:
    """The repeat that covers most of a sequence."""
    found = [r for period in _distances(coded) if (r := _longest_run(coded, period)) is not None]
    return max(found, key=lambda r: (r.times * r.period, -r.period), default=None)


def _distances(coded: npt.NDArray[np.int64]) -> list[int]:
    """The most frequent distances between equal items that follow each other."""
    last: dict[int, int] = {}
    count: Counter[int] = Counter()
    for at, token in enumerate(coded.tolist()):
        if token in last:
            count[at - last[token]] += 1
        last[token] = at
    frequent = sorted((d for d in count if d >= LEAST), key=lambda d: (-count[d], d))
    return frequent[:TRIED]


def _longest_run(coded: npt.NDArray[np.int64], period: int) -> Repeat | None:
    """The longest stretch in which every item is what it was one period before."""
    same = np.concatenate([[False], coded[:-period] == coded[period:], [False]])
    edges = np.flatnonzero(np.diff(same.astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    if not len(starts):
        return None
    k = int(np.argmax(ends - starts))
    start, length = int(starts[k]), int(ends[k] - starts[k]) + period
    times = length // period
    return Repeat(start, period, times, length - times * period) if times > 1 else None
