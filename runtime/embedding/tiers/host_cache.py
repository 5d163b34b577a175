"""Rows that the host holds between devices and a store: those used last, some newer than the store's.

Rows come and go in batches of sorted keys. What was written stays here until room is needed, or until it is
flushed; then all of it goes to the store as one segment.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbp.runtime.embedding.key_index import UNKNOWN, KeyIndex
from sbp.runtime.embedding.tiers import messages
from sbp.runtime.embedding.tiers.part_stores import PartStores
from sbp.runtime.embedding.tiers.segment import Keys, Rows, RowView, Steps
from sbp.runtime.embedding.tiers.store import ReadRows, RowStore

FETCHED_BYTES = 1 << 23
"""Of rows that are read at a time where they are only to be held."""
INDEX_BYTES = 12
"""Of a slot of the index: a key and a number."""
SLOT_BYTES = 8 + 8 + 8 + 1
"""Beside a row: its key, its step, when it was used, and whether it is newer than the store's."""


@dataclass(frozen=True)
class RowSources:
    """Where rows were found.

    Arguments:
      host, disk: rows that were there.
      new: keys that nobody has written yet.
    """

    host: int = 0
    disk: int = 0
    new: int = 0

    def __add__(self, other: RowSources) -> RowSources:
        return RowSources(self.host + other.host, self.disk + other.disk, self.new + other.new)

    def __sub__(self, other: RowSources) -> RowSources:
        return RowSources(self.host - other.host, self.disk - other.disk, self.new - other.new)


