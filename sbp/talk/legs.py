"""Legs: between which devices the keys of a lookup travel, axis by axis, and how much room they have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from sbp.layout import Layout, chunk_sizes
from sbp.signature import B, Split
from sbp.talk.halo import Extent

# Room in a bucket beyond an even share of the keys.
SLACK, SPARE, MULTIPLE = 1.25, 8, 8
# The share of a bucket's room that is taken when little is left.
SPILL = 8


def default_capacity(keys: int, group: int) -> int:
    """Keys that a device can send to one of `group` owners in one round, if it has `keys`.

    >>> default_capacity(4096, 8), default_capacity(16, 8)
    (648, 16)
    """
    room = math.ceil(SLACK * -(-keys // group) + SPARE)
    return min(keys, -(-room // MULTIPLE) * MULTIPLE)


@dataclass(frozen=True, slots=True)
class Route:
    """Between which devices keys and rows travel.

    Arguments:
      rows: dim 0 of the table, and the axes that split it.
      axes: those of them that split the keys too. Along the others every device has all keys, and the rows of
        its own shard.
      keys: how many keys a device has, absent ones included.
      capacity: keys that a device can send to one owner in one round; None for `default_capacity`.
      wire_dtype: the floating type in which rows of a wider one travel; None for their own.
      planned: whether the capacity was planned from a batch. Another one may be fuller: rounds after the
        first have room for an even share at least.
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
    """The exchange along one axis of a route.

    Arguments:
      axis, group: the axis and its size.
      before: the axes of the legs before.
      outer: dim 0 as the table's outer axes split it: the rows that the devices of the group have together.
      chunk: the rows of each of them.
      keys: how many keys a device has before it sends.
      capacity: how many of them it can send to one owner in the first round.
      later: the same of later rounds.
      last: whether no leg follows.
    """

    axis: int
    group: int
    before: tuple[int, ...]
    outer: Layout
    chunk: int
    keys: int
    capacity: int
    later: int
    last: bool

    @property
    def alone(self) -> bool:
        """Whether this is the only leg."""
        return not self.before and self.last

    @property
    def spill(self) -> int:
        """The room of a round that takes the little that is left; that of any round where legs are nested."""
        return max(1, self.later // SPILL) if self.alone else self.later

    @property
    def fits(self) -> bool:
        """Whether one round is always enough."""
        return self.capacity >= min(self.keys, self.chunk)

    @property
    def room(self) -> int:
        """How many keys a device gets in the first round."""
        return self.group * self.capacity


@cache
def legs(route: Route) -> tuple[Leg, ...]:
    """The exchanges, outer to inner."""
    rows, keys, out = route.rows, route.keys, list[Leg]()
    chunks = chunk_sizes(rows.size, rows.axes, rows.hierarchy)
    for depth, (axis, chunk) in enumerate(zip(rows.axes, chunks, strict=True)):
        group = rows.hierarchy[axis]
        if axis not in route.axes or group == 1 or not keys:
            continue
        wanted = route.capacity or default_capacity(route.keys, group)
        capacity = min(wanted, keys, chunk)
        later = max(capacity, min(route.even_share(group), keys, chunk)) if route.planned else capacity
        before = tuple(leg.axis for leg in out)
        last = not any(a in route.axes and rows.hierarchy[a] > 1 for a in rows.axes[depth + 1 :])
        out.append(Leg(axis, group, before, cut(rows, depth), chunk, keys, capacity, later, last))
        keys = group * later
    return tuple(out)


def cut(rows: Extent, depth: int) -> Layout:
    """Dim 0 as its first `depth` axes split it."""
    axes = rows.axes[:depth]
    nd = tuple(Split(0) if a in axes else B for a in range(len(rows.hierarchy)))
    return Layout((rows.size,), nd, rows.hierarchy)
