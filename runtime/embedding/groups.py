"""Whole tables in groups: each device looks up and pools its own tables, and only pooled vectors travel."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sbp.compat.untyped import DType
from sbp.errors import EmbeddingError
from sbp.runtime.embedding.inputs import Entry
from sbp.runtime.embedding.keys import problem
from sbp.runtime.embedding.pooling import counts, divide
from sbp.runtime.embedding.row_map import RowMap, map_of, spread_over
from sbp.runtime.embedding.stacks import StoredPart, lookup, parts_of
from sbp.runtime.embedding.tables import TableConfig, TableWise
from sbp.runtime.lower.reference_interpreter import Tensor


def pack_tables(rows: Sequence[int], groups: int) -> tuple[tuple[int, ...], ...]:
    """Indices of tables per group: the largest first, each to the group that is smallest so far.

    >>> pack_tables([5, 9, 4, 1], 2)
    ((1, 3), (0, 2))
    """
    filled: list[list[int]] = [[] for _ in range(groups)]
    for i in sorted(range(len(rows)), key=lambda i: (-rows[i], i)):
        min(filled, key=lambda group: (sum(rows[j] for j in group), len(group))).append(i)
    return tuple(tuple(sorted(group)) for group in filled)


def _counts(entry: Entry, dtype: DType) -> Tensor:
    return counts(entry.present(), entry.weights, dtype)


@dataclass(frozen=True, slots=True)
class TableStack:
    """Tables of one width in groups: `[groups, rows of the largest group, dim]`.

    All features of a group are slots of one shape, so that every device runs the same program on its own
    groups; bags of fewer ids, and groups of fewer features, are filled up with absent ids.

    Arguments:
      name: of the stack.
      tables: those in it.
      placement: with the number of groups.
    """

    name: str
    tables: tuple[TableConfig, ...]
    placement: TableWise
    members: tuple[tuple[StoredPart, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        packs = pack_tables([t.vocabulary_size for t in self.tables], self.placement.groups)
        groups = tuple(parts_of([self.tables[i] for i in pack]) for pack in packs)
        object.__setattr__(self, "members", groups)

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        """What is stored, group by group."""
        return tuple(part for group in self.members for part in group)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the array."""
        rows = max(sum(p.rows for p in group) for group in self.members)
        return len(self.members), rows, self.tables[0].embedding_dim

    @property
    def row_key(self) -> Hashable:
        """What the rows of the array are."""
        return tuple(tuple((p.name, p.rows, p.begin) for p in group) for group in self.members), self.shape

    @property
    def split_dims(self) -> tuple[int, ...]:
        """Groups are dealt out."""
        return (0,)

    @property
    def row_map(self) -> RowMap:
        """Where the rows of each table lie."""
        groups, height, _ = self.shape
        named = [(p, g * height) for g, group in enumerate(self.members) for p in group]
        parts = [(p.name, p.rows, first + p.begin) for p, first in named]
        return map_of((groups, height), parts, spread_over(groups * height, 1))

    def _slots(self, entries: Sequence[Entry]) -> list[list[tuple[Entry, StoredPart]]]:
        """The features of each group, with their table."""
        for e in entries:
            if e.bags is not None:
                legal = "bags of fixed hotness"
                why = f"{self.placement} pools on the device of the table, where all bags have one shape"
                fix = "Bags.pad(max_hotness), or placement=RowWise()"
                raise EmbeddingError(problem(f"feature {e.feature.name!r}", "ragged Bags", legal, why, fix))
        return [
            [(e, part) for part in group for e in entries if e.feature.table == part.table]
            for group in self.members
        ]

    def _filled(self, entries: Sequence[Entry], values: Mapping[str, Tensor], absent: ArrayLike) -> jax.Array:
        """One `[batch, hotness]` array per feature as `[groups, slots, batch, most hotness]`."""
        slots = self._slots(entries)
        places = max(e.ids.shape[1] for e in entries)
        none = jnp.broadcast_to(absent, (entries[0].batch, places))
        blocks = []
        for group in slots:
            own = [values[e.feature.name] for e, _ in group]
            blocks += [jnp.pad(v, ((0, 0), (0, places - v.shape[1])), constant_values=absent) for v in own]
            blocks += [none] * (max(map(len, slots)) - len(group))
        return jnp.stack(blocks).reshape(len(slots), -1, *none.shape)

    def rows(self, entries: Sequence[Entry]) -> jax.Array:
        """The row of every id in its group, `[groups, slots, batch, hotness]`; out of bounds for none."""
        height = np.int32(self.shape[1])
        begin = {e.feature.name: np.int32(p.begin) for group in self._slots(entries) for e, p in group}
        rows = {
            e.feature.name: jnp.where(e.present(), e.ids + begin[e.feature.name], height) for e in entries
        }
        return self._filled(entries, rows, height)

    def gather(self, array: jax.Array, rows: jax.Array) -> jax.Array:
        """The vectors of some rows: the one lookup, group by group."""
        return jax.vmap(lookup)(array, rows)

    def pool(self, vectors: jax.Array, entries: Sequence[Entry]) -> dict[str, jax.Array]:
        """Each feature's result, of the vectors of `rows(entries)`.

        Weighted sums are taken before the exchange; what they are divided by belongs to the batch, and comes
        after.
        """
        wide = jnp.promote_types(vectors.dtype, np.float32)
        if any(e.weights is not None for e in entries):
            factors = {e.feature.name: counts(e.present(), e.weights, wide) for e in entries}
            each = self._filled(entries, factors, np.zeros((), wide))
            sums = (vectors.astype(wide) * each[..., None]).sum(axis=3)
        else:
            sums = vectors[..., 0, :] if vectors.shape[3] == 1 else vectors.astype(wide).sum(axis=3)
        out: dict[str, jax.Array] = {}
        for g, group in enumerate(self._slots(entries)):
            for f, (e, _) in enumerate(group):
                one = sums[g, f]
                if e.weights is not None or not e.single:
                    one = divide(one, partial(_counts, e, wide), str(e.feature.table.combiner), e.add)
                out[e.feature.name] = one.astype(vectors.dtype)
                e.feature.check_shape("output", one.shape, e.feature.output_shape)
        return out
