"""Bodies of slices, paddings, concatenations, splits and reversals: rows that move along a dim by a route.

Each op has its sides (the rows that every device holds and needs, see `sbp.communication.route_sides`), a
body, and what the body sends. The rules ask the sides too: whether a route is worth it
decides whether a dim may be split. docs/communication.md has an example.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp.communication.extents import Extent, coordinates_along, extent, own_entry, slice_rows
from sbp.communication.protocol import Communication, Context
from sbp.communication.route import Route, along_route, find_route, keep_every, route_communication
from sbp.communication.route_sides import Side, SideRun, held_reversed, operand_side, result_side
from sbp.layout import Layout


def _sum_axes(operand: Layout, result: Layout, dim: int) -> tuple[int, ...]:
    """The axes that split `dim` of the operand, and along which the result is a sum."""
    return tuple(a for a in operand.axes(dim) if a in result.partial_axes("sum"))


def slice_of(params: Mapping[str, Any], dim: int) -> tuple[int, int]:
    """Where a slice starts along a dim, and its stride."""
    return int(params["start_indices"][dim]), int((params["strides"] or (1,) * (dim + 1))[dim])


@cache
def slice_sides(
    base: Extent, out: Extent, start: int, step: int, partial: tuple[int, ...] = ()
) -> tuple[tuple[Side], tuple[Side]]:
    """What devices hold of the operand, and need of the result, which is a sum along `partial`."""
    return (operand_side(base, start, step),), (result_side(out, 0, partial),)


def _slice_routes(ctx: Context) -> dict[int, Route]:
    """The dims that are cut and split, each with its route."""
    (base,), (out,) = ctx.operands, ctx.results
    found = {}
    for d, (n, m) in enumerate(zip(base.shape, out.shape, strict=True)):
        if n != m and base.axes(d):
            partial = _sum_axes(base, out, d)
            sides = slice_sides(extent(base, d), extent(out, d), *slice_of(ctx.params, d), partial)
            found[d] = find_route(*sides)
    return found


def slice_local(ctx: Context, x: jax.Array) -> list[jax.Array]:
    """Dims that are not split first; one that is taken whole keeps its local size."""
    (base,), (out,), ways = ctx.operands, ctx.results, _slice_routes(ctx)
    starts, limits, strides = [], [], []
    for d, (n, m) in enumerate(zip(base.shape, out.shape, strict=True)):
        start, step = slice_of(ctx.params, d)
        kept = n == m or d in ways
        starts.append(0 if kept else start)
        limits.append(x.shape[d] if kept else ctx.params["limit_indices"][d])
        strides.append(1 if kept else step)
    x = lax.slice(x, starts, limits, strides)
    for d, way in ways.items():
        x = keep_every(ctx, x, d, extent(base, d), *slice_of(ctx.params, d))
        fill = 0 if _sum_axes(base, out, d) else None
        x = along_route(ctx, [x], d, way, fill)
    return [x]


def slice_communication(ctx: Context) -> Iterable[Communication]:
    """What `slice_local` sends."""
    (base,), (out,), ways = ctx.operands, ctx.results, _slice_routes(ctx)
    shape = [n if d in ways else m for d, (n, m) in enumerate(zip(base.local, out.local, strict=True))]
    plain = tuple(shape) == base.local and all(slice_of(ctx.params, d)[1] == 1 for d in ways)
    return route_communication(ctx, ways, shape, plain)


@dataclass(frozen=True, slots=True)
class _Padding:
    """How devices pad a dim that is split.

    Arguments:
      way: brings it the rows that it pads.
      widths: what it pads them by, with what between them.
      skips: per device, how many of the padded rows come before its own.
    """

    way: Route
    widths: tuple[int, int, int]
    skips: tuple[int, ...]


@cache
def pad_sides(base: Extent, out: Extent, low: int, between: int) -> tuple[Side, Side, tuple[int, ...]]:
    """Both sides, and how far in front of its first row of the operand each device starts."""
    b, runs, phases = between + 1, [], []
    for at in coordinates_along(out.axes, out.hierarchy):
        first, valid = out.offset(at) - low, out.valid(at)
        start, last = -(-first // b), (first + valid - 1) // b
        runs.append(SideRun(start, last - start + 1 if valid else 0))
        phases.append(-first % b)
    height = max(0, -(-(out.local - min(phases)) // b))
    return operand_side(base), Side(out, tuple(runs), height), tuple(phases)


@cache
def _padding(base: Extent, out: Extent, low: int, between: int) -> _Padding:
    """All devices pad by the largest phase, and skip what that is more than their own."""
    source, target, phases = pad_sides(base, out, low, between)
    most = max(phases)
    length = most - min(phases) + out.local
    used = (target.height - 1) * (between + 1) + 1 if target.height else 0
    return _Padding(
        find_route((source,), (target,)),
        (most, max(0, length - most - used), between),
        tuple(most - p for p in phases),
    )


def _paddings(ctx: Context) -> dict[int, _Padding]:
    """The dims that are padded and split."""
    base, out = ctx.operands[0], ctx.results[0]
    return {
        d: _padding(extent(base, d), extent(out, d), int(low), int(between))
        for d, (low, high, between) in enumerate(ctx.params["padding_config"])
        if (low or high or between) and (base.axes(d) or out.axes(d))
    }


def _nothing_left(ctx: Context) -> bool:
    """Whether negative paddings cut the whole operand away."""
    sizes = zip(ctx.params["padding_config"], ctx.operands[0].shape, ctx.results[0].shape, strict=True)
    for (low, _, between), n, m in sizes:
        first = max(0, -(low // (between + 1)))
        if first >= n or low + first * (between + 1) >= m:
            return True
    return False


def pad_local(ctx: Context, x: jax.Array, value: jax.Array) -> list[jax.Array]:
    """The rows that a device pads come to it; then it pads them."""
    if _nothing_left(ctx):
        return [jnp.broadcast_to(value, ctx.results[0].local)]
    paddings = _paddings(ctx)
    widths = [(int(a), int(b), int(c)) for a, b, c in ctx.params["padding_config"]]
    for d, p in paddings.items():
        x, widths[d] = along_route(ctx, [x], d, p.way, value), p.widths
    x = lax.pad(x, value, widths)
    for d, p in paddings.items():
        x = slice_rows(x, own_entry(ctx, p.way.axes, p.skips), ctx.results[0].local[d], d)
    return [x]


def pad_communication(ctx: Context) -> Iterable[Communication]:
    """What `pad_local` sends."""
    ways = {} if _nothing_left(ctx) else {d: p.way for d, p in _paddings(ctx).items()}
    return route_communication(ctx, ways, ctx.operands[0].local, True)


@cache
def joined_sides(parts: tuple[Extent, ...], out: Extent) -> tuple[tuple[Side, ...], tuple[Side]]:
    """The operands of a concatenation one after the other on the line, and the whole line."""
    ends = np.cumsum([0, *(p.size for p in parts)])
    return tuple(operand_side(p, -int(e)) for p, e in zip(parts, ends[:-1], strict=True)), (result_side(out),)


def _joined_route(ctx: Context) -> Route | None:
    """The route of a concatenation; None if the joined dim is whole."""
    dim = int(ctx.params["dimension"])
    if not ctx.results[0].axes(dim):
        return None
    return find_route(*joined_sides(tuple(extent(x, dim) for x in ctx.operands), extent(ctx.results[0], dim)))


def concatenate_local(ctx: Context, *xs: jax.Array) -> list[jax.Array]:
    """The rows of all operands along one route, or each device's own, where the dim is whole."""
    way = _joined_route(ctx)
    return ctx.bind(*xs) if way is None else [along_route(ctx, xs, int(ctx.params["dimension"]), way)]


