"""Slices, paddings, concatenations and reversals: they move rows along a dim, which may be split."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import compat
from sbp.layout import Layout
from sbp.rules.entry import Op, Row
from sbp.rules.factors import Letters, factors
from sbp.rules.registry import rule
from sbp.signature import B, P, Signature, Split
from sbp.talk.halo import Extent, devices, extent, own, taken
from sbp.talk.local import Local, Talk
from sbp.talk.route import Route, Run, Side, every, held, needed, pays, route, routed, talks, turned

MOVED = "dims whose rows move with an exchange"


def _letters(kept: Iterable[bool]) -> Letters:
    """A letter for every dim whose rows stay where they are."""
    return tuple(f"d{d}" if keep else None for d, keep in enumerate(kept))


def _on_an_axis(op: Op, size: int) -> Extent:
    """A dim as one axis sees it."""
    return Extent(size, (0,), (op.group,))


def _whole(op: Op, size: int) -> Extent:
    return Extent(size, (), (op.group,))


def _worth(op: Op, dim: int, operands: tuple[Side, ...], results: tuple[Side, ...]) -> bool:
    """Whether rows may be exchanged along `dim`.

    An inner axis does not see which part of the tensor it has; there the cost of the exchange decides alone.
    """
    if any(compat.is_key(t) for t in op.dtypes):
        return False
    inner = any(s[dim] != n[dim] for s, n in zip(op.shapes, op.logical, strict=True) if s)
    return inner or pays(route(operands, results), operands, results)


def _partial_axes(operand: Layout, result: Layout, dim: int) -> tuple[int, ...]:
    """The axes that split `dim` of the operand, and along which the result is a sum."""
    return tuple(a for a in operand.axes(dim) if a in result.partial_axes("sum"))


def _sliced(params: Any, dim: int) -> tuple[int, int]:
    """Where a slice starts, and its stride."""
    strides = params["strides"] or (1,) * (dim + 1)
    return int(params["start_indices"][dim]), int(strides[dim])


@cache
def _slice_sides(
    base: Extent, out: Extent, start: int, step: int, partial: tuple[int, ...]
) -> tuple[tuple[Side], tuple[Side]]:
    return (held(base, start, step),), (needed(out, 0, partial),)


def _slice_ways(ctx: Local) -> dict[int, Route]:
    (base,), (out,) = ctx.operands, ctx.results
    found = {}
    for d, (n, m) in enumerate(zip(base.shape, out.shape, strict=True)):
        if n != m and base.axes(d):
            partial = _partial_axes(base, out, d)
            found[d] = route(*_slice_sides(extent(base, d), extent(out, d), *_sliced(ctx.params, d), partial))
    return found


def _slice_local(ctx: Local, x: Any) -> list[Any]:
    """Dims that are not split first; one that is taken whole keeps its local size."""
    (base,), (out,), ways = ctx.operands, ctx.results, _slice_ways(ctx)
    starts, limits, strides = [], [], []
    for d, (n, m) in enumerate(zip(base.shape, out.shape, strict=True)):
        start, step = _sliced(ctx.params, d)
        kept = n == m or d in ways
        starts.append(0 if kept else start)
        limits.append(x.shape[d] if kept else ctx.params["limit_indices"][d])
        strides.append(1 if kept else step)
    x = lax.slice(x, starts, limits, strides)
    for d, way in ways.items():
        x = every(ctx, x, d, extent(base, d), *_sliced(ctx.params, d))
        fill = 0 if _partial_axes(base, out, d) else None
        x = routed(ctx, [x], d, way, fill)
    return [x]


def _slice_talks(ctx: Local) -> Iterable[Talk]:
    (base,), (out,), ways = ctx.operands, ctx.results, _slice_ways(ctx)
    shape = [n if d in ways else m for d, (n, m) in enumerate(zip(base.local, out.local, strict=True))]
    plain = tuple(shape) == base.local and all(_sliced(ctx.params, d)[1] == 1 for d in ways)
    return talks(ctx, ways, shape, plain)


def _taken_out(dim: int) -> str:
    return f"rows of dim {dim} of operand 0 are sliced out here, and it is split over {{axes}}"


@rule("slice", local=_slice_local, talks=_slice_talks, fused=True, note=MOVED)
def slice_(op: Op) -> list[Row]:
    """Every dim; a few rows of a split dim may leave a sum instead."""
    (shape,), (out,) = op.shapes, op.results
    logical, strides = op.logical[0], op.params["strides"] or (1,) * len(shape)
    sizes = (
        -(-(stop - start) // step)
        for start, stop, step in zip(
            op.params["start_indices"], op.params["limit_indices"], strides, strict=True
        )
    )
    names = _letters(n == m for n, m in zip(logical, sizes, strict=True))
    rows = factors(op, [names], [names], moved=(0,))
    for d, (n, m) in enumerate(zip(shape, out, strict=True)):
        if names[d] is not None or m < 1 or n == 1:
            continue
        base = _on_an_axis(op, n)
        sides = _slice_sides(base, _on_an_axis(op, m), *_sliced(op.params, d), ())
        if m > 1 and _worth(op, d, *sides):
            rows.append(Row((Split(d),), (Split(d),)))
        if 2 * m <= n:
            rows.append(Row((Split(d),), (P,), reason=_taken_out(d), owned=True))
    return rows


@dataclass(frozen=True, slots=True)
class _Padding:
    """What a device does where a dim is padded.

    Arguments:
      way: brings it the rows that it pads.
      widths: what it pads them by, with what between them.
      skips: per device, how many of the padded rows come before its own.
    """

    way: Route
    widths: tuple[int, int, int]
    skips: tuple[int, ...]


@cache
def _pad_sides(base: Extent, out: Extent, low: int, between: int) -> tuple[Side, Side, tuple[int, ...]]:
    """Both sides, and how far in front of its first row of the operand each device starts."""
    b, runs, phases = between + 1, [], []
    for at in devices(out.axes, out.hierarchy):
        first, valid = out.offset(at) - low, out.valid(at)
        start, last = -(-first // b), (first + valid - 1) // b
        runs.append(Run(start, last - start + 1 if valid else 0))
        phases.append(-first % b)
    height = max(0, -(-(out.local - min(phases)) // b))
    return held(base), Side(out, tuple(runs), height), tuple(phases)


@cache
def _padding(base: Extent, out: Extent, low: int, between: int) -> _Padding:
    source, target, phases = _pad_sides(base, out, low, between)
    most = max(phases)
    length = most - min(phases) + out.local
    used = (target.height - 1) * (between + 1) + 1 if target.height else 0
    return _Padding(
        route((source,), (target,)),
        (most, max(0, length - most - used), between),
        tuple(most - p for p in phases),
    )


def _paddings(ctx: Local) -> dict[int, _Padding]:
    base, out = ctx.operands[0], ctx.results[0]
    return {
        d: _padding(extent(base, d), extent(out, d), int(low), int(between))
        for d, (low, high, between) in enumerate(ctx.params["padding_config"])
        if (low or high or between) and (base.axes(d) or out.axes(d))
    }


def _nothing_left(ctx: Local) -> bool:
    """Whether negative paddings cut the whole operand away."""
    sizes = zip(ctx.params["padding_config"], ctx.operands[0].shape, ctx.results[0].shape, strict=True)
    for (low, _, between), n, m in sizes:
        first = max(0, -(low // (between + 1)))
        if first >= n or low + first * (between + 1) >= m:
            return True
    return False


def _pad_local(ctx: Local, x: Any, value: Any) -> list[Any]:
    """The rows that a device pads come to it; then it pads them."""
    if _nothing_left(ctx):
        return [jnp.broadcast_to(value, ctx.results[0].local)]
    paddings = _paddings(ctx)
    widths = [(int(a), int(b), int(c)) for a, b, c in ctx.params["padding_config"]]
    for d, p in paddings.items():
        x, widths[d] = routed(ctx, [x], d, p.way, value), p.widths
    x = lax.pad(x, value, widths)
    for d, p in paddings.items():
        x = taken(x, own(ctx, p.way.axes, p.skips), ctx.results[0].local[d], d)
    return [x]


def _pad_talks(ctx: Local) -> Iterable[Talk]:
    ways = {} if _nothing_left(ctx) else {d: p.way for d, p in _paddings(ctx).items()}
    return talks(ctx, ways, ctx.operands[0].local, True)


@rule("pad", local=_pad_local, talks=_pad_talks, fused=True, note=MOVED)
def pad(op: Op) -> list[Row]:
    """Every dim; sums and extrema of operand and padding value together."""
    config = op.params["padding_config"]
    names = _letters(not any(c) for c in config)
    rows = factors(op, [names, ()], [names], moved=(0, 1))
    for d, (low, _, between) in enumerate(config):
        n, m = op.shapes[0][d], op.results[0][d]
        if names[d] is not None or n < 1 or m < 2:
            continue
        base, out = (_on_an_axis(op, n) if n > 1 else _whole(op, n)), _on_an_axis(op, m)
        source, target, _ = _pad_sides(base, out, int(low), int(between))
        if _worth(op, d, (source,), (target,)):
            rows.append(Row((Split(d) if n > 1 else B, B), (Split(d),)))
    return rows


@cache
def _joined_sides(parts: tuple[Extent, ...], out: Extent) -> tuple[tuple[Side, ...], tuple[Side]]:
    """The parts one after the other on the line."""
    ends = np.cumsum([0, *(p.size for p in parts)])
    return tuple(held(p, -int(e)) for p, e in zip(parts, ends[:-1], strict=True)), (needed(out),)


def _concatenate_way(ctx: Local) -> Route | None:
    dim = int(ctx.params["dimension"])
    if not ctx.results[0].axes(dim):
        return None
    return route(*_joined_sides(tuple(extent(x, dim) for x in ctx.operands), extent(ctx.results[0], dim)))


def _concatenate_local(ctx: Local, *xs: Any) -> list[Any]:
    way = _concatenate_way(ctx)
    return ctx.bind(*xs) if way is None else [routed(ctx, xs, int(ctx.params["dimension"]), way)]


def _concatenate_talks(ctx: Local) -> Iterable[Talk]:
    way, dim = _concatenate_way(ctx), int(ctx.params["dimension"])
    return talks(ctx, {} if way is None else {dim: way}, ctx.results[0].local, False)


@rule("concatenate", local=_concatenate_local, talks=_concatenate_talks, note=MOVED)
def concatenate(op: Op) -> list[Row]:
    """Every dim; sums and extrema of all together. Of the joined dim, operands of one row are whole."""
    dim = int(op.params["dimension"])
    names = _letters(d != dim for d in range(len(op.results[0])))
    joined = tuple(range(len(op.shapes)))
    rows = factors(op, [names] * len(op.shapes), [names], moved=joined)
    sizes, whole = [s[dim] for s in op.shapes], op.results[0][dim]
    parts = tuple(_on_an_axis(op, n) if n > 1 else _whole(op, n) for n in sizes)
    sides = _joined_sides(parts, _on_an_axis(op, whole))
    if max(sizes) > 1 and _worth(op, dim, *sides):
        ins: tuple[Signature, ...] = tuple(Split(dim) if n > 1 else B for n in sizes)
        rows.append(Row(ins, (Split(dim),)))
    return rows


@cache
def _cut_sides(
    base: Extent, parts: tuple[Extent, ...], partial: tuple[tuple[int, ...], ...]
) -> tuple[tuple[Side], tuple[Side, ...]]:
    """The parts one after the other on the line."""
    ends = np.cumsum([0, *(p.size for p in parts)])
    each = zip(parts, ends[:-1], partial, strict=True)
    return (held(base),), tuple(needed(part, int(end), axes) for part, end, axes in each)


def _split_way(ctx: Local) -> Route | None:
    dim, base = int(ctx.params["axis"]), ctx.operands[0]
    if not base.axes(dim):
        return None
    partial = tuple(_partial_axes(base, r, dim) for r in ctx.results)
    return route(*_cut_sides(extent(base, dim), tuple(extent(r, dim) for r in ctx.results), partial))


def _split_local(ctx: Local, x: Any) -> list[Any]:
    way, dim = _split_way(ctx), int(ctx.params["axis"])
    if way is None:
        return ctx.bind(x)
    sums = any(_partial_axes(ctx.operands[0], r, dim) for r in ctx.results)
    x = routed(ctx, [x], dim, way, 0 if sums else None)
    return ctx.bind(x, sizes=tuple(r.local[dim] for r in ctx.results))


def _split_talks(ctx: Local) -> Iterable[Talk]:
    way = _split_way(ctx)
    dim = int(ctx.params["axis"])
    return talks(ctx, {} if way is None else {dim: way}, ctx.operands[0].local, True)


@rule("split", local=_split_local, talks=_split_talks, note=MOVED)
def split(op: Op) -> list[Row]:
    """Every dim; sums and extrema. Of the cut dim, results of one row leave a sum."""
    dim = int(op.params["axis"])
    names = _letters(d != dim for d in range(len(op.shapes[0])))
    rows = factors(op, [names], [names] * len(op.results), moved=(0,))
    size, sizes = op.shapes[0][dim], [s[dim] for s in op.results]
    parts = tuple(_on_an_axis(op, n) if n > 1 else _whole(op, n) for n in sizes)
    partial = tuple(() if n > 1 else (0,) for n in sizes)
    sides = _cut_sides(_on_an_axis(op, size), parts, partial)
    if size > 1 and _worth(op, dim, *sides):
        outs: tuple[Signature, ...] = tuple(Split(dim) if n > 1 else P for n in sizes)
        reason = _taken_out(dim) if P in outs else ""
        rows.append(Row((Split(dim),), outs, reason=reason, owned=True))
    return rows


@cache
def _rev_sides(base: Extent) -> tuple[tuple[Side], tuple[Side]]:
    return (turned(base),), (needed(base),)


def _rev_ways(ctx: Local) -> dict[int, Route]:
    base = ctx.operands[0]
    gone = sorted(map(int, ctx.params["dimensions"]))
    return {d: route(*_rev_sides(extent(base, d))) for d in gone if base.axes(d)}


def _rev_local(ctx: Local, x: Any) -> list[Any]:
    """Every device turns its own rows, and sends them to where they stand then."""
    (x,) = ctx.bind(x)
    for d, way in _rev_ways(ctx).items():
        x = routed(ctx, [x], d, way)
    return [x]


def _rev_talks(ctx: Local) -> Iterable[Talk]:
    return talks(ctx, _rev_ways(ctx), ctx.operands[0].local, False)


@rule("rev", local=_rev_local, talks=_rev_talks, note=MOVED)
def rev(op: Op) -> list[Row]:
    """Every dim."""
    gone, (shape,) = tuple(map(int, op.params["dimensions"])), op.shapes
    names = _letters(d not in gone for d in range(len(shape)))
    rows = factors(op, [names], [names], moved=(0,))
    for d in gone:
        if shape[d] > 1 and _worth(op, d, *_rev_sides(_on_an_axis(op, shape[d]))):
            rows.append(Row((Split(d),), (Split(d),)))
    return rows
