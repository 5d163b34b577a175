"""Tables larger than the devices, and than the host: a training sees those rows that its pass needs."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import ArrayLike, NDArray

from sbp.compat.untyped import PyTree, partition_spec, struct
from sbp.errors import EmbeddingError, StoreError, raise_all
from sbp.lazy import Optimizer
from sbp.options import bytes_of
from sbp.placement import Placement, as_placement
from sbp.runtime.embedding.collection import Collection
from sbp.runtime.embedding.initial import RowMaker
from sbp.runtime.embedding.keys import KEY_BITS
from sbp.runtime.embedding.tables import MOST_IDS, FeatureConfig
from sbp.runtime.embedding.tiers import messages
from sbp.runtime.embedding.tiers.budgets import MemoryNow, memory_now
from sbp.runtime.embedding.tiers.device_rows import DeviceRows, piece_rows
from sbp.runtime.embedding.tiers.host_cache import HostCache
from sbp.runtime.embedding.tiers.new_rows import NewRows, state_order
from sbp.runtime.embedding.tiers.part_stores import PartStores
from sbp.runtime.embedding.tiers.pass_tables import (
    PassTable,
    TierTables,
    is_kept,
    mark_kept,
    pass_tables,
    remember,
    with_old_slots,
    with_slots,
)
from sbp.runtime.embedding.tiers.passes import TierPass, check_alike
from sbp.runtime.embedding.tiers.rates import TierRates
from sbp.runtime.embedding.tiers.row_codec import RowCodec
from sbp.runtime.embedding.tiers.segment import Keys
from sbp.runtime.embedding.tiers.slots import NOBODY, SlotTable
from sbp.runtime.embedding.tiers.table_tier import TableTier, of_all_processes
from sbp.runtime.processes.process_group import process_group

CACHE_SHARE, BATCH_SHARE = 1 / 2, 1 / 16
"""Of the host's budget: for rows, and for the batches of a pass, of which three are held. The rest is for the
keys of slots, and for rows on their way."""
Versions = dict[str, dict[int, int]]
"""Of each table and part, the version of its store."""


class Tiered:
    """Tables over three tiers: rows of a pass on the devices, others on the host, all on a disk.

    Arguments:
      tables: a collection, or features, whose tables are `RowWise`.
      optimizer: of the tables, as the step has it: it begins the state of new rows.
      placement, axes: as of `Collection.in_sbp`.
      device: what the rows of a pass may take on each device, with their optimizer's state: bytes, or a text
        such as "4GB".
      host: what rows, keys and waiting batches may take of each process's memory, in the same form.
      ssd: a folder for the rows. Of several processes each has those of its own devices there.
      batches: of a pass, at most; a pass has fewer where their rows would not fit.
      parts: of the stores. As many processes can share them.

    Raises:
      EmbeddingError: for tables that cannot be tiered, and budgets that are too small.
      ArgumentError: for what is no amount of memory.
    """

    def __init__(
        self,
        tables: Collection | Sequence[FeatureConfig],
        optimizer: Optimizer,
        placement: Placement | jax.sharding.Mesh,
        *,
        device: float | str,
        host: float | str,
        ssd: str | os.PathLike[str],
        axes: Sequence[str] | None = None,
        batches: int = 64,
        parts: int = 8,
    ) -> None:
        features = tables.features if isinstance(tables, Collection) else tuple(tables)
        self.placement = as_placement(placement, "Tiered(placement)")
        self.axes = self.placement.axes if axes is None else tuple(axes)
        self.optimizer, self.folder, self.batches, self.parts = optimizer, Path(ssd), batches, parts
        self.device_bytes = float(bytes_of(device, "Tiered(device=...)") or 0)
        self.host_bytes = float(bytes_of(host, "Tiered(host=...)") or 0)
        counts = ("batches", batches), ("parts", parts)
        raise_all(messages.count(n, x) for n, x in counts if x < 1)
        sizes = dict(zip(self.placement.axes, self.placement.shape, strict=True))
        self.shards = math.prod(sizes.get(a, 1) for a in self.axes)
        multiple = math.lcm(self.shards, parts)
        budgets = self.device_bytes, self.host_bytes
        found = with_slots(pass_tables(features, optimizer), *budgets, self.shards, multiple)
        self.own = TierTables.of(features, with_old_slots(self.folder, found, multiple), multiple)
        self.slots = self._empty()
        self.step = 0
        self._waited = TierRates()
        self._memory, self._base = MemoryNow(0, 0, 0), 0
        self._key: jax.Array | None = None
        self._is_wide = False
        self._versions: Versions | None = None
        self._begins_empty = True
        self._tiers: dict[str, TableTier] = {}
        self._worker = ThreadPoolExecutor(1, "sbp-tiers")

    # -- what a training needs

    @property
    def batch_bytes(self) -> float:
        """What the batches of a pass may take of the host."""
        return self.host_bytes * BATCH_SHARE

    @property
    def tables(self) -> Collection:
        """The tables of a pass, which look slots up."""
        return self.own.collection

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Parameters for a pass, one array per stack, with rows of nobody: rows come when a pass begins.

        Arguments:
          key: as of `Collection.init`: rows begin as they would there.
        """
        self._key, self._is_wide = key, jnp.zeros(()).dtype == np.float64
        shardings = self.tables.shardings(self.placement, self.axes)
        return {
            name: jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=shardings[name])(
                s.shape, s.tables[0].dtype
            )
            for name, s in self.tables.stacks.items()
        }

    @property
    def rates(self) -> TierRates:
        """What was moved, of all tables."""
        return sum((t.rates for t in self._tiers.values()), self._waited)

    @property
    def memory(self) -> MemoryNow:
        """The most that was taken where passes began; of the host what came after compilation."""
        return replace(self._memory, host=max(0, self._memory.host - self._base))

    def begin_measuring(self) -> None:
        """Has `memory` begin now: after compilation, which takes memory that is not of the tiers."""
        cached = sum(len(t.cache) * t.codec.width for t in self._tiers.values())
        self._memory = memory_now()
        self._base = self._memory.host - cached

    # -- between passes

    def fetch(self, coming: TierPass, state: PyTree) -> Future[None]:
        """Brings rows of a coming pass to the host, beside training."""
        self._open(state)

        def fetch() -> None:
            for name, moves in coming.moves.items():
                self._tiers[name].fetch(moves)

        return self._worker.submit(fetch)

    def await_fetch(self, fetched: Future[None]) -> None:
        """Waits for rows that are being fetched.

        Raises:
          StoreError: if they cannot be read.
        """
        began = time.perf_counter()
        fetched.result()
        self._waited += TierRates(wait_seconds=time.perf_counter() - began)

    def exchange(self, state: PyTree, begins: TierPass, step: int) -> PyTree:
        """The state with the rows of a pass; the arrays by row of the old one are gone.

        Arguments:
          step: the last one that has changed the state.

        Raises:
          StoreError: if rows cannot be read or written.
          EmbeddingError: if the state is not of these tables and this optimizer, or if processes have other
            batches.
        """
        self._open(state)
        check_alike(begins)
        self._memory = self._memory.most(memory_now())
        leaves, structure = jax.tree.flatten(state)
        for name, moves in begins.moves.items():
            at = self.own.leaves(state, name)
            for i, x in zip(
                at, self._tiers[name].exchange([leaves[i] for i in at], moves, step), strict=True
            ):
                leaves[i] = x
        self.slots, self.step = dict(begins.slots), step
        self._memory = self._memory.most(memory_now())
        return jax.tree.unflatten(structure, leaves)

    # -- rows, wherever they are

    def read(self, state: PyTree, table: str, ids: ArrayLike) -> PyTree:
        """Some rows of one table, of every array that has a line per row, wherever they are.

        Arguments:
          state: of the training.
          table: its name.
          ids: "n", on the host; all processes ask for the same.

        Returns:
          the tree with "n ..." for arrays of the table, and None for all other leaves.

        Raises:
          EmbeddingError: if there is no such table, or an id is out of range.
        """
        self._open(state)
        keys, place = self.own.keys(table, ids)
        name = self.own.find(table)[0].name
        leaves, structure = jax.tree.flatten(state)
        at, tier = self.own.leaves(state, name), self._tiers[name]
        mine, own = tier.read([leaves[i] for i in at], self.slot_table(name), keys)
        lines = tier.codec.lines(of_all_processes(mine, own, len(keys)))
        out: list[Any] = [None] * len(leaves)
        for i, x in zip(at, lines, strict=True):
            out[i] = x[place]
        return jax.tree.unflatten(structure, out)

    def save(self, state: PyTree) -> Versions:
        """Writes all rows to the disk, those on the devices too, and returns the versions of the stores.

        Raises:
          StoreError: if the disk is full or cannot be written; what was there stays.
        """
        self._open(state)
        leaves = jax.tree.leaves(state)
        for name, tier in self._tiers.items():
            arrays = [leaves[i] for i in self.own.leaves(state, name)]
            tier.write_back(arrays, self.slot_table(name), self.step)
        found = self.commit()
        mark_kept(self.folder)
        return found

    def changed_rows(
        self, state: PyTree, table: str, since: int = -1
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]]:
        """What `save` has left of a table, in parts: ids, the steps that changed their rows, and vectors.

        Arguments:
          state: of the training.
          table: its name.
          since: rows that were not written after this step are left out.

        Raises:
          EmbeddingError: if there is no such table.
          StoreError: if bytes are not those that were written.
        """
        self._open(state)
        tier, number = self._tiers[self.own.find(table)[0].name], np.uint64(self.own.numbers[table])
        vectors = tier.new.order.index(-1)
        for keys, steps, rows in tier.stores.changed_rows(since):
            own = keys >> np.uint64(KEY_BITS) == number
            ids = (keys[own] & np.uint64(MOST_IDS - 1)).astype(np.int64)
            yield ids, steps[own], tier.codec.lines(rows[own])[vectors]

    def commit(self) -> Versions:
        """Writes the rows that the host has to the disk, and returns the versions of the stores.

        A checkpoint of the devices' arrays, and these, are one state.

        Raises:
          StoreError: as `save`.
        """

        def commit() -> Versions:
            return {name: tier.commit() for name, tier in self._tiers.items()}

        own = self._worker.submit(commit).result() if self._tiers else (self._versions or {})
        others = process_group()
        if others is None:
            return own
        every = others.gather("versions of rows", {n: [*v.items()] for n, v in own.items()})
        out: Versions = {}
        for one in every:
            for name, found in one.items():
                out.setdefault(name, {}).update({int(part): int(v) for part, v in found})
        return out

    def keep(self, versions: Sequence[Versions], *, is_restorable: bool) -> None:
        """Lets go of rows that no version of these has, nor the last one.

        Arguments:
          is_restorable: whether a step that was saved has one of these.
        """
        if is_restorable:
            mark_kept(self.folder)
        for name, tier in self._tiers.items():
            self._worker.submit(tier.stores.keep, [v[name] for v in versions if name in v]).result()

    def open(self, slots: Mapping[str, Keys] | None = None, versions: Versions | None = None) -> None:
        """Begins with rows that are there.

        Arguments:
          slots: the keys of the rows on the devices; None for none.
          versions: of the stores; None for the last.

        Raises:
          EmbeddingError: for slots of another budget.
        """
        self.close()
        self._begins_empty, self._versions = False, versions
        if slots is None:
            return
        if {n: len(x) for n, x in slots.items()} != {p.name: p.slots for p in self.own.passes}:
            there = ", ".join(f"{len(x):,}" for x in slots.values())
            raise EmbeddingError(
                messages.other_slots(there, ", ".join(f"{p.slots:,}" for p in self.own.passes))
            )
        self.slots = dict(slots)

    def slot_table(self, name: str) -> SlotTable:
        """The slots of a table of a pass as they are now; changes of it are nobody else's."""
        return SlotTable(self.slots[name].copy(), self.parts, self.shards)

    def close(self) -> None:
        """Lets other processes have the stores; rows that were not committed are lost."""
        self._worker.submit(lambda: None).result()
        for tier in self._tiers.values():
            tier.close()
        self._tiers, self._versions, self.slots = {}, None, self._empty()

    def __enter__(self) -> Tiered:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside

    def _empty(self) -> dict[str, Keys]:
        return {p.name: np.full(p.slots, NOBODY) for p in self.own.passes}

    def _open(self, state: PyTree) -> None:
        """Opens the stores, at the first sight of a state."""
        if self._tiers:
            return
        if self._key is None:
            raise EmbeddingError(messages.no_key())
        opened = dict[str, TableTier]()
        try:
            for table in self.own.passes:
                opened[table.name] = self._tier(self._key, state, table)
        except BaseException:
            for tier in opened.values():
                tier.close()
            raise
        self._tiers = opened
        remember(self.folder, self.own.passes)

    def _tier(self, key: jax.Array, state: PyTree, table: PassTable) -> TableTier:
        """The tiers of one table."""
        stack, at = self.tables.stack_of(table.name), self.own.leaves(state, table.name)
        arrays = [jax.tree.leaves(state)[i] for i in at]
        codec = RowCodec.of(state, self.tables.row_maps, stack)
        rows = NamedSharding(self.placement.mesh, partition_spec(self.axes or None))
        lies = [rows.is_equivalent_to(x.sharding, x.ndim) for x in arrays]
        if not all(lies) or not at:
            other = [f.path for f, fits in zip(codec.fields, lies, strict=True) if not fits]
            raise EmbeddingError(messages.other_shardings(table.name, other))
        params = {stack: struct(self.tables.stacks[stack].shape, table.config.dtype)}
        order = tuple(state_order(stack, self.optimizer, params, [f.path for f in codec.fields]))
        codec = RowCodec(tuple(replace(f, path=f.path.replace(stack, "rows")) for f in codec.fields))
        maker, first = RowMaker(table.tables, key), self.own.numbers[table.tables[0].name]
        new = NewRows(maker, first, stack, self.optimizer, codec, order, self._is_wide)
        most = min(self.host_bytes, self.device_bytes * self.shards)
        piece = min(piece_rows(most, codec.width, self.shards), table.slots // self.shards)
        device = DeviceRows(codec.fields, table.slots, rows, piece)
        layout = f"{codec.layout}; of {', '.join(t.name for t in table.tables)}"
        versions = None if self._versions is None else self._versions.get(table.name, {})
        if self._begins_empty and not is_kept(self.folder):
            versions = {}  # of a run that was cut off before its first step was saved
        own, folder = device.own_parts(self.parts), self.folder / table.name
        stores = PartStores(folder, self.parts, own, codec.width, layout, versions)
        try:
            if self._begins_empty and len(stores):
                raise messages.rows_there(folder, len(stores))
            share = table.slots * table.width / self.own.slot_bytes
            cache = HostCache(stores, int(self.host_bytes * CACHE_SHARE * share))
        except StoreError:
            stores.close()
            raise
        return TableTier(stores, cache, codec, device, new)
