"""A vocabulary for each feature: keys get rows as they appear, and lose them when a table is full."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from models.recommender.batch import Batch, Lists, as_lists, pad_lists
from models.recommender.feed import Copy, Feed
from models.recommender.stages import Flow
from sbp.runtime.embedding import (
    Admission,
    Assignment,
    Collection,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    Policy,
    RowReset,
    Vocabulary,
    row_reset,
)

PyTree: TypeAlias = Any

POLICIES: Mapping[str, Policy] = {
    "lru": LeastRecentlyUsed(),
    "lfu": LeastFrequentlyUsed(),
    "aged": LeastFrequentlyUsed(half_life=1000),
}
"""What `--evict` stands for."""


@dataclass
class Vocabularies:
    """The vocabularies of all tables, on the host.

    Arguments:
      tables: whose rows they give away.
      policy: who loses its row.
      least: lookups before a key gets a row.
      hotness: as of `Data`.
      each: of each table, in order.
    """

    tables: Collection
    policy: Policy
    least: int = 1
    hotness: tuple[int, ...] = ()
    each: list[Vocabulary] = field(init=False)

    def __post_init__(self) -> None:
        admission = Admission(self.least, 1 << 16) if self.least > 1 else None
        self.each = [
            Vocabulary(t.vocabulary_size, self.policy, name=t.name, admission=admission)
            for t in self.tables.tables
        ]

    def learn(self, batch: Batch) -> tuple[Batch, RowReset]:
        """A batch with rows in place of its keys, and the rows that begin anew for it."""
        lists = as_lists(batch.keys)
        found: dict[str, Assignment] = {
            v.name: v.lookup(x.values) for v, x in zip(self.each, lists, strict=True)
        }
        most = len(batch) * sum(self.hotness or [1] * len(lists))
        rows = self._with(batch, lists, [one.rows for one in found.values()])
        return rows, row_reset(self.tables, found, most)

    def rows(self, batch: Batch) -> Batch:
        """A batch with rows in place of its keys, for evaluation: an unknown key has none."""
        lists = as_lists(batch.keys)
        return self._with(batch, lists, [v.find(x.values) for v, x in zip(self.each, lists, strict=True)])

    def _with(self, batch: Batch, lists: Sequence[Lists], rows: Sequence[NDArray[np.int32]]) -> Batch:
        """A batch with these rows for the keys of its lists."""
        if not self.hotness:
            return replace(batch, keys=np.stack(rows, axis=1))
        found = tuple(Lists(r, x.offsets - x.offsets[0]) for r, x in zip(rows, lists, strict=True))
        return replace(batch, keys=pad_lists(found, self.hotness))

    def empty(self) -> Vocabularies:
        """Others without a key."""
        return Vocabularies(self.tables, self.policy, self.least, self.hotness)

    def __str__(self) -> str:
        taken, room = sum(map(len, self.each)), sum(v.capacity for v in self.each)
        return f"{taken:,} of {room:,} rows have a key"


@dataclass
class Learning:
    """Batches of a flow, with rows when they are asked for: no vocabulary may know a key too early."""

    flow: Flow
    vocabularies: Vocabularies
    copy: Copy

    def __enter__(self) -> Learning:
        self.flow.__enter__()
        return self

    def __exit__(self, *why: Any) -> None:
        self.flow.__exit__(*why)

    def __iter__(self) -> Iterator[tuple[Batch, RowReset]]:
        for batch in self.flow:
            rows, change = self.vocabularies.learn(batch)
            yield self.copy(rows), change

    def __str__(self) -> str:
        return f"{self.flow}\n{self.vocabularies}"


@dataclass
class LearningFeed(Feed[Learning]):
    """A feed that is saved with its vocabularies, as `sbp.fit` asks of one that has some."""

    vocabularies: Vocabularies = field(kw_only=True)

    def get_state(self) -> PyTree:
        """For checkpoints."""
        return {v.name: v.get_state() for v in self.vocabularies.each}

    def set_state(self, state: PyTree) -> None:
        """Goes on from there."""
        for v in self.vocabularies.each:
            v.set_state(state[v.name])
