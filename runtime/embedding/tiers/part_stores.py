"""The stores of a table: one for each part of its keys, so that processes can share them out anew."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sbp.runtime.embedding.tiers.segment import Keys, Rows, RowView, Steps
from sbp.runtime.embedding.tiers.slots import part_of
from sbp.runtime.embedding.tiers.store import ReadRows, RowStore


class PartStores:
    """The rows of the parts of a table that a process has, as one store.

    Arguments:
      folder: of the table.
      parts: of all its keys.
      own: those that are opened.
      width, layout: as of `RowStore`.
      versions: of each part, the one that is opened; 0 for an empty one. None for the last of each.

    Raises:
      StoreError: as `RowStore`.
    """

    def __init__(
        self,
        folder: Path,
        parts: int,
        own: Sequence[int],
        width: int,
        layout: str,
        versions: Mapping[int, int] | None = None,
    ) -> None:
        self.folder, self.width, self.parts = folder, width, parts
        self._open = ExitStack()
        self._stores: dict[int, RowStore] = {}
        with self._open:
            for part in own:
                version = None if versions is None else versions.get(part, 0)
                store = RowStore(
                    folder / f"part_{part:04d}_of_{parts:04d}", width, layout=layout, version=version
                )
                self._stores[part] = self._open.enter_context(store)
            self._open = self._open.pop_all()

    @property
    def own(self) -> NDArray[np.int32]:
        """The parts that are open."""
        return np.array([*self._stores], np.int32)

    def __len__(self) -> int:
        """Rows in all segments, as of `RowStore`."""
        return sum(map(len, self._stores.values()))

    def check(self, keys: Keys, rows: Rows | RowView | None = None) -> None:
        """As `RowStore.check`."""
        next(iter(self._stores.values())).check(keys, rows)

    def read(self, keys: Keys) -> ReadRows:
        """As `RowStore.read`."""
        self.check(keys)
        found, steps = np.zeros(len(keys), bool), np.zeros(len(keys), np.int64)
        rows = np.zeros((len(keys), self.width), np.uint8)
        for store, at in self._places(keys):
            read = store.read(keys[at])
            found[at], steps[at], rows[at] = read.has_row, read.steps, read.rows
        return ReadRows(found, steps, rows)

    def write(self, keys: Keys, rows: Rows | RowView, *, step: int | Steps) -> None:
        """As `RowStore.write`."""
        self.check(keys, rows)
        steps = np.broadcast_to(np.asarray(step, np.int64), (len(keys),))
        view = rows if isinstance(rows, RowView) else RowView(rows, np.arange(len(rows)))
        for store, at in self._places(keys):
            store.write(keys[at], view.part(at), step=steps[at])

    def commit(self) -> dict[int, int]:
        """Writes down a version of each part.

        Raises:
          StoreError: as `RowStore.commit`.
        """
        return {part: store.commit() for part, store in self._stores.items()}

    def keep(self, versions: Iterable[Mapping[int, int]]) -> None:
        """Removes all versions but these, and the last of each part."""
        wanted = [*versions]
        for part, store in self._stores.items():
            store.keep({v[part] for v in wanted if part in v})

    def changed_rows(self, since: int) -> Iterator[tuple[Keys, Steps, Rows]]:
        """As `RowStore.changed_rows`, part after part."""
        for store in self._stores.values():
            yield from store.changed_rows(since)

    def close(self) -> None:
        """Lets other processes have the stores."""
        self._open.close()

    def _places(self, keys: Keys) -> Iterable[tuple[RowStore, NDArray[np.intp]]]:
        """Each store, and which of the keys it has."""
        if self.parts == 1:
            yield self._stores[0], np.arange(len(keys))
            return
        parts = part_of(keys, self.parts)
        for part, store in self._stores.items():
            at = np.flatnonzero(parts == part)
            if len(at):
                yield store, at
