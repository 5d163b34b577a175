"""What `sbp.fit` takes for batches, and those of them that a run has yet to see."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias, runtime_checkable

from sbp.untyped import PyTree


@runtime_checkable
class Feed(Protocol):
    """Batches that have to be told where to begin, and when nobody wants more: of threads that read files."""

    def batches_from(self, step: int) -> AbstractContextManager[Iterable[PyTree]]:
        """The batches behind the first `step` ones; it is left when training ends, however that is."""


Batches: TypeAlias = Callable[[int], PyTree] | Iterable[PyTree] | Feed
"""Number of the step -> batch; or batches in a row; or a feed."""


def behind(batches: Batches, step: int) -> AbstractContextManager[Iterable[PyTree]]:
    """The batches behind the first `step` ones.

    >>> with behind("abc", 1) as rest, behind(lambda i: 10 * i, 1) as numbered:
    ...     list(rest), next(iter(numbered))
    (['b', 'c'], 10)
    """
    if isinstance(batches, Feed):
        return batches.batches_from(step)
    if callable(batches):
        return nullcontext(map(batches, itertools.count(step)))
    return nullcontext(itertools.islice(iter(batches), step, None))
