"""One table over three tiers: devices, host and disk. A row is newest on the devices, then on the host."""

import base64
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from numpy.typing import NDArray

from sbp.compat.untyped import block_until_ready
from sbp.runtime.embedding.key_index import UNKNOWN
from sbp.runtime.embedding.tiers.device_rows import DeviceRows
from sbp.runtime.embedding.tiers.host_cache import HostCache, RowSources
from sbp.runtime.embedding.tiers.new_rows import NewRows
from sbp.runtime.embedding.tiers.part_stores import PartStores
from sbp.runtime.embedding.tiers.rates import TierRates
from sbp.runtime.embedding.tiers.row_codec import RowCodec
from sbp.runtime.embedding.tiers.segment import Keys, Rows
from sbp.runtime.embedding.tiers.slots import KeySlots, SlotMoves, SlotTable, part_of
from sbp.runtime.processes.process_group import process_group


@dataclass
class TableTier:
    """The rows of one table of a pass, wherever they are.

    Arguments:
      stores: of the rows on disk.
      cache: of those on the host.
      codec: of rows.
      device: the arrays.
      new: makes rows of keys that nobody has written.
      rates: what was moved.
    """

    stores: PartStores
    cache: HostCache
    codec: RowCodec
    device: DeviceRows
    new: NewRows
    rates: TierRates = field(default_factory=TierRates)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_own(self, keys: Keys) -> NDArray[np.bool_]:
        """Which keys have their rows in this process."""
        if len(self.stores.own) == self.stores.parts:
            return np.ones(len(keys), bool)
        return np.isin(part_of(keys, self.stores.parts), self.stores.own)

    def fetch(self, moves: SlotMoves) -> None:
        """Brings rows that come next from the disk to the host, as many as it has room for.

        Rows on the host that have to go soon are written first: nothing has to be written then when rows come
        back from the devices.
        """
        began = time.perf_counter()
        with self._lock:
            self.cache.clean()
            keys = moves.incoming_keys.keys
            found = self.cache.fetch(keys[self.is_own(keys)], self.new)
        self.rates += TierRates(sources=found, fetch_seconds=time.perf_counter() - began)

    def exchange(self, arrays: Sequence[jax.Array], moves: SlotMoves, step: int) -> Sequence[jax.Array]:
        """The arrays with the rows of a pass, after those that leave went to the host.

        Arguments:
          step: the last one that has changed the rows that leave.
        """
        block_until_ready(arrays)  # the steps before, which take time of their own
        began = time.perf_counter()
        with self._lock:
            for piece in self.device.pieces(moves.outgoing_keys):
                rows = self.codec.rows(self.device.read(arrays, piece))
                self.cache.write(piece.keys, rows, step=step)
            before = self.cache.sources
            for piece in self.device.pieces(moves.incoming_keys):
                arrays = self.device.write(
                    arrays, piece, self.codec.lines(self._rows(piece.keys, taken=True))
                )
            after = self.cache.sources
        late = RowSources(0, after.disk - before.disk, after.new - before.new)
        self.rates += TierRates(
            rows=len(moves.slots),
            device=len(moves.slots) - len(moves.incoming_keys),
            sources=late,
            written_rows=len(moves.outgoing_keys),
            move_seconds=time.perf_counter() - began,
            passes=1,
        )
        return arrays

    def _rows(self, keys: Keys, *, taken: bool = False) -> Rows:
        """The rows of keys that are not on the devices."""
        read = self.cache.read(keys, taken=taken)
        if not read.has_row.all():
            read.rows[~read.has_row] = self.new(keys[~read.has_row])
        return read.rows

    def read(
        self, arrays: Sequence[jax.Array], slots: SlotTable, keys: Keys
    ) -> tuple[NDArray[np.intp], Rows]:
        """The newest rows of those keys that this process has, wherever they are, and which keys these are.

        Arguments:
          keys: sorted, each once; all processes ask for the same.
        """
        mine = np.flatnonzero(self.is_own(keys))
        rows = np.empty((len(mine), self.codec.width), np.uint8)
        at = slots.find(keys)
        there = at != UNKNOWN
        for piece in self.device.pieces(KeySlots(keys[there], at[there])):
            rows[np.searchsorted(keys[mine], piece.keys)] = self.codec.rows(self.device.read(arrays, piece))
        others = ~there[mine]
        if others.any():
            with self._lock:
                rows[others] = self._rows(keys[mine][others])
        return mine, rows

    def write_back(self, arrays: Sequence[jax.Array], slots: SlotTable, step: int) -> None:
        """Copies the rows on the devices to the host."""
        with self._lock:
            for piece in self.device.pieces(slots.occupied_slots()):
                rows = self.codec.rows(self.device.read(arrays, piece))
                self.cache.write(piece.keys, rows, step=step)

    def commit(self) -> dict[int, int]:
        """Writes what the host has to the disk, as a version of each part.

        Raises:
          StoreError: if the disk is full or cannot be written; the versions before stay.
        """
        with self._lock:
            self.cache.flush()
            return self.stores.commit()

    def close(self) -> None:
        """Lets other processes have the stores; what was not committed is lost."""
        self.stores.close()


def of_all_processes(mine: NDArray[np.intp], own: Rows, count: int) -> Rows:
    """All rows, of those that each process has; all come here.

    Arguments:
      mine: the places of those of this process.
      count: of all.
    """
    others = process_group()
    if others is None:
        return own
    out = np.empty((count, own.shape[1]), np.uint8)
    given = [mine.tolist(), base64.b64encode(own.tobytes()).decode()]
    for at, text in others.gather("rows", given):
        out[at] = np.frombuffer(base64.b64decode(text), np.uint8).reshape(len(at), -1)
    return out
