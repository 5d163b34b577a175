"""The legs of a sparse exchange: between which devices keys travel, axis by axis, and with which capacity.

A table that several axes split is reached axis by axis, outer to inner: a leg is an all-to-all along one
axis. So a device of an 8 x 8 grid sends 8 + 8 messages and not 64, and keys that meet after the first leg and
are equal travel the second one once. docs/communication.md has an example.
"""

import math
from dataclasses import dataclass
from functools import cache

from sbp.communication.extents import Extent
from sbp.layout import Layout, chunk_sizes
from sbp.signature import B, Split

# Room in a bucket beyond an even share of the keys: buckets of keys that are dealt out at random differ by
# about the root of their size, which counts most where they are small. A second round costs messages and a
# loop.
SLACK, SPARE, MULTIPLE = 1.25, 8, 8
# The share of a bucket's capacity that a round has where little is left: the last keys of a skewed bucket
# should not cost the bytes of a whole round.
SPILL = 8


def default_capacity(keys: int, group: int) -> int:
    """Keys that a device can send to one of `group` owners in one round, if it has `keys`.

    >>> default_capacity(4096, 8), default_capacity(16, 8)
    (648, 16)
    """
    capacity = math.ceil(SLACK * -(-keys // group) + SPARE)
    return min(keys, -(-capacity // MULTIPLE) * MULTIPLE)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A sparse exchange: which table, which axes, and how many keys and rows fit in a message.

    Arguments:
      rows: dim 0 of the table, and the axes that split it.
      axes: those of them that split the keys too. Along the others every device has all keys, and the rows of
        its own shard.
      keys: how many keys a device has, absent ones included.
      capacity: keys that a device can send to one owner in one round; None for `default_capacity`.
      wire_dtype: the floating type in which rows of a wider one travel; None for their own.
      planned: whether the capacity was planned from a batch. Another one may be fuller: rounds after the
        first have a capacity of an even share at least.
    """

    rows: Extent
    axes: tuple[int, ...]
    keys: int
    capacity: int | None = None
    wire_dtype: str | None = None
    planned: bool = False

    def even_share(self, group: int) -> int:
        """Keys for each of `group` owners if they are dealt out evenly."""
        return -(-self.keys // group)


@dataclass(frozen=True, slots=True)
class Leg:
    """The part of an exchange along one axis.

    Arguments:
      axis, group: the axis and its size.
      before: the axes of the legs before.
      outer: dim 0 as the table's outer axes split it: the rows that the devices of the group have together.
      chunk: the rows of each of them.
      keys: how many keys a device has before it sends.
      capacity: how many of them it can send to one owner in the first round.
      later_capacity: how many in a later round.
      last: whether no leg follows.
    """

    axis: int
    group: int
    before: tuple[int, ...]
    outer: Layout
    chunk: int
    keys: int
    capacity: int
    later_capacity: int
    last: bool

    @property
    def is_alone(self) -> bool:
        """Whether this is the only leg."""
        return not self.before and self.last

    @property
    def spill_capacity(self) -> int:
        """Room of a round that takes the little that is left; of any later round where legs are nested."""
        return max(1, self.later_capacity // SPILL) if self.is_alone else self.later_capacity

    @property
    def fits(self) -> bool:
        """Whether one round is always enough: a bucket holds all keys, or every row of an owner once."""
        return self.capacity >= min(self.keys, self.chunk)

    @property
    def received_keys(self) -> int:
        """How many keys a device receives in the first round, absent ones included."""
        return self.group * self.capacity


@cache
def legs(exchange: Exchange) -> tuple[Leg, ...]:
    """The legs of an exchange, outer to inner; none where nothing travels."""
    rows, keys, out = exchange.rows, exchange.keys, list[Leg]()
    chunks = chunk_sizes(rows.size, rows.axes, rows.hierarchy)
    for depth, (axis, chunk) in enumerate(zip(rows.axes, chunks, strict=True)):
        group = rows.hierarchy[axis]
        if axis not in exchange.axes or group == 1 or not keys:
            continue
        # Dealt out evenly, a device has as many keys after a leg as before: what `keys` is more is empty.
        wanted = exchange.capacity or default_capacity(exchange.keys, group)
        capacity = min(wanted, keys, chunk)
        share = min(exchange.even_share(group), keys, chunk)
        later_capacity = max(capacity, share) if exchange.planned else capacity
        before = tuple(leg.axis for leg in out)
        last = not any(a in exchange.axes and rows.hierarchy[a] > 1 for a in rows.axes[depth + 1 :])
        outer = split_by_outer(rows, depth)
        out.append(Leg(axis, group, before, outer, chunk, keys, capacity, later_capacity, last))
        keys = group * later_capacity
    return tuple(out)


def split_by_outer(rows: Extent, depth: int) -> Layout:
    """Dim 0 of a table as its first `depth` axes split it."""
    axes = rows.axes[:depth]
    nd = tuple(Split(0) if a in axes else B for a in range(len(rows.hierarchy)))
    return Layout((rows.size,), nd, rows.hierarchy)


def exchange_axes(exchange: Exchange) -> tuple[int, ...]:
    """The axes along which something travels."""
    return tuple(leg.axis for leg in legs(exchange))
