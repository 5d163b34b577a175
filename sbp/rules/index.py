"""Gather and scatter: embeddings, label picking, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from sbp.layout import Layout
from sbp.limits import integer_limits
from sbp.rules.entry import Op, Row, Shape, row_traffic
from sbp.rules.factors import Letters, additive_row, monotone_rows, moved_rows, split_rows
from sbp.rules.registry import rule
from sbp.signature import B, P, Partial, Signature, Split
from sbp.talk.local import Local, barrier

Pairs: TypeAlias = Sequence[tuple[int, int]]

FILL, CLIP = GatherScatterMode.FILL_OR_DROP, GatherScatterMode.CLIP


def _window_dims(operand: int, removed: Sequence[int]) -> list[int]:
    """The operand dims that appear as window dims, in order."""
    return [d for d in range(operand) if d not in removed]


def _letters(
    shapes: tuple[Shape, Shape, Shape],
    batching: Pairs,
    removed: Sequence[int],
    window: Sequence[int],
    indexed: Sequence[int],
) -> tuple[Letters, Letters, Letters]:
    """Letters of operand, indices and windows: w* dims taken whole, i* index dims, j* batching dims.

    Arguments:
      shapes: of operand, indices, and windows: the gathered result, or the updates of a scatter.
      batching: pairs of an operand dim and an index dim.
      removed: operand dims that the windows do not have.
      window: where the others stand in the windows.
      indexed: operand dims that the index vectors address.
    """
    operand, indices, windows = shapes
    one: list[str | None] = [None] * len(operand)
    two: list[str | None] = [None] * len(indices)
    for k, (d, i) in enumerate(batching):
        one[d] = two[i] = f"j{k}"
    two[:-1] = [name or f"i{i}" for i, name in enumerate(two[:-1])]
    three: list[str | None] = [None] * len(windows)
    for d, at in zip(_window_dims(len(operand), removed), window, strict=True):
        if d not in indexed and operand[d] == windows[at]:
            one[d] = three[at] = f"w{d}"
    batch = iter(two[:-1])
    for at in range(len(windows)):
        if at not in window:
            three[at] = next(batch)
    return tuple(one), tuple(two), tuple(three)


def _gather_letters(op: Op) -> tuple[Letters, Letters, Letters]:
    """Letters of operand, indices and result."""
    dn = op.params["dimension_numbers"]
    batching = list(zip(dn.operand_batching_dims, dn.start_indices_batching_dims, strict=True))
    removed = (*dn.collapsed_slice_dims, *dn.operand_batching_dims)
    shapes = op.shapes[0], op.shapes[1], op.results[0]
    return _letters(shapes, batching, removed, dn.offset_dims, dn.start_index_map)


def _lookup_dims(op: Op, dn: Any, index_map: Sequence[int], removed: Sequence[int]) -> list[int]:
    """Operand dims that are indexed one row at a time: they may be split, each device serving its rows."""
    return [int(d) for d in index_map if d in removed and op.shapes[0][d] > 1]


@rule(
    "gather",
    local=lambda ctx, x, i: _gather_local(ctx, x, i),
    flops=lambda op: math.prod(op.results[0]),
    traffic=row_traffic(),
)
def gather(op: Op) -> list[Row]:
    """Index, whole window and batching dims split; a looked-up one leaves a sum; sums and extrema pass."""
    dn = op.params["dimension_numbers"]
    operand, indices, result = _gather_letters(op)
    sizes = _sizes([operand, indices, result], [op.shapes[0], op.shapes[1], op.results[0]])
    rows = list(split_rows([operand, indices], [result], sizes, {}))
    rows += [Row((P, B), (P,), moves=True), *monotone_rows(2, 1, 0, increasing=True)]
    for d in _lookup_dims(op, dn, dn.start_index_map, dn.collapsed_slice_dims):
        why = f"rows of dim {d} of operand 0 are looked up here, and it is split over {{axes}}"
        rows.append(Row((Split(d), B), (P,), reason=why, owned=True))
    return rows


def _sizes(letters: Sequence[Letters], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    out: dict[str, int] = {}
    for names, shape in zip(letters, shapes, strict=True):
        out.update({n: s for n, s in zip(names, shape, strict=True) if n is not None})
    return out


def _owned(
    ctx: Local, index: Any, layout: Layout, dims: Sequence[int], index_map: Sequence[int]
) -> tuple[Any, Any]:
    """Indices made local along the split looked-up `dims`, and which of them this device owns."""
    mine: Any = jnp.ones(index.shape[:-1], bool)
    columns = [index[..., c] for c in range(len(index_map))]
    for d in dims:
        c = list(index_map).index(d)
        at = columns[c] - ctx.offset(layout, d).astype(index.dtype)
        mine &= (at >= 0) & (at < ctx.length(layout, d).astype(index.dtype))
        columns[c] = at
    return jnp.stack(columns, axis=-1), mine


def _signed(index: Any) -> Any:
    """Indices in a signed type that holds every position; huge unsigned ones stay out of bounds."""
    if not jnp.issubdtype(index.dtype, jnp.unsignedinteger):
        return index if index.dtype.itemsize >= 4 else index.astype(np.int32)
    if index.dtype.itemsize < 4:
        return index.astype(np.int32)
    signed = np.dtype(f"int{8 * index.dtype.itemsize}")
    return jnp.minimum(index, np.asarray(np.iinfo(signed).max, index.dtype)).astype(signed)


def _split_lookups(layout: Layout, dn_map: Sequence[int], removed: Sequence[int]) -> list[int]:
    return [d for d in dn_map if d in removed and layout.axes(d)]


def _gather_local(ctx: Local, x: Any, index: Any) -> list[Any]:
    """Local window sizes; with a split looked-up dim every device gives its rows and zeros for the others'.

    Indices that JAX was promised to be in bounds are clamped as XLA clamps them, so that a broken promise
    gives what one device gives. What fills the place of missing rows is given once, not by every device.
    """
    dn, layout = ctx.params["dimension_numbers"], ctx.operands[0]
    sizes = tuple(
        x.shape[d] if layout.axes(d) and d not in (*dn.collapsed_slice_dims, *dn.operand_batching_dims) else n
        for d, n in enumerate(ctx.params["slice_sizes"])
    )
    dims = _split_lookups(layout, dn.start_index_map, dn.collapsed_slice_dims)
    fills = GatherScatterMode.from_any(ctx.params["mode"]) == FILL
    sums = layout.partial_axes("sum") if fills else ()
    if not dims and not sums:
        return ctx.bind(x, index, slice_sizes=sizes)
    index = _signed(index)
    legal = _legal(index, layout, dn.start_index_map, ctx.params["slice_sizes"])
    if not fills:
        index = _clamped(index, layout, dn.start_index_map, ctx.params["slice_sizes"])
    local, mine = _owned(ctx, index, layout, dims, dn.start_index_map)
    for c, d in enumerate(dn.start_index_map):
        if d in dims:
            local = local.at[..., c].set(jnp.clip(local[..., c], 0, x.shape[d] - 1))
    (rows,) = ctx.bind(x, local, slice_sizes=sizes, mode=CLIP, fill_value=None)
    zero = jnp.zeros((), rows.dtype)
    rows = jnp.where(_beside(mine, rows, dn.offset_dims), rows, zero)
    if not fills:
        return [rows]
    axes = sorted({*sums, *(a for d in dims for a in layout.axes(d))})
    missing = jnp.where(ctx.first(axes), _fill_value(ctx.params["fill_value"], rows.dtype), zero)
    return [jnp.where(_beside(legal, rows, dn.offset_dims), rows, missing)]


def _fill_value(value: Any, dtype: Any) -> Any:
    """What `mode="fill"` puts for an index out of bounds (JAX: NaN, or the extreme integer)."""
    if value is not None:
        return jnp.asarray(value, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(np.nan, dtype)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return jnp.asarray(integer_limits(dtype).min, dtype)
    return jnp.asarray(True if dtype == bool else integer_limits(dtype).max, dtype)


def _limits(layout: Layout, index_map: Sequence[int], sizes: Sequence[int], dtype: Any) -> Any:
    return np.array([layout.shape[d] - sizes[d] for d in index_map], dtype)


def _legal(index: Any, layout: Layout, index_map: Sequence[int], sizes: Sequence[int]) -> Any:
    """Which index vectors are in bounds, logically."""
    limits = _limits(layout, index_map, sizes, index.dtype)
    return jnp.all((index >= 0) & (index <= limits), axis=-1)


def _clamped(index: Any, layout: Layout, index_map: Sequence[int], sizes: Sequence[int]) -> Any:
    return jnp.clip(index, 0, _limits(layout, index_map, sizes, index.dtype))


def _beside(flag: Any, rows: Any, offset_dims: Sequence[int]) -> Any:
    """A flag per index vector, shaped to select among `rows`."""
    batch = [d for d in range(rows.ndim) if d not in offset_dims]
    return lax.broadcast_in_dim(flag, rows.shape, batch)


def _scatter_letters(op: Op) -> tuple[Letters, Letters, Letters]:
    """Letters of operand, indices and updates."""
    dn = op.params["dimension_numbers"]
    batching = list(zip(dn.operand_batching_dims, dn.scatter_indices_batching_dims, strict=True))
    removed = (*dn.inserted_window_dims, *dn.operand_batching_dims)
    shapes = op.shapes[0], op.shapes[1], op.shapes[2]
    return _letters(shapes, batching, removed, dn.update_window_dims, dn.scatter_dims_to_operand_dims)


def _scatter_local(ctx: Local, x: Any, index: Any, updates: Any) -> list[Any]:
    """Padded updates are dropped; with a split looked-up dim every device keeps the updates of its rows.

    Where JAX was promised indices in bounds XLA drops the others, as `mode="drop"` does.
    """
    dn, layout = ctx.params["dimension_numbers"], ctx.operands[0]
    dims = _split_lookups(layout, dn.scatter_dims_to_operand_dims, dn.inserted_window_dims)
    padded = [i for i in range(index.ndim - 1) if ctx.operands[1].padded(i)]
    if not dims and not padded:
        return ctx.bind(x, index, updates)
    index_map = list(dn.scatter_dims_to_operand_dims)
    index, windows = _signed(index), _update_sizes(ctx)
    keep = jnp.ones(index.shape[:-1], bool)
    if GatherScatterMode.from_any(ctx.params["mode"]) == CLIP:
        index = _clamped(index, layout, index_map, windows)
    for i in padded:
        keep &= lax.broadcasted_iota(np.int32, keep.shape, i) < ctx.length(ctx.operands[1], i)
    if dims:
        keep &= _legal(index, layout, index_map, windows)
        index, mine = _owned(ctx, index, layout, dims, index_map)
        keep &= mine
        # XLA of jax 0.10 reads through the slice that made a shard, without clamping to the shard first.
        x = barrier(x)
    index = jnp.where(keep[..., None], index, integer_limits(index.dtype).max)
    return ctx.bind(x, index, updates, mode=FILL, indices_are_sorted=False, unique_indices=False)


def _update_sizes(ctx: Local) -> list[int]:
    """The logical window size along every operand dim."""
    dn = ctx.params["dimension_numbers"]
    sizes = [1] * len(ctx.operands[0].shape)
    window = _window_dims(len(sizes), (*dn.inserted_window_dims, *dn.operand_batching_dims))
    for d, at in zip(window, dn.update_window_dims, strict=True):
        sizes[d] = ctx.operands[2].shape[at]
    return sizes


def _scatter_rows(op: Op) -> list[Row]:
    """Splits that hold for every scatter: whole window dims, batching dims, and the looked-up rows."""
    dn = op.params["dimension_numbers"]
    operand, indices, updates = _scatter_letters(op)
    sizes = _sizes([operand, indices, updates], op.shapes)
    kept = {n: s for n, s in sizes.items() if n in operand}
    rows = list(split_rows([operand, indices, updates], [operand], kept, {}))
    for d in _lookup_dims(op, dn, dn.scatter_dims_to_operand_dims, dn.inserted_window_dims):
        rows.append(Row((Split(d), B, B), (Split(d),)))
    return rows


def _split_updates(op: Op, partial: Partial, verb: str) -> list[Row]:
    """Updates split by index: every device's part meets in a partial result.

    A sum must have the operand once; to an extremum it may be given on every device.
    """
    rows: list[Row] = []
    befores: tuple[Signature, ...] = (partial,) if partial == P else (B, partial)
    _, indices, updates = _scatter_letters(op)
    for i, name in enumerate(indices):
        if name is not None and name[0] == "i" and op.shapes[1][i] > 1:
            why = f"dim {i} of the indices is {verb} here and split over {{axes}}"
            fills = (0,) if partial == P else ()
            ins = (Split(i), Split(updates.index(name)))
            rows += [Row((before, *ins), (partial,), fills, why) for before in befores]
    return rows


def _two_per_row(op: Op) -> float:
    return 2.0 * math.prod(op.shapes[2])


# What is done where updates meet stands in the names, but for "scatter".
_scattering = partial(
    rule, local=_scatter_local, flops=_two_per_row, traffic=row_traffic(2), functions=("update_jaxpr",)
)


@_scattering("scatter-add")
def scatter_add(op: Op) -> list[Row]:
    """As every scatter; additive; updates split by index leave a sum."""
    return [*_scatter_rows(op), additive_row(3, 1, (0, 2)), *_split_updates(op, P, "added up")]


@_scattering("scatter-sub")
def scatter_sub(op: Op) -> list[Row]:
    """As every scatter; additive; updates split by index leave a sum."""
    return [*_scatter_rows(op), additive_row(3, 1, (0, 2)), *_split_updates(op, P, "subtracted")]


@_scattering("scatter-mul")
def scatter_mul(op: Op) -> list[Row]:
    """As every scatter; linear in the operand."""
    return [*_scatter_rows(op), Row((P, B, B), (P,), multiplies=True)]


@_scattering("scatter-min", "scatter-max")
def scatter_extremum(op: Op) -> list[Row]:
    """As every scatter; extrema of extrema pass; updates split by index leave an extremum."""
    partial = Partial(op.name.removeprefix("scatter-"))
    both: list[tuple[Signature, Signature]] = [(partial, B), (B, partial), (partial, partial)]
    rows = [Row((operand, B, updates), (partial,)) for operand, updates in both]
    return [*_scatter_rows(op), *rows, *_split_updates(op, partial, "compared")]


@_scattering("scatter")
def scatter(op: Op) -> list[Row]:
    """As every scatter; sums and extrema where no two updates meet: which of them wins is not defined.

    With a function of the user's (`x.at[i].apply(f)`) the rows that it changes are computed, not moved.
    """
    rows = _scatter_rows(op)
    moves = op.params["unique_indices"] and op.params["update_jaxpr"] is None
    return [*rows, *moved_rows(3, 1, (0, 2))] if moves else rows
