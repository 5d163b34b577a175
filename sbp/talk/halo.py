"""Halos: the rows of other devices that a device needs where a window slides over a split dim.

Along one dim, output `o` reads the positions `o * stride - low + j * dilation` of an input whose row `i`
stands at position `i * base_dilation`, as XLA's windows do. Which rows a device takes follows from sizes and
from its place alone, so it is worked out for all devices before tracing; a body looks up its own line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import compat
from sbp.layout import Layout, chunk_sizes, is_padded, offset, valid_length
from sbp.talk.local import Local, Talk

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
    def padded(self) -> bool:
        """Whether some shard has padding."""
        return is_padded(self.size, self.axes, self.hierarchy)

    @property
    def gaps(self) -> bool:
        """Whether padding lies between rows, and not behind the last one alone."""
        return self.padded and self.place(self.size - 1) != self.size - 1

    def offset(self, coords: Coords) -> int:
        """The logical position of a device's first row."""
        return offset(self.size, self.axes, self.hierarchy, coords)

    def valid(self, coords: Coords) -> int:
        """How many of a device's rows are real."""
        return valid_length(self.size, self.axes, self.hierarchy, coords)

    def first(self, coords: Coords) -> int:
        """Where a device's first row is if all shards stand end to end, padding included."""
        rank = 0
        for a in self.axes:
            rank = rank * self.hierarchy[a] + coords[a]
        return rank * self.local

    def place(self, row: int) -> int:
        """Where a logical row is if all shards stand end to end, padding included.

        >>> [Extent(5, (0, 1), (2, 2)).place(i) for i in range(5)]
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


@dataclass(frozen=True, slots=True)
class Window:
    """How a window slides along one dim: stride, its own dilation, the input's, and the padding in front."""

    stride: int = 1
    dilation: int = 1
    base_dilation: int = 1
    low: int = 0


@dataclass(frozen=True, slots=True)
class Hop:
    """Rows that come from one of the devices around, or zeros in their place where no device needs them.

    Arguments:
      distance: from how many places before this device; negative: after.
      rows: how many, those nearest to this device.
      sent: whether some device needs them.
    """

    distance: int
    rows: int
    sent: bool


@dataclass(frozen=True, slots=True)
class Halo:
    """The rows of one dim that every device takes, its own and others'.

    Arguments:
      extent: the dim.
      axes: the placement axes that tables run over, row-major.
      starts: per device, the logical position of the first row; it may lie outside of the tensor.
      count: how many rows each device takes.
      hops: what comes from other devices, in the order in which it stands around the own shard.
    """

    extent: Extent
    axes: tuple[int, ...]
    starts: tuple[int, ...]
    count: int
    hops: tuple[Hop, ...]

    @property
    def before(self) -> int:
        """How many rows stand before the own shard after the exchange."""
        return sum(h.rows for h in self.hops if h.distance > 0)

    @property
    def after(self) -> int:
        """How many rows stand behind the own shard after the exchange."""
        return sum(h.rows for h in self.hops if h.distance < 0)

    @property
    def sent(self) -> int:
        """How many rows one device sends."""
        return sum(h.rows for h in self.hops if h.sent)


def devices(axes: Sequence[int], hierarchy: Sequence[int]) -> list[Coords]:
    """The places along `axes`, row-major; 0 along the others."""
    return list(itertools.product(*(range(g if a in axes else 1) for a, g in enumerate(hierarchy))))


def halo(dim: Extent, axes: tuple[int, ...], wants: Mapping[Coords, tuple[int, int]], count: int) -> Halo:
    """What must be sent.

    Arguments:
      wants: the first row of a device and how many of its `count` rows matter; a device without an entry has
        only padding to compute.
    """
    spans = []  # what each device needs, from its own first row on
    for at, (start, needed) in wants.items():
        low, high = max(start, 0), min(start + needed, dim.size) - 1
        if low <= high:
            spans.append((dim.place(low) - dim.first(at), dim.place(high) + 1 - dim.first(at)))
    usual = next(start - dim.first(at) for at, (start, _) in wants.items())
    places = devices(axes, dim.hierarchy)
    starts = tuple(wants[at][0] if at in wants else dim.first(at) + usual for at in places)
    return Halo(dim, axes, starts, count, _hops(spans, dim.local))


