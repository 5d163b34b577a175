"""Routes: how rows of one dim that is split come to the devices that need them, in few exchanges.

A result of a slice, a padding or a concatenation has the rows of its operands in other places. All rows stand
on one line; a device holds some runs of it and needs others. Which, follows from sizes and from its
coordinates alone, so all of it is worked out before tracing; a body looks up its own line. An example:
docs/communication.md.

A piece is what one device needs of another. One permute carries at most one piece from each device and to
each device; pieces are dealt out to permutes as edges of a bipartite graph are coloured, so that few are
enough.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from sbp.communication.extents import Coords, Extent, coordinates_along, own_entry, slice_rows
from sbp.communication.protocol import Communication, Context
from sbp.communication.route_sides import Side, SideRun
from sbp.compat import core
from sbp.compat.exact_keys import key_of

# A run of the line on one device: where it starts, its rows, the first one's row there, and whose it is.
_Holder: TypeAlias = tuple[int, int, int, Coords]

# So many exchanges, and one more per operand and result, are worth a program's size.
MOST_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class RoutePiece:
    """Some rows on their way: from `at` of what `source` holds to `to` of what `target` makes."""

    source: int
    target: int
    at: int
    to: int
    rows: int
    operand: int


class Take(NamedTuple):
    """What one device takes of a layer: `rows` rows, from row `at` of what it got to row `to` of its own."""

    at: int
    to: int
    rows: int


@dataclass(frozen=True, slots=True)
class Layer:
    """At most one piece for each device: one permute, or rows that stay on their device.

    Arguments:
      pairs: who sends to whom; none where the rows are already on the device.
      rows: how many are sent.
      sends: per device, the first row that it sends.
      takes: per device, what it puts in place of what it got.
      operand: the one that it is mostly about.
    """

    pairs: tuple[tuple[int, int], ...]
    rows: int
    sends: tuple[int, ...]
    takes: tuple[Take, ...]
    operand: int


@dataclass(frozen=True, slots=True)
class Route:
    """Everything that happens along one dim.

    Arguments:
      axes: the placement axes that tables run over, row-major.
      height: the rows that each device has at the end, of all results.
      layers: what is put in place, one after the other.
    """

    axes: tuple[int, ...]
    height: int
    layers: tuple[Layer, ...]

    @property
    def rounds(self) -> tuple[Layer, ...]:
        """The layers that are sent."""
        return tuple(x for x in self.layers if x.pairs)

    @property
    def sent_rows(self) -> int:
        """How many rows one device sends."""
        return sum(x.rows for x in self.rounds)


@cache
def find_route(operands: tuple[Side, ...], results: tuple[Side, ...]) -> Route:
    """How the results' rows come from the operands', which hold no row twice.

    >>> from sbp.communication.route_sides import operand_side, result_side
    >>> four = Extent(8, (0,), (4,))
    >>> seven = Extent(7, (0,), (4,))
    >>> [layer.pairs for layer in find_route((operand_side(four, 1),), (result_side(seven),)).rounds]
    [((1, 0), (2, 1), (3, 2))]
    """
    hierarchy = operands[0].extent.hierarchy
    axes = tuple(sorted({a for s in (*operands, *results) for a in s.extent.axes}))
    coords = coordinates_along(axes, hierarchy)
    rank = {at: i for i, at in enumerate(coords)}
    pieces: list[RoutePiece] = []
    real: list[list[tuple[int, int]]] = [[] for _ in coords]  # which of its own rows must be right at the end
    holders, first = _holders(operands), 0
    for made in results:
        need = dict(zip(coordinates_along(made.extent.axes, hierarchy), made.runs, strict=True))
        for i, at in enumerate(coords):
            run = need[_along(at, made.extent.axes)]
            low = first + run.at
            real[i].append((first, first + made.height) if made.partial else (low, low + run.rows))
            for source, row, to, rows, k in _pieces(operands, holders, at, run, made.partial):
                pieces.append(RoutePiece(rank[source], i, row, low + to, rows, k))
        first += made.height
    height = sum(s.height for s in operands)
    stay = _in_layers([p for p in pieces if p.source == p.target])
    sent = _in_layers([p for p in pieces if p.source != p.target])
    return Route(
        axes,
        first,
        (*(_local_layer(x, real) for x in stay), *(_sent_layer(x, real, height) for x in sent)),
    )


def _along(at: Coords, axes: Sequence[int]) -> Coords:
    """The coordinates along some axes; 0 along the others."""
    return tuple(c if a in axes else 0 for a, c in enumerate(at))


def _holders(operands: Sequence[Side]) -> list[list[_Holder]]:
    """Per operand, in the order of the line: where a run starts, its rows, the first one's row, and whose."""
    found, base = [], 0
    for side in operands:
        coords = coordinates_along(side.extent.axes, side.extent.hierarchy)
        runs = zip(side.runs, coords, strict=True)
        found.append(sorted((r.start, r.rows, base + r.at, at) for r, at in runs if r.rows > 0))
        base += side.height
    return found


