"""Extents: one split dim as every device has it, worked out before tracing.

Which rows a device has follows from sizes and from its coordinates alone. So what devices must send is a
table with a line per device, made in Python; a body only looks up its own line (`own_entry`). Examples:
docs/communication.md.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp.communication.protocol import Context
from sbp.compat.untyped import Position
from sbp.layout import Layout, chunk_sizes, is_padded, offset, valid_length

Coords: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Extent:
    """One dim of a tensor: its size and the placement axes that split it.

    >>> Extent(10, (0, 1), (2, 4)).local
    2
    """

    size: int
    axes: tuple[int, ...]
    hierarchy: tuple[int, ...]

    @property
    def local(self) -> int:
        """The rows of one shard, padding included."""
        return (self.size, *chunk_sizes(self.size, self.axes, self.hierarchy))[-1]

    @property
    def has_padding(self) -> bool:
        """Whether some shard has padding."""
        return is_padded(self.size, self.axes, self.hierarchy)

    @property
    def gaps(self) -> bool:
        """Whether padding lies between rows, not behind the last one alone: two uneven cuts leave it so."""
        return self.has_padding and self.padded_position(self.size - 1) != self.size - 1

    def offset(self, coords: Coords) -> int:
        """The logical position of a device's first row."""
        return offset(self.size, self.axes, self.hierarchy, coords)

    def valid(self, coords: Coords) -> int:
        """How many of a device's rows are real."""
        return valid_length(self.size, self.axes, self.hierarchy, coords)

    def padded_start(self, coords: Coords) -> int:
        """Where a device's first row is if all shards stand end to end, padding included."""
        rank = 0
        for a in self.axes:
            rank = rank * self.hierarchy[a] + coords[a]
        return rank * self.local

    def padded_position(self, row: int) -> int:
        """Where a logical row is if all shards stand end to end, padding included.

        >>> [Extent(5, (0, 1), (2, 2)).padded_position(i) for i in range(5)]
        [0, 1, 2, 4, 5]
        """
        rank = 0
        for a, c in zip(self.axes, chunk_sizes(self.size, self.axes, self.hierarchy), strict=True):
            i, row = divmod(row, c)
            rank = rank * self.hierarchy[a] + i
        return rank * self.local + row


def extent(layout: Layout, dim: int) -> Extent:
    """One dim of a layout."""
    return Extent(layout.shape[dim], layout.axes(dim), layout.hierarchy)


def coordinates_along(axes: Sequence[int], hierarchy: Sequence[int]) -> list[Coords]:
    """The coordinates of the devices along `axes`, row-major; 0 along the others.

    >>> coordinates_along((1,), (2, 3))
    [(0, 0), (0, 1), (0, 2)]
    """
    return list(itertools.product(*(range(g if a in axes else 1) for a, g in enumerate(hierarchy))))


def own_entry(ctx: Context, axes: Sequence[int], table: Sequence[int] | Sequence[Sequence[int]]) -> Position:
    """This device's line of a table; as an integer where all are the same.

    An integer makes a static slice, and no table in the program. So tables are made alike where they may be:
    a device that has only padding could do anything, and does what the others do.

    Arguments:
      axes: the table has a line for each device along them, row-major.
    """
    lines = np.asarray(table, np.int32)
    own: Position = lines[0]
    if not (lines == own).all():
        own = lax.dynamic_index_in_dim(
            jnp.asarray(lines), ctx.rank(axes), keepdims=False, allow_negative_indices=False
        )
    return own


def slice_rows(x: jax.Array, start: Position, count: int, dim: int) -> jax.Array:
    """`count` rows along `dim`, from an integer or a traced position on."""
    if isinstance(start, np.integer):
        return lax.slice_in_dim(x, int(start), int(start) + count, axis=dim)
    return lax.dynamic_slice_in_dim(x, start, count, dim, allow_negative_indices=False)
