"""Stacks: the tables of one width as one array, so that all their features are one lookup."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sbp.errors import EmbeddingError
from sbp.runtime.embedding.inputs import Entry
from sbp.runtime.embedding.keys import LIMITS, problem
from sbp.runtime.embedding.row_map import RowMap, map_of, spread_over
from sbp.runtime.embedding.tables import ColumnWise, Replicated, RowWise, TableConfig


@dataclass(frozen=True, slots=True)
class StoredPart:
    """What is stored of a table: all of it, or its quotients or remainders.

    Arguments:
      name: of the table, with `.quotient` or `.remainder`.
      table: which one.
      suffix: the end of the name.
      rows: how many.
      begin: its first position in the stack.
    """

    name: str
    table: TableConfig
    suffix: str
    rows: int
    begin: int


def parts_of(tables: Sequence[TableConfig]) -> tuple[StoredPart, ...]:
    """The parts of some tables, one after the other."""
    parts: list[StoredPart] = []
    begin = 0
    for table in tables:
        for suffix, rows in table.compression.parts(table.vocabulary_size).items():
            parts.append(StoredPart(table.name + suffix, table, suffix, rows, begin))
            begin += rows
    return tuple(parts)


def lookup(stack: jax.Array, rows: jax.Array) -> jax.Array:
    """The rows of an array, zeros where a row is out of bounds: `[n, dim], [...] -> [..., dim]`."""
    return jnp.asarray(stack).at[rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)


@dataclass(frozen=True, slots=True)
class RowStack:
    """Tables of one width, one below the other: `[size, dim]`.

    Arguments:
      name: of the stack.
      tables: those in it.
      placement: how it is split.
      multiple: what the number of rows is rounded up to a multiple of.
      spread: whether neighbours are dealt out to chunks of rows.
    """

    name: str
    tables: tuple[TableConfig, ...]
    placement: RowWise | ColumnWise | Replicated
    multiple: int
    spread: bool

    def __post_init__(self) -> None:
        if self.shape[0] > LIMITS.max:
            why = "rows are counted in int32 on a device"
            got, legal = f"{self.shape[0]} rows in one stack", f"at most {LIMITS.max}"
            fix = "tables of different optimizers or placements are in different stacks; or two collections"
            raise EmbeddingError(problem(f"stack {self.name!r}", got, legal, why, fix))

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        """What is stored, in order."""
        return parts_of(self.tables)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the array."""
        last = self.parts[-1]
        return -(-(last.begin + last.rows) // self.multiple) * self.multiple, self.tables[0].embedding_dim

    @property
    def row_key(self) -> Hashable:
        """What the rows of the array are."""
        weights = [self.row_map.spread.weights] if self.chunks > 1 else []
        return tuple((p.name, p.rows, p.begin) for p in self.parts), self.shape, self.chunks, *weights

    @property
    def split_dims(self) -> tuple[int, ...]:
        """The dim that is split."""
        return {RowWise: (0,), ColumnWise: (1,), Replicated: ()}[type(self.placement)]

    @property
    def row_map(self) -> RowMap:
        """Where the rows of each table lie."""
        spread = spread_over(self.shape[0], self.chunks)
        return map_of(self.shape[:1], [(p.name, p.rows, p.begin) for p in self.parts], spread)

    @property
    def chunks(self) -> int:
        """How many chunks of rows neighbours are dealt out to."""
        return self.multiple if self.spread else 1

    def rows(self, entries: Sequence[Entry]) -> jax.Array:
        """The rows of all ids, `[batch, hotness of all]`, of ragged bags flat; out of bounds for none."""
        found = [
            (ids, part)
            for e in entries
            for ids, part in zip(
                e.parts(), (p for p in self.parts if p.table == e.feature.table), strict=True
            )
        ]
        if any(e.bags is not None for e in entries):
            rows = [self._rows(ids.reshape(-1), np.int32(p.begin), np.int32(p.rows)) for ids, p in found]
            return jnp.concatenate(rows)
        # One position per column, so that all features take the same few ops.
        columns = [p for ids, p in found for _ in range(ids.shape[1])]
        begins, heights = (np.array([getattr(p, n) for p in columns], np.int32) for n in ("begin", "rows"))
        return self._rows(jnp.concatenate([ids for ids, _ in found], axis=1), begins, heights)

    def _rows(self, ids: jax.Array, begin: ArrayLike, height: ArrayLike) -> jax.Array:
        """The rows of ids of the parts that begin at `begin`; past the end for those that no part has."""
        spread, present = self.row_map.spread, (ids >= 0) & (ids < height)
        return jnp.where(present, spread.row(jnp.where(present, ids, 0) + begin), np.int32(self.shape[0]))

    def gather(self, array: jax.Array, rows: jax.Array) -> jax.Array:
        """The vectors of some rows: the one lookup."""
        return lookup(array, rows)

    def pool(self, vectors: jax.Array, entries: Sequence[Entry]) -> dict[str, jax.Array]:
        """Each feature's result, of the vectors of `rows(entries)`."""
        axis, begin = vectors.ndim - 2, 0
        out: dict[str, jax.Array] = {}
        for e in entries:
            count = len(e.feature.table.compression.parts(e.feature.table.vocabulary_size))
            width = math.prod(e.ids.shape) if axis == 0 else e.ids.shape[1]
            pieces = [
                jax.lax.slice_in_dim(vectors, begin + i * width, begin + (i + 1) * width, axis=axis).reshape(
                    *e.ids.shape, vectors.shape[-1]
                )
                for i in range(count)
            ]
            out[e.feature.name] = e.pool(e.feature.table.compression.join(pieces))
            begin += count * width
        return out