def _pieces(
    operands: Sequence[Side],
    holders: Sequence[Sequence[_Holder]],
    at: Coords,
    run: SideRun,
    partial: Sequence[int],
) -> Iterator[tuple[Coords, int, int, int, int]]:
    """What a device needs for one run: whose, its row there, its place in the run, rows, operand."""
    for k, (side, line) in enumerate(zip(operands, holders, strict=True)):
        axes = side.extent.axes
        for i in range(max(0, bisect_right(line, (run.start, math.inf)) - 1), len(line)):
            start, rows, row, where = line[i]
            if start >= run.start + run.rows:
                break
            low, high = max(start, run.start), min(start + rows, run.start + run.rows)
            source = tuple(w if a in axes else c for a, (w, c) in enumerate(zip(where, at, strict=True)))
            if low < high and all(source[a] == at[a] for a in partial):
                yield source, row + low - start, low - run.start, high - low, k


def _in_layers(pieces: Iterable[RoutePiece]) -> list[list[RoutePiece]]:
    """Few groups in which no device sends or gets twice; pieces of one size and distance stay together.

    This is greedy edge colouring of a bipartite multigraph. König's theorem (1916) needs as many colours as a
    device has pieces at most; greedy takes less than twice that, and keeps pieces of a kind in one group,
    which counts more: every device of a group sends as many rows as its longest piece has.
    """
    groups: list[list[RoutePiece]] = []
    sources: list[set[int]] = []
    targets: list[set[int]] = []
    for p in sorted(pieces, key=lambda p: (-p.rows, p.target - p.source, p.operand, p.source, p.to)):
        free = (i for i in range(len(groups)) if p.source not in sources[i] and p.target not in targets[i])
        at = next(free, len(groups))
        if at == len(groups):
            groups.append([])
            sources.append(set())
            targets.append(set())
        groups[at].append(p)
        sources[at].add(p.source)
        targets[at].add(p.target)
    return groups


Spans: TypeAlias = Sequence[Sequence[tuple[int, int]]]


def _local_layer(group: Sequence[RoutePiece], real: Spans) -> Layer:
    """A layer of rows that are already on the device that needs them."""
    takes = {p.target: Take(p.at, p.to, p.rows) for p in group}
    return Layer((), 0, (0,) * len(real), _alike(takes, real), group[0].operand)


def _sent_layer(group: Sequence[RoutePiece], real: Spans, height: int) -> Layer:
    """A layer whose buffer is as long as the longest piece, and lies within what each device holds."""
    rows = max(p.rows for p in group)
    starts = {p.source: min(p.at, height - rows) for p in group}
    takes = {p.target: Take(p.at - starts[p.source], p.to, p.rows) for p in group}
    usual = Counter(starts.values()).most_common(1)[0][0]
    return Layer(
        tuple((p.source, p.target) for p in group),
        rows,
        tuple(starts.get(i, usual) for i in range(len(real))),
        _alike(takes, real),
        group[0].operand,
    )


def _alike(takes: Mapping[int, Take], real: Spans) -> tuple[Take, ...]:
    """What each device takes of a layer: what most do, also where that changes only padding of its own.

    A table whose lines are equal is a constant, and the layer a static slice.
    """
    usual = Counter(takes.values()).most_common(1)[0][0]
    low, high = usual.to, usual.to + usual.rows

    def of(i: int) -> Take:
        own = takes.get(i, Take(usual.at, usual.to, 0))
        # The usual take must bring the own rows to their places, and touch no other row that is real.
        covers = low <= own.to and own.to + own.rows <= high and own.at - own.to == usual.at - usual.to
        touched = sum(max(0, min(b, high) - max(a, low)) for a, b in real[i])
        return usual if touched == own.rows and covers else own

    return tuple(map(of, range(len(real))))


def route_pays(found: Route, operands: Sequence[Side], results: Sequence[Side]) -> bool:
    """Whether a route sends no more rows than gathering the operands would, in not many exchanges."""
    gathered = sum(s.extent.size - s.extent.local for s in operands)
    few = len(found.rounds) <= MOST_ROUNDS + len(operands) + len(results)
    return few and found.sent_rows <= gathered


