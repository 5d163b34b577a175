"""Layers by the weights that are read, where what repeats does not tell them: some have ops of their own."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence


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
        found += [("", list(range(done, start)))] if done < start else []
        found.append((mark, list(range(start, end))))
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
        parts = [f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs]
        said.append(f"{head}[{', '.join(parts)}]")
    return " + ".join(said)