def _hops(spans: Sequence[tuple[int, int]], c: int) -> tuple[Hop, ...]:
    """The exchange that gives every device its span of rows, whose own are 0 to `c`."""
    low = min((a for a, _ in spans), default=0)
    high = max((b for _, b in spans), default=0)

    def hop(distance: int, start: int, stop: int) -> Hop:
        return Hop(distance, stop - start, any(a < stop and start < b for a, b in spans))

    before = [hop(-(at // c), max(at, low), at + c) for at in range(-c, low - c, -c)]
    after = [hop(-(at // c), at, min(at + c, high)) for at in range(c, high, c)]
    return (*reversed(before), *after)


@dataclass(frozen=True, slots=True)
class Slide:
    """What each device does along one dim of a windowed op.

    Arguments:
      halo: the rows of the input.
      padding: what the op pads them by.
      surplus: how many outputs are computed too many.
      skips: per device, how many of those come first.
    """

    halo: Halo
    padding: tuple[int, int]
    surplus: int
    skips: tuple[int, ...]


@cache
def slide(base: Extent, taps: Extent, out: Extent, window: Window) -> Slide | None:
    """How a window of `taps` slides over `base` to make `out`; None where devices would need different ops.

    Split taps leave a sum: each device has some taps of all outputs.
    """
    s, d, b = window.stride, window.dilation, window.base_dilation
    axes = tuple(sorted({*base.axes, *taps.axes, *out.axes}))
    places = devices(axes, base.hierarchy)
    valid = {at: out.valid(at) for at in places if out.valid(at)}
    first = {at: out.offset(at) * s + taps.offset(at) * d - window.low for at in valid}
    # How far the first input row stands behind the first position that is read.
    phases = {at: -p % b for at, p in first.items()}
    least, most = min(phases.values()), max(phases.values())
    reach = (taps.local - 1) * d
    span = (out.local - 1) * s + reach + 1
    count = (span - 1 - least) // b + 1
    if count < 1 or (most > least and s > 1):
        return None
    wants = {}
    for at, p in first.items():
        start, last = -(-p // b), (p + (valid[at] - 1) * s + reach) // b
        wants[at] = start, last - start + 1
    behind = span - least - (count - 1) * b - 1
    skips = tuple(most - phases[at] if at in phases else 0 for at in places)
    return Slide(halo(base, axes, wants, count), (most, behind), most - least, skips)


@dataclass(frozen=True, slots=True)
class Scatter:
    """What each device does along one dim where windows scatter: it runs all that touch its rows.

    Arguments:
      source, operand: the windows and the rows that they cover.
      padding: what the result is padded by, before the own rows are taken from it.
      starts: per device, where those are.
    """

    source: Halo
    operand: Halo
    padding: tuple[int, int]
    starts: tuple[int, ...]


@cache
def scatter(source: Extent, operand: Extent, taps: int, stride: int, low: int) -> Scatter:
    """How windows of `taps` scatter `source`, one row each, over `operand`."""
    axes = tuple(sorted({*source.axes, *operand.axes}))
    windows, rows, starts = {}, {}, {}
    places = devices(axes, operand.hierarchy)
    for at in places:
        first, valid = operand.offset(at), operand.valid(at)
        if valid:
            head = max(0, -(-(first + low - taps + 1) // stride))
            number = max(0, min(source.size - 1, (first + valid - 1 + low) // stride) - head + 1)
            windows[at] = head, number
            rows[at] = head * stride - low, (number - 1) * stride + taps if number else 0
            starts[at] = first - rows[at][0]
    count = max(1, *(n for _, n in windows.values()))
    covered = (count - 1) * stride + taps
    before = max(0, -min(starts.values()))
    after = max(0, max(starts.values()) + operand.local - covered)
    usual = next(iter(starts.values()))
    return Scatter(
        halo(source, axes, windows, count),
        halo(operand, axes, rows, covered),
        (before, after),
        tuple(starts.get(at, usual) + before for at in places),
    )


def pays(halos: Iterable[Halo]) -> bool:
    """Whether to exchange halos is no more than to gather."""
    return all(h.sent <= h.extent.size - h.extent.local for h in halos)


def own(ctx: Local, axes: Sequence[int], table: Sequence[Any]) -> Any:
    """This device's line of a table; as an integer where all are the same."""
    lines = np.asarray(table, np.int32)
    if (lines == lines[0]).all():
        return lines[0]
    return lax.dynamic_index_in_dim(jnp.asarray(lines), ctx.rank(axes), keepdims=False)


def taken(x: Any, start: Any, count: int, dim: int) -> Any:
    """`count` rows along `dim`, from an integer or a traced position on."""
    if isinstance(start, np.integer):
        return lax.slice_in_dim(x, int(start), int(start) + count, axis=dim)
    return lax.dynamic_slice_in_dim(x, start, count, axis=dim)


def fetched(ctx: Local, x: Any, dim: int, rows: Halo, fill: Any = None) -> Any:
    """The `count` rows of this device along `dim`.

    Arguments:
      fill: what stands outside of the tensor; None for the zeros that come from where no device is.
    """
    wide, size = _exchanged(ctx, x, dim, rows), rows.extent.size
    zero = 0 if fill is None else fill
    out = _across_gaps(ctx, wide, dim, rows) if rows.extent.gaps else _in_line(ctx, wide, dim, rows, zero)
    outside = min(rows.starts) < 0 or max(rows.starts) + rows.count > size
    if outside and (fill is not None or rows.extent.padded):
        at = own(ctx, rows.axes, rows.starts) + lax.broadcasted_iota(np.int32, out.shape, dim)
        out = jnp.where((at >= 0) & (at < size), out, jnp.asarray(zero, out.dtype))
    return out


def _exchanged(ctx: Local, x: Any, dim: int, rows: Halo) -> Any:
    """The shard between the rows from before and from after."""
    c = rows.extent.local
    before: list[Any] = []
    after: list[Any] = []
    for hop in rows.hops:
        start, side = (c - hop.rows, before) if hop.distance > 0 else (0, after)
        piece = lax.slice_in_dim(x, start, start + hop.rows, axis=dim)
        side.append(ctx.shifted(piece, rows.extent.axes, hop.distance) if hop.sent else jnp.zeros_like(piece))
    return lax.concatenate([*before, x, *after], dim) if rows.hops else x


def _in_line(ctx: Local, wide: Any, dim: int, rows: Halo, fill: Any) -> Any:
    """The rows where they are all in a line."""
    places = devices(rows.axes, rows.extent.hierarchy)
    starts = [s - rows.extent.first(at) + rows.before for s, at in zip(rows.starts, places, strict=True)]
    low = max(0, -min(starts))
    high = max(0, max(starts) + rows.count - wide.shape[dim])
    if low or high:
        widths = [(low, high, 0) if d == dim else (0, 0, 0) for d in range(wide.ndim)]
        wide = lax.pad(wide, jnp.asarray(fill, wide.dtype), widths)
    return taken(wide, own(ctx, rows.axes, [s + low for s in starts]), rows.count, dim)


def _across_gaps(ctx: Local, wide: Any, dim: int, rows: Halo) -> Any:
    """The rows where padding stands between them; those outside are anything."""
    base, last = rows.extent, rows.extent.size - 1
    places = [base.place(i) for i in range(base.size)]
    lines = [
        [places[min(max(s + i, 0), last)] - base.first(at) + rows.before for i in range(rows.count)]
        for s, at in zip(rows.starts, devices(rows.axes, base.hierarchy), strict=True)
    ]
    return jnp.take(wide, own(ctx, rows.axes, lines), axis=dim, mode="clip")


def cropped(ctx: Local, y: Any, slides: Mapping[int, Slide]) -> Any:
    """Without the outputs that are too many.

    Arguments:
      slides: by dim of `y`.
    """
    for dim, s in slides.items():
        if s.surplus:
            y = taken(y, own(ctx, s.halo.axes, s.skips), y.shape[dim] - s.surplus, dim)
    return y


def talks(ctx: Local, operand: int, halos: Mapping[int, Halo]) -> Iterable[Talk]:
    """The exchange of an operand's halos, dim after dim: the later ones are as wide as the earlier made them.

    Arguments:
      halos: by dim of the operand.
    """
    shape, itemsize = list(ctx.operands[operand].local), compat.itemsize(ctx.dtypes[operand])
    for dim, h in halos.items():
        shape[dim] = 1
        row = math.prod(shape) * itemsize
        for hop in h.hops:
            if hop.sent:
                sent = dim, hop, tuple(shape)
                yield Talk("permute", h.extent.axes, hop.rows * row, operand, _reason(dim, hop), sent)
        shape[dim] = h.count


def _reason(dim: int, hop: Hop) -> str:
    """For instance `windows cross the cuts of dim 2 and need the last row of the device before; ...`."""
    which, side = ("last", "before") if hop.distance > 0 else ("first", "after")
    some = f"{hop.rows} rows" if hop.rows > 1 else "row"
    far = f"{abs(hop.distance)} {side}" if abs(hop.distance) > 1 else side
    need = f"need the {which} {some} of the device {far}"
    return f"windows cross the cuts of dim {dim} and {need}; it is split over {{axes}}"