def cached_rows(host_bytes: int, width: int) -> int:
    """How many rows fit, with all that is held for them.

    >>> cached_rows(1 << 20, 256)
    3381
    """

    def size(rows: int) -> int:
        return rows * (width + SLOT_BYTES) + _index_slots(rows) * INDEX_BYTES

    return bisect.bisect_right(range(1, 1 + host_bytes // width), host_bytes, key=size)


def _index_slots(rows: int) -> int:
    """Slots of an index of so many keys: at most half are taken."""
    return 1 << (2 * rows - 1).bit_length()


@dataclass
class HostCache:
    """Rows of a store in the memory of the host. Use it from one thread at a time.

    Arguments:
      store: that has all others.
      host_bytes: what it may hold.

    Raises:
      StoreError: if that is less than a row takes.

    >>> import tempfile
    >>> from sbp.runtime.embedding.tiers.store import RowStore
    >>> folder = tempfile.TemporaryDirectory()
    >>> with RowStore(folder.name, 8) as store:
    ...     cache = HostCache(store, 1000)
    ...     cache.write(np.array([3, 5], np.uint64), np.full((2, 8), 7, np.uint8), step=1)
    ...     cache.read(np.array([4, 5], np.uint64)).has_row.tolist(), len(store), cache.dirty_rows
    ([False, True], 0, 2)
    """

    store: RowStore | PartStores
    host_bytes: int
    sources: RowSources = field(init=False, default_factory=RowSources)

    def __post_init__(self) -> None:
        slots = cached_rows(self.host_bytes, self.store.width)
        if not slots:
            least = self.store.width + SLOT_BYTES + _index_slots(1) * INDEX_BYTES
            raise messages.too_small(self.store.folder, self.host_bytes, least)
        self._index = KeyIndex(
            np.zeros(_index_slots(slots), np.int64), np.full(_index_slots(slots), UNKNOWN, np.int32)
        )
        self._keys, self._steps = np.zeros(slots, np.uint64), np.zeros(slots, np.int64)
        self._rows = np.zeros((slots, self.store.width), np.uint8)
        self._used, self._dirty = np.zeros(slots, np.int64), np.zeros(slots, bool)
        self._filled, self._now = 0, 0

    def __len__(self) -> int:
        """Rows that it holds."""
        return self._filled

    @property
    def slots(self) -> int:
        """Rows that it can hold."""
        return len(self._keys)

    @property
    def dirty_rows(self) -> int:
        """Rows that are newer than the store's."""
        return int(self._dirty.sum())

    def read(self, keys: Keys, *, taken: bool = False) -> ReadRows:
        """The newest rows of some keys; they are held from now on, as far as there is room.

        Arguments:
          keys: "n", sorted, each once.
          taken: whether the rows live elsewhere from now on, until they are written again: the store need not
            have them.

        Raises:
          StoreError: as `RowStore.read`; and `RowStore.write`, where rows have to go for these.
        """
        self._now += 1
        slots = self._index.find(keys.view(np.int64))
        here, others = np.flatnonzero(slots != UNKNOWN), np.flatnonzero(slots == UNKNOWN)
        read = self.store.read(keys[others])
        found, steps = np.ones(len(keys), bool), np.zeros(len(keys), np.int64)
        rows = np.empty((len(keys), self.store.width), np.uint8)
        found[others], steps[others], rows[others] = read.has_row, read.steps, read.rows
        steps[here], rows[here] = self._steps[slots[here]], self._rows[slots[here]]
        self._used[slots[here]] = self._now
        if taken:
            self._dirty[slots[here]] = False
        new = int(np.count_nonzero(~read.has_row))
        self.sources += RowSources(len(here), len(others) - new, new)
        kept = others[read.has_row]
        self._hold(keys[kept], rows[kept], steps[kept], dirty=False)
        return ReadRows(found, steps, rows)

    def write(self, keys: Keys, rows: Rows, *, step: int | Steps) -> None:
        """Takes rows; those that there is no room for go to the store at once.

        Arguments:
          keys: "n", sorted, each once.
          rows: "n width" bytes.
          step: of training; one for all, or "n".

        Raises:
          StoreError: as `RowStore.write`.
        """
        self.store.check(keys, rows)
        self._now += 1
        steps = np.broadcast_to(np.asarray(step, np.int64), (len(keys),))
        slots = self._index.find(keys.view(np.int64))
        here, others = np.flatnonzero(slots != UNKNOWN), np.flatnonzero(slots == UNKNOWN)
        self._put(slots[here], keys[here], rows[here], steps[here], dirty=True)
        left = others[self._hold(keys[others], rows[others], steps[others], dirty=True) :]
        self.store.write(keys[left], RowView(rows, left), step=steps[left])

    def fetch(self, keys: Keys, begin: Callable[[Keys], Rows]) -> RowSources:
        """Holds the rows of some keys, as far as there is room. Returns where they were.

        Arguments:
          keys: "n", sorted, each once.
          begin: gives rows to keys that nobody has written yet.

        Raises:
          StoreError: as `read`.
        """
        self._now += 1
        slots = self._index.find(keys.view(np.int64))
        self._used[slots[slots != UNKNOWN]] = self._now
        others, found = keys[slots == UNKNOWN], RowSources(host=int(np.count_nonzero(slots != UNKNOWN)))
        at_once = max(1, FETCHED_BYTES // self.store.width)
        room = self.slots - found.host
        for first in range(0, min(len(others), room), at_once):
            wanted = others[first : min(first + at_once, room)]
            read = self.store.read(wanted)
            for there, dirty in ((read.has_row, False), (~read.has_row, True)):
                of = wanted[there]
                rows = begin(of) if dirty and len(of) else read.rows[there]
                self._hold(of, rows, read.steps[there], dirty=dirty)
            new = int(np.count_nonzero(~read.has_row))
            found += RowSources(disk=len(wanted) - new, new=new)
        return found

    def clean(self) -> None:
        """Writes rows that have to go next, if many of these are newer than the store's.

        Raises:
          StoreError: as `flush`.
        """
        last = self._oldest(self.slots // 2)
        if 2 * np.count_nonzero(self._dirty[last]) > len(last):
            self._write(last[self._dirty[last]])

    def flush(self) -> None:
        """Writes what is newer than the store's to the store.

        Raises:
          StoreError: as `RowStore.write`; nothing is lost then.
        """
        self._write(np.flatnonzero(self._dirty))

    def _write(self, at: NDArray[Any]) -> None:
        """Writes the rows of some slots."""
        at = at[np.argsort(self._keys[at])]
        self.store.write(self._keys[at], RowView(self._rows, at), step=self._steps[at])
        self._dirty[at] = False

    # -- slots

    def _hold(self, keys: Keys, rows: Rows, steps: Steps, *, dirty: bool) -> int:
        """Holds rows of keys that are not here, in free slots and in those used longest ago. Returns how many
        of them there is room for."""
        count = min(len(keys), self.slots - int(np.count_nonzero(self._used[: self._filled] == self._now)))
        fresh = np.arange(self._filled, min(self._filled + count, self.slots), dtype=np.int32)
        self._used[fresh] = self._now
        gone = self._oldest(count - len(fresh))
        if self._dirty[gone].any():
            last = self._oldest(max(len(gone), self.slots // 2))
            self._write(last[self._dirty[last]])
        self._index.remove(self._keys[gone].view(np.int64))
        self._filled += len(fresh)
        slots = np.concatenate([fresh, gone])
        self._index.add(keys[:count].view(np.int64), slots)
        self._put(slots, keys[:count], rows[:count], steps[:count], dirty=dirty)
        return count

    def _oldest(self, count: int) -> NDArray[np.int32]:
        """The slots that were used longest ago."""
        if not count:
            return np.zeros(0, np.int32)
        return np.argpartition(self._used, count - 1)[:count].astype(np.int32)

    def _put(self, slots: NDArray[np.int32], keys: Keys, rows: Rows, steps: Steps, *, dirty: bool) -> None:
        """Puts rows into slots."""
        self._keys[slots], self._rows[slots], self._steps[slots] = keys, rows, steps
        self._used[slots], self._dirty[slots] = self._now, dirty
