"""The tables of a pass: tables that agree in all that an array and a lookup need are one table, of slots."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from sbp.compat.untyped import PyTree, struct
from sbp.errors import EmbeddingError, Problem, raise_all
from sbp.lazy import Optimizer
from sbp.runtime.embedding.collection import Collection
from sbp.runtime.embedding.keys import TABLE_BITS, as_integers, range_problem, unify
from sbp.runtime.embedding.row_access import stack_leaves
from sbp.runtime.embedding.tables import FeatureConfig, RowWise, TableConfig, Uncompressed, unique_tables
from sbp.runtime.embedding.tiers import messages
from sbp.runtime.embedding.tiers.row_codec import RowCodec
from sbp.runtime.embedding.tiers.segment import Keys
from sbp.text.json_reader import json_of

SLOT_BYTES, SLOT_SHARE = 160, 1 / 4
"""Of the host for each slot: its key and indices, in the pass that trains and in those that are cut; and of
the host's budget for all of them."""
SLOTS, KEPT = "slots.json", "kept"
ALIKE = 0.02
"""How far slots may be from those of a run before, to be the same again."""


@dataclass(frozen=True)
class PassTable:
    """Tables that share slots.

    Arguments:
      name: of the table of the pass.
      tables: that differ in name, size and initializer alone.
      lookups: ids of an example, as far as features say it.
      width: bytes of a slot, in all arrays by row.
      slots: how many.
    """

    name: str
    tables: tuple[TableConfig, ...]
    lookups: int
    width: int = 0
    slots: int = 0

    @property
    def rows(self) -> int:
        """Rows of all its tables."""
        return sum(t.vocabulary_size for t in self.tables)

    @property
    def config(self) -> TableConfig:
        """The table of the pass."""
        first = self.tables[0]
        # Each is a stack of its own, so that a slot is a row of its array.
        return replace(
            first, name=self.name, vocabulary_size=self.slots, optimizer=(first.optimizer, first.combiner)
        )


def pass_tables(features: Sequence[FeatureConfig], optimizer: Optimizer) -> tuple[PassTable, ...]:
    """The tables of a pass, without slots.

    Raises:
      EmbeddingError: for tables that cannot be tiered.
    """
    tables = unique_tables(features)
    raise_all(
        messages.not_tiered(t.name, what)
        for t in tables
        for what, is_wrong in (
            (f"placement={t.placement}", t.placement != RowWise()),
            (f"compression={t.compression}", t.compression != Uncompressed()),
        )
        if is_wrong
    )
    alike: dict[Hashable, list[TableConfig]] = {}
    for t in tables:
        alike.setdefault((t.embedding_dim, t.dtype, t.optimizer, t.combiner), []).append(t)
    out = list[PassTable]()
    for group in alike.values():
        lookups = sum(((f.input_shape or (0, 1))[1:] and _most(f)) or 1 for f in features if f.table in group)
        name = f"pass{len(out)}_dim{group[0].embedding_dim}"
        made = PassTable(name, tuple(group), lookups, slots=1)
        out.append(replace(made, width=_width(made, optimizer)))
    return tuple(out)


def _most(feature: FeatureConfig) -> int:
    """Ids of an example, as far as a feature says it."""
    return int((feature.input_shape or (0, 1))[-1] or 1)


def _width(table: PassTable, optimizer: Optimizer) -> int:
    """Bytes of a slot: of the rows, and of what the optimizer has for them."""
    (stack,) = Collection((FeatureConfig("any", table.config),), spread=False, multiple=1).stacks.values()
    params: PyTree = {stack.name: struct((1009, stack.shape[1]), stack.tables[0].dtype)}
    tree = params, jax.eval_shape(optimizer.init, params)
    maps = {stack.name: replace(stack.row_map, lead=(1009,))}
    return sum(f.bytes for f in RowCodec.of(tree, maps, stack.name).fields)


def with_slots(
    tables: Sequence[PassTable], device_bytes: float, host_bytes: float, shards: int, multiple: int
) -> tuple[PassTable, ...]:
    """Tables with as many slots as fit, shared out by how often they are looked up; none has more than rows.

    Arguments:
      device_bytes: of all slots of a shard.
      host_bytes: of the host; the keys of slots take a part of it at most.
      shards: the slots are split over so many.
      multiple: the slots of a table are a multiple of it.

    Raises:
      EmbeddingError: if there is no room for the fewest slots.
    """
    least = sum(multiple * t.width for t in tables) / shards
    if device_bytes < least:
        raise EmbeddingError(messages.device_too_small(device_bytes, least))
    most = SLOT_SHARE * host_bytes / SLOT_BYTES
    if most < multiple * len(tables):
        least_host = multiple * len(tables) * SLOT_BYTES / SLOT_SHARE
        raise EmbeddingError(messages.host_too_small(host_bytes, least_host))
    slots = dict.fromkeys((t.name for t in tables), 0)
    open_tables, left = list(tables), device_bytes * shards
    while open_tables:
        share = left / sum(t.lookups * t.width for t in open_tables)
        full = [t for t in open_tables if t.rows <= share * t.lookups]
        for t in full or open_tables:
            wanted = t.rows if full else int(share * t.lookups)
            rounded = math.ceil(wanted / multiple) if full else wanted // multiple
            slots[t.name] = multiple * max(1, rounded)
            left -= slots[t.name] * t.width
        open_tables = [t for t in open_tables if t not in full] if full else []
    if (total := sum(slots.values())) > most:
        return with_slots(tables, max(least, device_bytes * most / total), math.inf, shards, multiple)
    return tuple(replace(t, slots=slots[t.name]) for t in tables)


