"""Halos: the rows of other devices that a device needs where a window slides over a split dim.

Along one dim, output `o` reads the positions `o * stride - low + j * dilation` of an input whose row `i`
stands at position `i * base_dilation`, as XLA's windows do. One exchange per neighbour brings the rows that a
window reaches beyond a shard: the ghost cells of numerical codes. docs/communication.md has an example with
numbers.

Shards have one shape on all devices, so all take equally many rows (`Halo.count`), those at the ends of the
tensor too: what stands outside of it is masked, and outputs that are too many are cut off again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from sbp.communication.extents import Coords, Extent, coordinates_along, own_entry, slice_rows
from sbp.communication.protocol import Communication, Context
from sbp.compat import core


@dataclass(frozen=True, slots=True)
class Window:
    """How a window slides along one dim: stride, its own dilation, the input's, and the padding in front."""

    stride: int = 1
    dilation: int = 1
    base_dilation: int = 1
    low: int = 0


@dataclass(frozen=True, slots=True)
class Hop:
    """Rows that one permute brings from the devices at one distance, or zeros where no device needs them.

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
    def sent_rows(self) -> int:
        """How many rows one device sends."""
        return sum(h.rows for h in self.hops if h.sent)


def halo(dim: Extent, axes: tuple[int, ...], wants: Mapping[Coords, tuple[int, int]], count: int) -> Halo:
    """What must be sent, so that every device has `count` rows.

    Arguments:
      axes: the placement axes that tables run over.
      wants: by coordinates, a device's first row and how many of its `count` rows matter; a device without an
        entry has only padding to compute.
    """
    spans = []  # what each device needs, from its own first row on, with the padding of shards between
    for at, (start, needed) in wants.items():
        low, high = max(start, 0), min(start + needed, dim.size) - 1
        if low <= high:
            own = dim.padded_start(at)
            spans.append((dim.padded_position(low) - own, dim.padded_position(high) + 1 - own))
    # What has only padding to compute starts where the first device does, so that tables are alike.
    usual = next(start - dim.padded_start(at) for at, (start, _) in wants.items())
    coords = coordinates_along(axes, dim.hierarchy)
    starts = tuple(wants[at][0] if at in wants else dim.padded_start(at) + usual for at in coords)
    return Halo(dim, axes, starts, count, _hops(spans, dim.local))


def _hops(spans: Sequence[tuple[int, int]], c: int) -> tuple[Hop, ...]:
    """The exchanges that give every device its span of rows.

    Arguments:
      spans: (first, beyond the last) row of each device, counted from its own first row: its own are 0 to
        `c`.
      c: the rows of a shard.

    >>> _hops([(-1, 4), (-1, 4), (-1, 6)], 4)
    (Hop(distance=1, rows=1, sent=True), Hop(distance=-1, rows=2, sent=True))
    """
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
    coords = coordinates_along(axes, base.hierarchy)
    valid = {at: out.valid(at) for at in coords if out.valid(at)}
    first = {at: out.offset(at) * s + taps.offset(at) * d - window.low for at in valid}
    # How far the first input row stands behind the first position that is read. All devices pad by the
    # largest phase; what others compute in front of their first output is cut off: whole outputs only at
    # stride 1.
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
    skips = tuple(most - phases[at] if at in phases else 0 for at in coords)
    return Slide(halo(base, axes, wants, count), (most, behind), most - least, skips)


@dataclass(frozen=True, slots=True)
class WindowScatter:
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
def scatter_windows(source: Extent, operand: Extent, taps: int, stride: int, low: int) -> WindowScatter:
    """How windows of `taps` scatter `source`, one row each, over `operand`.

    A device computes every window that touches its rows, so windows on a cut are computed by both sides: that
    costs a few windows more, and needs no sum between devices.
    """
    axes = tuple(sorted({*source.axes, *operand.axes}))
    windows, rows, starts = {}, {}, {}
    coords = coordinates_along(axes, operand.hierarchy)
    for at in coords:
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
    return WindowScatter(
        halo(source, axes, windows, count),
        halo(operand, axes, rows, covered),
        (before, after),
        tuple(starts.get(at, usual) + before for at in coords),
    )


def halos_pay(halos: Iterable[Halo]) -> bool:
    """Whether halos have no more rows than a device would be sent if it gathered the whole dim."""
    return all(h.sent_rows <= h.extent.size - h.extent.local for h in halos)


def with_halo(ctx: Context, x: jax.Array, dim: int, rows: Halo, fill: ArrayLike | None = None) -> jax.Array:
    """A shard with its halo: the `count` rows of this device along `dim`.

    Arguments:
      x: the shard; its padding may be anything, and does not get into real rows.
      fill: what stands outside of the tensor; None for the zeros that come from where no device is.
    """
    wide, size = _with_neighbours(ctx, x, dim, rows), rows.extent.size
    zero = 0 if fill is None else fill
    out = _across_gaps(ctx, wide, dim, rows) if rows.extent.gaps else _in_line(ctx, wide, dim, rows, zero)
    outside = min(rows.starts) < 0 or max(rows.starts) + rows.count > size
    if outside and (fill is not None or rows.extent.has_padding):
        at = own_entry(ctx, rows.axes, rows.starts) + lax.broadcasted_iota(np.int32, out.shape, dim)
        out = jnp.where((at >= 0) & (at < size), out, jnp.asarray(zero, out.dtype))
    return out


def _with_neighbours(ctx: Context, x: jax.Array, dim: int, rows: Halo) -> jax.Array:
    """The shard between the rows from before and from after."""
    c = rows.extent.local
    before: list[jax.Array] = []
    after: list[jax.Array] = []
    for hop in rows.hops:
        start, side = (c - hop.rows, before) if hop.distance > 0 else (0, after)
        piece = lax.slice_in_dim(x, start, start + hop.rows, axis=dim)
        side.append(ctx.shift(piece, rows.extent.axes, hop.distance) if hop.sent else jnp.zeros_like(piece))
    return lax.concatenate([*before, x, *after], dim) if rows.hops else x


def _in_line(ctx: Context, wide: jax.Array, dim: int, rows: Halo, fill: ArrayLike) -> jax.Array:
    """The `count` rows, where all that are real are in a line: one slice."""
    coords = coordinates_along(rows.axes, rows.extent.hierarchy)
    starts = [
        s - rows.extent.padded_start(at) + rows.before for s, at in zip(rows.starts, coords, strict=True)
    ]
    low = max(0, -min(starts))
    high = max(0, max(starts) + rows.count - wide.shape[dim])
    if low or high:
        widths = [(low, high, 0) if d == dim else (0, 0, 0) for d in range(wide.ndim)]
        wide = lax.pad(wide, jnp.asarray(fill, wide.dtype), widths)
    return slice_rows(wide, own_entry(ctx, rows.axes, [s + low for s in starts]), rows.count, dim)


def _across_gaps(ctx: Context, wide: jax.Array, dim: int, rows: Halo) -> jax.Array:
    """The `count` rows, where the padding of shards stands between them: one by one.

    In the place of rows outside of the tensor stands any of it.
    """
    base, last = rows.extent, rows.extent.size - 1
    positions = [base.padded_position(i) for i in range(base.size)]
    lines = [
        [positions[min(max(s + i, 0), last)] - base.padded_start(at) + rows.before for i in range(rows.count)]
        for s, at in zip(rows.starts, coordinates_along(rows.axes, base.hierarchy), strict=True)
    ]
    return jnp.take(wide, own_entry(ctx, rows.axes, lines), axis=dim, mode="clip")


def without_surplus(ctx: Context, y: jax.Array, slides: Mapping[int, Slide]) -> jax.Array:
    """The outputs of a window without those that are too many.

    Arguments:
      slides: by dim of `y`.
    """
    for dim, s in slides.items():
        if s.surplus:
            y = slice_rows(y, own_entry(ctx, s.halo.axes, s.skips), y.shape[dim] - s.surplus, dim)
    return y


def halo_communication(ctx: Context, operand: int, halos: Mapping[int, Halo]) -> Iterable[Communication]:
    """The exchange of an operand's halos, dim after dim: the later ones are as wide as the earlier made them.

    Arguments:
      halos: by dim of the operand.
    """
    shape, itemsize = list(ctx.operands[operand].local), core.itemsize(ctx.dtypes[operand])
    for dim, h in halos.items():
        shape[dim] = 1
        row = math.prod(shape) * itemsize
        for hop in h.hops:
            if hop.sent:
                sent = dim, hop, tuple(shape)
                yield Communication(
                    "permute", h.extent.axes, hop.rows * row, operand, _reason(dim, hop), sent
                )
        shape[dim] = h.count


def _reason(dim: int, hop: Hop) -> str:
    """For instance `windows cross the cuts of dim 2 and need the last row of the device before; ...`."""
    which, side = ("last", "before") if hop.distance > 0 else ("first", "after")
    some = f"{hop.rows} rows" if hop.rows > 1 else "row"
    far = f"{abs(hop.distance)} {side}" if abs(hop.distance) > 1 else side
    need = f"need the {which} {some} of the device {far}"
    return f"windows cross the cuts of dim {dim} and {need}; it is split over {{axes}}"
