"""Passes: batches in a row whose rows are on the devices all at once.

A pass has as many batches as are allowed, and fewer where their rows would not fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from sbp.compat.untyped import PyTree
from sbp.errors import EmbeddingError, Problem, raise_all
from sbp.runtime.embedding.features import Bags, PaddedBags
from sbp.runtime.embedding.inputs import GivenIds, inputs_by_name
from sbp.runtime.embedding.key_index import UNKNOWN, KeyIndex
from sbp.runtime.embedding.keys import NO_ID, as_integers, element, range_problem, unify
from sbp.runtime.embedding.tables import FeatureConfig
from sbp.runtime.embedding.tiers import messages
from sbp.runtime.embedding.tiers.segment import Keys
from sbp.runtime.embedding.tiers.slots import SlotMoves, SlotTable, part_of
from sbp.runtime.processes.process_group import process_group

Inputs: TypeAlias = Mapping[str, GivenIds]
"""Of each feature its ids."""


@dataclass(frozen=True)
class IdsInBatch:
    """Where the ids of features are in a batch.

    Arguments:
      get: batch -> ids of each feature.
      put: batch and slots of each feature -> the batch with slots in the place of ids.
    """

    get: Callable[[PyTree], Inputs]
    put: Callable[[PyTree, Inputs], PyTree]

    @staticmethod
    def mapping(features: Sequence[FeatureConfig]) -> IdsInBatch:
        """Those of batches with one dict that has a key for each feature."""
        names = {f.name for f in features}

        def holds(x: Any) -> bool:
            return isinstance(x, Mapping) and names <= x.keys()

        def get(batch: PyTree) -> Inputs:
            found = [x for x in jax.tree.leaves(batch, is_leaf=holds) if holds(x)]
            if len(found) != 1:
                raise EmbeddingError(messages.no_ids(sorted(names), len(found)))
            return {name: found[0][name] for name in sorted(names)}

        def put(batch: PyTree, ids: Inputs) -> PyTree:
            return jax.tree.map(lambda x: {**x, **ids} if holds(x) else x, batch, is_leaf=holds)

        return IdsInBatch(get, put)


@dataclass(frozen=True)
class TierPass:
    """One pass.

    Arguments:
      first: the step of its first batch.
      batches: each with the numbers of its keys in the place of ids; see `batch`.
      moves: what changes on the devices, by table.
      where: the ids are in a batch.
      slots: the key of each slot while it trains, by table.
      ids: how many the batches have, each as often as it is looked up.
    """

    first: int
    batches: list[tuple[PyTree, dict[str, tuple[str, GivenIds]]]]
    moves: Mapping[str, SlotMoves]
    where: IdsInBatch
    slots: Mapping[str, Keys]
    ids: int

    def __iter__(self) -> Iterator[PyTree]:
        """Its batches with slots in the place of ids; a batch that was given is not held any more."""
        while self.batches:
            batch, numbered = self.batches.pop(0)
            slots = {n: _with(x, self.moves[t].slots) for n, (t, x) in numbered.items()}
            yield self.where.put(batch, slots)


def check_alike(begins: TierPass) -> None:
    """All processes come here, and have the same pass.

    Raises:
      EmbeddingError: if they have not: each was given batches of its own.
    """
    others = process_group()
    if others is None:
        return
    mine = hashlib.sha256(b"".join(begins.slots[name].tobytes() for name in sorted(begins.slots))).hexdigest()
    first, *rest = others.gather("a pass", [begins.first, mine])
    if differing := [n for n, one in enumerate(rest, 1) if one != first]:
        raise EmbeddingError(messages.other_batches(begins.first, differing))


@dataclass
class _PassTable:
    """The keys of one table in a pass that is being made."""

    index: KeyIndex = field(default_factory=KeyIndex)
    keys: list[Keys] = field(default_factory=list)
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass
class PassCutter:
    """Cuts batches into passes.

    Arguments:
      features: of the tables, with the table of the pass that each looks up, and its table's number in keys.
      slots: by table of the pass.
      where: the ids are in a batch.
      most: batches of a pass.
      device_bytes, host_bytes: the budgets, for messages.
      batch_bytes: of the batches of a pass, at most.
    """

    features: Mapping[str, tuple[FeatureConfig, str, int]]
    slots: Mapping[str, SlotTable]
    where: IdsInBatch
    most: int
    device_bytes: float
    batch_bytes: float
    host_bytes: float

    def passes(self, batches: Iterable[PyTree], step: int) -> Iterator[TierPass]:
        """The passes of some batches.

        Arguments:
          step: the number of the first one's step.

        Raises:
          EmbeddingError: for ids that are none of their table, and for a batch that does not fit alone.
        """
        made = _Making(self, step)
        for batch in batches:
            if len(made.batches) == self.most or not made.add(batch):
                behind = made.first + len(made.batches)
                yield made.finish()
                made = _Making(self, behind)
                if not made.add(batch):
                    raise EmbeddingError(made.too_many(batch))
        if made.batches:
            yield made.finish()


@dataclass
class _Making:
    """A pass that is being made."""

    cutter: PassCutter
    first: int
    batches: list[tuple[PyTree, dict[str, tuple[str, GivenIds]]]] = field(default_factory=list)
    tables: dict[str, _PassTable] = field(default_factory=dict)
    ids: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        for name, slots in self.cutter.slots.items():
            self.tables[name] = _PassTable(counts=np.zeros(slots.parts, np.int64))

    def add(self, batch: PyTree) -> bool:
        """Takes a batch, unless its rows do not fit; then nothing changes."""
        size = sum(np.asarray(x).nbytes for x in jax.tree.leaves(batch))
        if self.bytes + size > self.cutter.batch_bytes:
            return False
        found = self._keys(batch)
        new = {t: self._new(t, np.concatenate([k for _, k, _ in of])) for t, of in found.items()}
        for table, (_, _, counts) in new.items():
            if (self.tables[table].counts + counts > self.cutter.slots[table].part_slots).any():
                return False
        numbered = dict[str, tuple[str, GivenIds]]()
        for table, of in found.items():
            numbers, fresh, counts = new[table]
            own = self.tables[table]
            first = own.index.count
            own.index.add(fresh.view(np.int64), np.arange(first, first + len(fresh), dtype=np.int32))
            own.keys.append(fresh)
            own.counts = own.counts + counts
            at = 0
            for name, keys, given in of:
                numbered[name] = table, _numbered(given, numbers[at : at + len(keys)])
                at += len(keys)
        self.ids += sum(len(k) for of in found.values() for _, k, _ in of)
        self.bytes += size
        self.batches.append((batch, numbered))
        return True

    def finish(self) -> TierPass:
        """The pass; its keys have slots from now on."""
        none = [np.zeros(0, np.uint64)]
        moves = {n: self.cutter.slots[n].move(np.concatenate(none + t.keys)) for n, t in self.tables.items()}
        slots = {n: x.keys.copy() for n, x in self.cutter.slots.items()}
        return TierPass(self.first, self.batches, moves, self.cutter.where, slots, self.ids)

    def too_many(self, batch: PyTree) -> Problem:
        """What to say of a batch that does not fit alone."""
        size, share = sum(np.asarray(x).nbytes for x in jax.tree.leaves(batch)), self.cutter.batch_bytes
        if size > share:
            return messages.batch_too_large(self.first, size, share, self.cutter.host_bytes * size / share)
        for table, of in self._keys(batch).items():
            _, fresh, counts = self._new(table, np.concatenate([k for _, k, _ in of]))
            each = self.cutter.slots[table].part_slots
            if counts.max() > each:
                parts = self.cutter.slots[table].parts
                needed = 1.01 * self.cutter.device_bytes * int(counts.max()) / each  # it is rounded
                return messages.pass_too_small(
                    self.first, len(fresh), each * parts, int(counts.max()) * parts, needed
                )
        raise AssertionError("the batch fits")

    def _new(self, table: str, keys: Keys) -> tuple[NDArray[np.int32], Keys, NDArray[np.int64]]:
        """Of a batch the numbers of its keys, those that are new, and how many of them each part has."""
        index, parts = self.tables[table].index, self.cutter.slots[table].parts
        numbers = index.find(keys.view(np.int64))
        unknown = numbers == UNKNOWN
        fresh, place = np.unique(keys[unknown], return_inverse=True)
        numbers[unknown] = index.count + place
        return numbers, fresh, np.bincount(part_of(fresh, parts), minlength=parts)

    def _keys(self, batch: PyTree) -> dict[str, list[tuple[str, Keys, GivenIds]]]:
        """The keys of a batch by table: of each feature, those of its ids that are there."""
        out: dict[str, list[tuple[str, Keys, GivenIds]]] = {name: [] for name in self.tables}
        wrong = list[Problem]()
        features = [f for f, _, _ in self.cutter.features.values()]
        for name, given in inputs_by_name(features, self.cutter.where.get(batch)).items():
            feature, table, number = self.cutter.features[name]
            ids = _ids(given)
            if problem := _wrong(ids, feature):
                wrong.append(problem)
                continue
            there = np.asarray(ids)[np.asarray(ids) != NO_ID]
            out[table].append((name, unify(number, there).view(np.uint64), given))
        raise_all(wrong)
        return out


def _wrong(ids: Any, feature: FeatureConfig) -> Problem | None:
    """What is wrong with ids of a feature."""
    where = f"feature {feature.name!r}"
    array = as_integers(ids, where)
    if isinstance(array, Problem):
        return array
    return range_problem(array, feature.table.vocabulary_size, where, padding=True, place=element)


def _ids(given: GivenIds) -> Any:
    """The ids that are given; of bags those that are no padding."""
    if isinstance(given, Bags):
        return np.asarray(given.values)[int(given.offsets[0]) : int(given.offsets[-1])]
    return given.ids if isinstance(given, PaddedBags) else given


def _numbered(given: GivenIds, numbers: NDArray[np.int32]) -> GivenIds:
    """The same with a number in the place of each id."""
    ids = np.asarray(_ids(given))
    out = np.full(ids.shape, NO_ID, np.int32)
    out[ids != NO_ID] = numbers
    if isinstance(given, Bags):
        every = np.full(np.shape(given.values), NO_ID, np.int32)
        every[int(given.offsets[0]) : int(given.offsets[-1])] = out
        return replace(given, values=every)
    return replace(given, ids=out) if isinstance(given, PaddedBags) else out


def _with(given: GivenIds, slots: NDArray[np.int32]) -> GivenIds:
    """The same with a slot in the place of each number."""
    behind = np.append(slots, np.int32(NO_ID))  # what -1 names
    if isinstance(given, Bags):
        return replace(given, values=behind[np.asarray(given.values)])
    if isinstance(given, PaddedBags):
        return replace(given, ids=behind[np.asarray(given.ids)])
    found: NDArray[np.int32] = behind[np.asarray(given)]
    return found