def with_old_slots(folder: Path, tables: Sequence[PassTable], multiple: int) -> tuple[PassTable, ...]:
    """Tables with the slots that they had in the run that has written to a folder, if they are about as many.

    A run that goes on has rows on its devices by slot, and what is measured of a step may differ a little.
    """
    try:
        found = json_of((folder / SLOTS).read_bytes())
        slots = [int(found[t.name]) for t in tables]
    except (OSError, ValueError, KeyError, TypeError):
        return tuple(tables)
    every = [*zip(slots, tables, strict=True)]
    if any(n % multiple or abs(n - t.slots) > ALIKE * t.slots for n, t in every):
        return tuple(tables)
    return tuple(replace(t, slots=n) for n, t in every)


def remember(folder: Path, tables: Sequence[PassTable]) -> None:
    """Writes down the slots of a run's tables.

    Raises:
      StoreError: if nothing can be written there.
    """
    made = folder / f"{SLOTS}.{os.getpid()}"
    try:
        made.write_text(json.dumps({t.name: t.slots for t in tables}))
        os.replace(made, folder / SLOTS)
    except OSError as e:
        raise messages.not_written(folder, e) from None


def mark_kept(folder: Path) -> None:
    """Notes that somebody goes back to the rows of a folder: a step that was saved has them, or `save`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / KEPT).touch()


def is_kept(folder: Path) -> bool:
    """Whether it was noted; else a run was cut off before it had saved anything."""
    return (folder / KEPT).exists()


@dataclass(frozen=True)
class TierTables:
    """The tables of a training, and those of a pass that stand for them.

    Arguments:
      features: with their own tables.
      passes: the tables of a pass.
      collection: the features with these.
      numbers: of the own tables, in keys.
    """

    features: tuple[FeatureConfig, ...]
    passes: tuple[PassTable, ...]
    collection: Collection
    numbers: Mapping[str, int]

    @staticmethod
    def of(features: Sequence[FeatureConfig], passes: Sequence[PassTable], multiple: int) -> TierTables:
        """The tables of some features.

        Arguments:
          multiple: of which slots are multiples.

        Raises:
          EmbeddingError: if there are more tables than keys can name.
        """
        every = [t for p in passes for t in p.tables]
        if len(every) >= 1 << TABLE_BITS:
            raise EmbeddingError(messages.too_many_tables(len(every)))
        of = {own: t.config for t in passes for own in t.tables}
        found = tuple(replace(f, table=of[f.table]) for f in features)
        numbers = {t.name: n for n, t in enumerate(every)}
        made = Collection(found, spread=False, multiple=multiple)
        return TierTables(tuple(features), tuple(passes), made, numbers)

    @property
    def slot_bytes(self) -> int:
        """Of all slots on all devices, with what the optimizer has of them."""
        return sum(t.slots * t.width for t in self.passes)

    def find(self, table: str) -> tuple[PassTable, TableConfig]:
        """The table of a pass that a table is in, and its own configuration.

        Raises:
          EmbeddingError: if there is none.
        """
        found = [(p, t) for p in self.passes for t in p.tables if t.name == table]
        if not found:
            raise EmbeddingError(messages.no_table(table, [*self.numbers]))
        return found[0]

    def keys(self, table: str, ids: ArrayLike) -> tuple[Keys, NDArray[np.intp]]:
        """The keys of some ids, sorted, each once, and where each id's is.

        Raises:
          EmbeddingError: if there is no such table, or an id is none of it.
        """
        where, (_, config) = f"read(..., {table!r}, ids)", self.find(table)
        given = as_integers(ids, where)
        wrong = given if isinstance(given, Problem) else range_problem(given, config.vocabulary_size, where)
        raise_all([wrong] if wrong else [])
        return np.unique(unify(self.numbers[table], ids).view(np.uint64), return_inverse=True)

    def leaves(self, state: PyTree, name: str) -> list[int]:
        """Which leaves of a state have a line per slot of a table of a pass."""
        stack, found = self.collection.stack_of(name), stack_leaves(state, self.collection.row_maps)
        return [i for i, leaf in enumerate(found) if leaf is not None and leaf.stack == stack]