def concatenate_communication(ctx: Context) -> Iterable[Communication]:
    """What `concatenate_local` sends."""
    way, dim = _joined_route(ctx), int(ctx.params["dimension"])
    return route_communication(ctx, {} if way is None else {dim: way}, ctx.results[0].local, False)


@cache
def split_sides(
    base: Extent, parts: tuple[Extent, ...], partial: tuple[tuple[int, ...], ...]
) -> tuple[tuple[Side], tuple[Side, ...]]:
    """The operand of a split, and its results one after the other on the line, sums along `partial` each."""
    ends = np.cumsum([0, *(p.size for p in parts)])
    each = zip(parts, ends[:-1], partial, strict=True)
    return (operand_side(base),), tuple(result_side(part, int(end), axes) for part, end, axes in each)


def _split_route(ctx: Context) -> Route | None:
    """The route of a split; None if the cut dim is whole."""
    dim, base = int(ctx.params["axis"]), ctx.operands[0]
    if not base.axes(dim):
        return None
    partial = tuple(_sum_axes(base, r, dim) for r in ctx.results)
    return find_route(*split_sides(extent(base, dim), tuple(extent(r, dim) for r in ctx.results), partial))


def split_local(ctx: Context, x: jax.Array) -> list[jax.Array]:
    """The rows of all results along one route; then each device cuts what it has."""
    way, dim = _split_route(ctx), int(ctx.params["axis"])
    if way is None:
        return ctx.bind(x)
    sums = any(_sum_axes(ctx.operands[0], r, dim) for r in ctx.results)
    x = along_route(ctx, [x], dim, way, 0 if sums else None)
    return ctx.bind(x, sizes=tuple(r.local[dim] for r in ctx.results))


def split_communication(ctx: Context) -> Iterable[Communication]:
    """What `split_local` sends."""
    way = _split_route(ctx)
    dim = int(ctx.params["axis"])
    return route_communication(ctx, {} if way is None else {dim: way}, ctx.operands[0].local, True)


@cache
def reversed_sides(base: Extent) -> tuple[tuple[Side], tuple[Side]]:
    """A dim from behind, and from the front."""
    return (held_reversed(base),), (result_side(base),)


def _reversed_routes(ctx: Context) -> dict[int, Route]:
    """The dims that are turned and split, each with its route."""
    base = ctx.operands[0]
    gone = sorted(map(int, ctx.params["dimensions"]))
    return {d: find_route(*reversed_sides(extent(base, d))) for d in gone if base.axes(d)}


def rev_local(ctx: Context, x: jax.Array) -> list[jax.Array]:
    """Every device turns its own rows, and sends them to where they stand then."""
    (x,) = ctx.bind(x)
    for d, way in _reversed_routes(ctx).items():
        x = along_route(ctx, [x], d, way)
    return [x]


def rev_communication(ctx: Context) -> Iterable[Communication]:
    """What `rev_local` sends."""
    return route_communication(ctx, _reversed_routes(ctx), ctx.operands[0].local, False)
