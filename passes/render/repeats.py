"""Where a sequence says the same again and again: the layers of a network, by the lines of its ops.

Layers by the weights that are read, where what repeats does not tell them: some have ops of their own.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
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

    def shift(self, by: int) -> Repeat:
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
    found = min((found.shift(by) for by in range(found.slack + 1)), key=mixed)
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


def layer_runs(
    marks: Sequence[frozenset[str]], functions: Sequence[str], ends: Sequence[bool]
) -> list[tuple[str, list[int]]]:
    """The positions of some ops by the layer that they belong to, "" outside of all, in their order; nothing
    where a layer is not in one piece.

    What stands between two ops of a layer is of that layer, and what follows its last one as long as it is in
    one of its functions.

    Arguments:
      marks: per op, the layers whose weights it reads.
      functions: per op, the function that it stands in.
      ends: per op, whether it reads weights that belong to no layer.

    >>> a, b, no = frozenset(["w[0]"]), frozenset(["w[1]"]), frozenset()
    >>> layer_runs([no, a, no, a, no, b, no], "gffgfff", [False] * 6 + [True])
    [('', [0]), ('w[0]', [1, 2, 3, 4]), ('w[1]', [5]), ('', [6])]
    """
    every = Counter(_head(mark) for mark in sorted({m for each in marks for m in each}))
    most = every.most_common(1)[0][0] if every else ""
    at = [max((m for m in each if _head(m) == most), default="") for each in marks]
    where: dict[str, list[int]] = {}
    for k, mark in enumerate(at):
        if mark:
            where.setdefault(mark, []).append(k)
    spans = sorted((ks[0], ks[-1] + 1, mark) for mark, ks in where.items())
    if len(spans) < 2 or any(end > start for (_, end, _), (start, _, _) in itertools.pairwise(spans)):
        return []
    found: list[tuple[str, list[int]]] = []
    done = 0
    limits = [start for start, _, _ in spans[1:]] + [len(at)]
    for (start, end, mark), limit in zip(spans, limits, strict=True):
        own = set(functions[start:end])
        while end < limit and functions[end] in own and not ends[end]:
            end += 1
        found += [
            *([("", list(range(done, start)))] if done < start else []),
            (mark, list(range(start, end))),
        ]
        done = end
    return [*found, *([("", list(range(done, len(at))))] if done < len(at) else [])]


def _head(mark: str) -> str:
    """What layers are numbered in.

    >>> _head("['groups'][0][1]"), _head("batch[0]")
    ("['groups']", 'batch')
    """
    return re.split(r"\[\d+\]", mark, maxsplit=1)[0]


def short_mark(mark: str) -> str:
    """A path without its quotes.

    >>> short_mark("['layers'][3]")
    'layers[3]'
    """
    return re.sub(r"\['([^']*)'\]", r".\1", mark).lstrip(".")


def mark_number(mark: str) -> int:
    """The number of a layer, by the part of a path that ends with it."""
    return int(mark[mark.rindex("[") + 1 : -1])


def ranged_marks(marks: Iterable[str]) -> str:
    """One name for layers of several numbers.

    >>> ranged_marks(["['layers'][0]", "['layers'][1]", "['layers'][2]", "['layers'][5]"])
    'layers[0-2, 5]'
    """
    heads: dict[str, list[int]] = {}
    for mark in marks:
        heads.setdefault(short_mark(mark[: mark.rindex("[")]), []).append(mark_number(mark))
    said = []
    for head, numbers in heads.items():
        runs: list[list[int]] = []
        for n in sorted(set(numbers)):
            if runs and runs[-1][-1] == n - 1:
                runs[-1].append(n)
            else:
                runs.append([n])
        said.append(f"{head}[{', '.join([f'{r[0]}-{r[-1]}' if len(r) > 1 else str(r[0]) for r in runs])}]")
    return " + ".join(said)
