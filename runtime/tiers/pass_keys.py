"""The keys of a pass: those of all its batches, each once, and for every id the slot of its row.

A pass is some batches whose rows are on the devices all at once. All keys are known before it begins, so that
nothing is inserted while it trains: a slot is the rank of a key among the sorted ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbp.runtime.embedding.keys import NO_ID, unify
from sbp.runtime.tiers.segment import Keys

Ids = NDArray[Any]
Slots = NDArray[np.int32]


@dataclass(frozen=True)
class PassKeys:
    """What a pass needs.

    Arguments:
      keys: "n", sorted, each once: `unify` of a table's number and an id.
      batches: of each batch the slots of each feature's ids, int32, in their shape; `NO_ID` for none.
    """

    keys: Keys
    batches: tuple[dict[str, Slots], ...]

    def __len__(self) -> int:
        return len(self.keys)

    def shared(self, other: PassKeys) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The slots here, and there, of keys that another pass has too."""
        _, here, there = np.intersect1d(self.keys, other.keys, assume_unique=True, return_indices=True)
        return here, there


def pass_keys(batches: Sequence[Mapping[str, Ids]], tables: Mapping[str, int]) -> PassKeys:
    """The keys of some batches.

    Arguments:
      batches: of each feature ids of any shape, on the host; `NO_ID` for none.
      tables: the number of each feature's table, 0..65535.

    Raises:
      EmbeddingError: for ids below -1, or of more than 48 bits.

    >>> found = pass_keys([{"user": np.array([7, -1])}, {"user": np.array([9, 7])}], {"user": 0})
    >>> found.keys.tolist(), [b["user"].tolist() for b in found.batches]
    ([7, 9], [[0, -1], [1, 0]])
    """
    given = [(name, np.asarray(ids)) for batch in batches for name, ids in batch.items()]
    present = [ids != NO_ID for _, ids in given]
    unified = [unify(tables[name], ids[there]) for (name, ids), there in zip(given, present, strict=True)]
    every = np.concatenate([np.zeros(0, np.int64), *unified]).view(np.uint64)
    keys, ranks = np.unique(every, return_inverse=True)
    begin, slots = 0, list[Slots]()
    for (_, ids), there in zip(given, present, strict=True):
        out, count = np.full(ids.shape, NO_ID, np.int32), int(there.sum())
        out[there] = ranks.reshape(-1)[begin : begin + count]
        slots.append(out)
        begin += count
    left = iter(slots)
    return PassKeys(keys, tuple({name: next(left) for name in batch} for batch in batches))


def capacity_of(count: int, multiple: int, growth: float = 1.25) -> int:
    """The size of a pass's table: the least on a ladder that holds so many rows.

    Each rung is about so many times the one below. So passes of about the same size run one program.

    Arguments:
      multiple: each rung is a multiple of it.

    >>> [capacity_of(n, 8) for n in (0, 8, 9, 1000, 1001, 1100)]
    [8, 8, 16, 1184, 1184, 1184]
    """
    rung = multiple
    while rung < count:
        rung = max(rung + multiple, math.ceil(rung * growth / multiple) * multiple)
    return rung
