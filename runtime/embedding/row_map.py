"""Where rows lie: in which row of a stack each id of each table is, and back."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

FRACTIONS = ((5**0.5 - 1) / 2, 2**0.5 - 1, 3**0.5 - 1, 5**0.5 / 2 - 1, 7**0.5 - 2, 11**0.5 - 3)
"""Of the chunks that a digit steps on, the lowest first: no small multiples of two of them meet."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A bijection of positions `0..size - 1` to rows, which deals neighbours out to contiguous chunks.

    Ids are often sorted by frequency, so that the first rows of each table have most of the work. Others are
    strided, as every 2**16th id of a table where an id has its kind in its low bits. A position is a number
    whose digits are to the base of the number of chunks. Each digit steps through the chunks by a fraction
    of its own, the lowest by the golden section; so few neighbours are far apart, and so are positions with
    any even stride, whatever the number of devices.

    Arguments:
      size: a multiple of `chunks`.
      chunks: how many, of equal size; at most 2**15, for int32 products. One leaves all where it is.
      weights: the chunks that each digit steps on, the lowest first, which has no divisor in common with
        `chunks`.
    """

    size: int
    chunks: int
    weights: tuple[int, ...]

    def row(self, position: jax.Array) -> jax.Array:
        """The row of a position; int32."""
        if self.chunks == 1:
            return position
        chunks, height, step = map(np.int32, (self.chunks, self.size // self.chunks, self.weights[0]))
        turn, place = jax.lax.div(position, chunks), jax.lax.rem(position, chunks)
        return jax.lax.rem(place * step + self._begin(turn), chunks) * height + turn

    def position(self, row: jax.Array) -> jax.Array:
        """The position of a row; int32."""
        if self.chunks == 1:
            return row
        chunks, height = np.int32(self.chunks), np.int32(self.size // self.chunks)
        back = np.int32(pow(self.weights[0], -1, self.chunks))
        chunk, turn = jax.lax.div(row, height), jax.lax.rem(row, height)
        place = jax.lax.rem(jax.lax.rem(chunk - self._begin(turn) + chunks, chunks) * back, chunks)
        return turn * chunks + place

    def _begin(self, turn: jax.Array) -> jax.Array:
        """The chunk that a turn through all chunks begins with, of all digits but the lowest."""
        chunks, found = np.int32(self.chunks), jnp.zeros_like(turn)
        for weight in self.weights[1:]:
            found = jax.lax.rem(found + jax.lax.rem(turn, chunks) * np.int32(weight), chunks)
            turn = jax.lax.div(turn, chunks)
        return found


@functools.cache
def spread_over(size: int, chunks: int) -> Spread:
    """The spread of a stack over chunks."""
    digits, turns = 1, size // chunks - 1
    while turns > 0 and chunks > 1:
        digits, turns = digits + 1, turns // chunks
    return Spread(size, chunks, tuple(_unit(chunks, FRACTIONS[d % len(FRACTIONS)]) for d in range(digits)))


@functools.cache
def _unit(chunks: int, fraction: float) -> int:
    """The number nearest to a fraction of the chunks that has no divisor in common with them."""
    wanted = round(chunks * fraction)
    units = (n for n in range(1, chunks + 1) if math.gcd(n, chunks) == 1)
    return min(units, key=lambda n: (abs(n - wanted), n))


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
        part = jnp.searchsorted(begins, position, side="right", method="scan_unrolled").astype(np.int32) - 1
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

    def as_json(self) -> dict[str, Any]:
        """The map as JSON has it."""
        parts = [list(x) for x in zip(self.names, self.rows, self.begins, strict=True)]
        spread = {"chunks": self.spread.chunks, "weights": list(self.spread.weights)}
        return {"lead": list(self.lead), "parts": parts, "spread": spread}


def map_of(lead: Sequence[int], parts: Sequence[tuple[str, int, int]], spread: Spread) -> RowMap:
    """A map of parts in any order: their names, rows and first positions."""
    names, rows, begins = zip(*sorted(parts, key=lambda part: part[2]), strict=True)
    return RowMap(tuple(lead), names, rows, begins, spread)


def read_map(content: Mapping[str, Any]) -> RowMap:
    """The map that `RowMap.as_json` has written."""
    parts = [(str(name), int(rows), int(begin)) for name, rows, begin in content["parts"]]
    lead, how = [int(n) for n in content["lead"]], content["spread"]
    return map_of(lead, parts, Spread(math.prod(lead), int(how["chunks"]), tuple(map(int, how["weights"]))))
