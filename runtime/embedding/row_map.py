"""Where rows lie: in which row of a stack each id of each table is, and back."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class Spread:
    """A bijection of positions `0..size - 1` to rows, which deals neighbours out to contiguous chunks.

    Ids are often sorted by frequency, so that the first rows of each table have most of the work. Positions
    step through the chunks by the golden ratio, so any few neighbours are far apart, whatever the number of
    devices; and one chunk further for each round, so that tables of equal size do not begin in the same
    chunk.

    Arguments:
      size: a multiple of `chunks`.
      chunks: how many, of equal size; at most 2**15, for int32 products. One leaves all where it is.
    """

    size: int
    chunks: int

    @property
    def step(self) -> int:
        """The number nearest to the golden section of `chunks` that has no divisor in common with it."""
        wanted = round(self.chunks * GOLDEN)
        return min(
            (n for n in range(1, self.chunks + 1) if math.gcd(n, self.chunks) == 1),
            key=lambda n: (abs(n - wanted), n),
        )

    def row(self, position: jax.Array) -> jax.Array:
        """The row of a position; int32."""
        if self.chunks == 1:
            return position
        chunks, step, height = (np.int32(n) for n in (self.chunks, self.step, self.size // self.chunks))
        turn, place = jax.lax.div(position, chunks), jax.lax.rem(position, chunks)
        chunk = jax.lax.rem((place + jax.lax.rem(turn, chunks)) * step, chunks)
        return chunk * height + turn

    def position(self, row: jax.Array) -> jax.Array:
        """The position of a row; int32."""
        if self.chunks == 1:
            return row
        chunks, height = np.int32(self.chunks), np.int32(self.size // self.chunks)
        back = np.int32(pow(self.step, -1, self.chunks))
        chunk, turn = jax.lax.div(row, height), jax.lax.rem(row, height)
        place = jax.lax.rem(chunk * back - jax.lax.rem(turn, chunks) + chunks, chunks)
        return turn * chunks + place


@dataclass(frozen=True, slots=True)
class RowMap:
    """In which row of a stack the ids of its tables are. The rows of groups are counted one after the other.

    Arguments:
      lead: the sizes of the stack's dims that count rows: `[rows]`, or `[groups, rows of a group]`.
      names, rows, begins: of what is stored: its name, how many rows, and its first position, ascending.
      spread: where positions lie.
    """

    lead: tuple[int, ...]
    names: tuple[str, ...]
    rows: tuple[int, ...]
    begins: tuple[int, ...]
    spread: Spread

    @property
    def size(self) -> int:
        """All rows, those of nobody included."""
        return math.prod(self.lead)

    def row(self, name: str, ids: jax.Array) -> jax.Array:
        """The rows of some ids, int32 like them."""
        return self.spread.row(ids + np.int32(self.begins[self.names.index(name)]))

    def every(self, name: str) -> jax.Array:
        """The rows of all ids of a table, in their order."""
        return self.row(name, jnp.arange(self.rows[self.names.index(name)], dtype=np.int32))

    def owner(self, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of each row, the number of what is stored there, -1 for nothing, and its id."""
        begins, rows = np.array(self.begins, np.int32), np.array(self.rows, np.int32)
        position = self.spread.position(row)
        part = jnp.searchsorted(begins, position, side="right").astype(np.int32) - 1
        found = jnp.maximum(part, 0)
        ids = position - jnp.asarray(begins)[found]
        return jnp.where(ids < jnp.asarray(rows)[found], part, -1), ids

    def in_other(self, row: ArrayLike, other: "RowMap") -> np.ndarray[Any, Any]:
        """The rows in another map that have what some rows have here; -1 for what the other one has not."""
        part, ids = map(np.asarray, self.owner(jnp.asarray(row, np.int32)))
        known = [n in other.names for n in self.names]
        at = [other.names.index(n) if k else 0 for n, k in zip(self.names, known, strict=True)]
        begins = np.array([other.begins[i] for i in at], np.int32)
        found = (part >= 0) & np.array(known)[part]
        position = np.where(found, ids + begins[part], 0)
        return np.where(found, np.asarray(other.spread.row(jnp.asarray(position))), -1)

    def described(self) -> dict[str, Any]:
        """The map as JSON has it."""
        parts = [list(x) for x in zip(self.names, self.rows, self.begins, strict=True)]
        return {"lead": list(self.lead), "parts": parts, "chunks": self.spread.chunks}


def map_of(lead: Sequence[int], parts: Sequence[tuple[str, int, int]], chunks: int) -> RowMap:
    """A map of parts in any order: their names, rows and first positions."""
    ordered = sorted(parts, key=lambda part: part[2])
    names, rows, begins = zip(*ordered, strict=True)
    return RowMap(tuple(lead), names, rows, begins, Spread(math.prod(lead), chunks))


def read_map(content: Mapping[str, Any]) -> RowMap:
    """The map that `RowMap.described` has described."""
    parts = [(str(name), int(rows), int(begin)) for name, rows, begin in content["parts"]]
    return map_of([int(n) for n in content["lead"]], parts, int(content["chunks"]))