def keep_every(ctx: Context, x: jax.Array, dim: int, base: Extent, start: int, step: int) -> jax.Array:
    """The rows of a shard that a slice keeps, one after the other; behind them stands anything."""
    if step == 1:
        return x
    count = -(-base.local // step)
    phases = [(start - base.offset(at)) % step for at in coordinates_along(base.axes, base.hierarchy)]
    widths = [(0, count * step - base.local, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    x = lax.pad(x, jnp.zeros((), x.dtype), widths)
    x = slice_rows(x, own_entry(ctx, base.axes, phases), (count - 1) * step + 1, dim)
    return lax.slice_in_dim(x, 0, None, step, dim)


def along_route(
    ctx: Context, xs: Sequence[jax.Array], dim: int, way: Route, fill: ArrayLike | None = None
) -> jax.Array:
    """The rows of all results, one result after the other, along `dim`.

    Arguments:
      xs: the shards of the operands.
      fill: what stands where no operand has a row; None for anything.
    """
    wide = xs[0] if len(xs) == 1 else lax.concatenate(list(xs), dim)
    zero = jnp.asarray(0 if fill is None else fill, wide.dtype)
    out = None
    for layer in way.layers:
        got = _received(ctx, wide, dim, way, layer) if layer.pairs else wide
        out = _placed(ctx, out, got, dim, way, layer, zero, fill is not None)
    if out is None:
        out = jnp.broadcast_to(zero, tuple(way.height if d == dim else n for d, n in enumerate(wide.shape)))
    return out


def _received(ctx: Context, wide: jax.Array, dim: int, way: Route, layer: Layer) -> jax.Array:
    """The piece that a layer brings to this device."""
    piece = slice_rows(wide, own_entry(ctx, way.axes, layer.sends), layer.rows, dim)
    return ctx.permute(piece, way.axes, layer.pairs)


def _placed(
    ctx: Context,
    out: jax.Array | None,
    got: jax.Array,
    dim: int,
    way: Route,
    layer: Layer,
    zero: jax.Array,
    filled: bool,
) -> jax.Array:
    """`out` with one piece in its place.

    Where devices put it in different places, the piece gets room all around, and each slices it out so that
    its own rows come to lie where they belong: one dynamic slice and a mask, instead of a dynamic update.
    """
    if len(set(layer.takes)) == 1:
        start, low, count = layer.takes[0]
        piece = lax.slice_in_dim(got, start, start + count, axis=dim)
        if out is not None:
            return lax.dynamic_update_slice_in_dim(out, piece, low, dim)
        return lax.pad(piece, zero, _widths(got.ndim, dim, low, way.height - low - count))
    at, to, rows = (own_entry(ctx, way.axes, column) for column in zip(*layer.takes, strict=True))
    around = lax.pad(got, zero, _widths(got.ndim, dim, way.height, way.height))
    piece = slice_rows(around, at - to + np.int32(way.height), way.height, dim)
    if out is None and not filled:
        return piece
    here = lax.broadcasted_iota(np.int32, piece.shape, dim)
    return jnp.where((here >= to) & (here < to + rows), piece, zero if out is None else out)


def _widths(ndim: int, dim: int, low: int, high: int) -> list[tuple[int, int, int]]:
    """What `lax.pad` takes, to pad one dim."""
    return [(low, high, 0) if d == dim else (0, 0, 0) for d in range(ndim)]


def route_communication(
    ctx: Context, ways: Mapping[int, Route], shape: Sequence[int], plain: bool
) -> Iterable[Communication]:
    """The exchanges along each dim, one after the other: the later ones are as wide as the earlier made them.

    Arguments:
      ways: by dim.
      shape: of a shard before the first one.
      plain: whether the first one sends rows of the only operand as they lie: other ops may send the same.
    """
    local, itemsize = list(shape), core.itemsize(ctx.dtypes[0])
    op = (ctx.primitive.name, key_of(ctx.params)) if len(ctx.operands) == 1 else None
    for dim, way in ways.items():
        local[dim] = 1
        row = math.prod(local) * itemsize
        for layer in way.rounds:
            rows = dim, layer.pairs, layer.rows, layer.sends
            sent: Hashable = rows if plain else op and (op, rows)
            yield Communication(
                "permute", way.axes, layer.rows * row, layer.operand, _reason(dim, layer), sent
            )
        local[dim], plain = way.height, False


def _reason(dim: int, layer: Layer) -> str:
    """For instance `rows of dim 1 move, and 1 row of the device before is needed; it is split over 'x'`."""
    distances = {target - source for source, target in layer.pairs}
    by = distances.pop()
    far = f"{abs(by)} places " if abs(by) > 1 else ""
    whose = "another device" if distances else f"the device {far}{'before' if by > 0 else 'after'}"
    some = f"{layer.rows} rows of {whose} are" if layer.rows > 1 else f"1 row of {whose} is"
    return f"rows of dim {dim} move, and {some} needed; it is split over {{axes}}"
