"""Bodies of gather and scatter: a device reads and changes the rows that it has, and no others.

They send nothing themselves. With a split looked-up dim a gather leaves a sum, in which one device has a row
and the others zeros; whole rows of a table go by the sparse exchange instead (`sbp.communication.lookups`,
docs/communication.md).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode
from jax.typing import ArrayLike
from numpy.typing import NDArray

from sbp.communication.protocol import Context
from sbp.compat.untyped import DType, iinfo, optimization_barrier
from sbp.layout import Layout

FILL, CLIP = GatherScatterMode.FILL_OR_DROP, GatherScatterMode.CLIP


def window_dims(operand: int, removed: Sequence[int]) -> list[int]:
    """The operand dims that appear as window dims, in order."""
    return [d for d in range(operand) if d not in removed]


def _owned_rows(
    ctx: Context, index: jax.Array, layout: Layout, dims: Sequence[int], index_map: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """Indices made local along the split looked-up `dims`, and which of them this device owns."""
    mine = jnp.ones(index.shape[:-1], bool)
    columns = [index[..., c] for c in range(len(index_map))]
    for d in dims:
        c = list(index_map).index(d)
        at = columns[c] - ctx.offset(layout, d).astype(index.dtype)
        mine &= (at >= 0) & (at < ctx.length(layout, d).astype(index.dtype))
        columns[c] = at
    return jnp.stack(columns, axis=-1), mine


def signed_index(index: jax.Array) -> jax.Array:
    """Indices in a signed type that holds every position; huge unsigned ones stay out of bounds."""
    if not jnp.issubdtype(index.dtype, jnp.unsignedinteger):
        return index if index.dtype.itemsize >= 4 else index.astype(np.int32)
    if index.dtype.itemsize < 4:
        return index.astype(np.int32)
    signed = np.dtype(f"int{8 * index.dtype.itemsize}")
    return jnp.minimum(index, np.asarray(np.iinfo(signed).max, index.dtype)).astype(signed)


def _split_lookups(layout: Layout, dn_map: Sequence[int], removed: Sequence[int]) -> list[int]:
    """The looked-up dims that are split."""
    return [d for d in dn_map if d in removed and layout.axes(d)]


def gather_local(ctx: Context, x: jax.Array, index: jax.Array) -> list[jax.Array]:
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
    index = signed_index(index)
    legal = _legal(index, layout, dn.start_index_map, ctx.params["slice_sizes"])
    if not fills:
        index = _clamped(index, layout, dn.start_index_map, ctx.params["slice_sizes"])
    local, mine = _owned_rows(ctx, index, layout, dims, dn.start_index_map)
    for c, d in enumerate(dn.start_index_map):
        if d in dims:
            local = local.at[..., c].set(jnp.clip(local[..., c], 0, x.shape[d] - 1))
    (rows,) = ctx.bind(x, local, slice_sizes=sizes, mode=CLIP, fill_value=None)
    zero = jnp.zeros((), rows.dtype)
    rows = jnp.where(_per_window(mine, rows, dn.offset_dims), rows, zero)
    if not fills:
        return [rows]
    axes = sorted({*sums, *(a for d in dims for a in layout.axes(d))})
    missing = jnp.where(ctx.is_first(axes), missing_value(ctx.params["fill_value"], rows.dtype), zero)
    return [jnp.where(_per_window(legal, rows, dn.offset_dims), rows, missing)]


def missing_value(value: ArrayLike | None, dtype: DType) -> jax.Array:
    """What `mode="fill"` puts for an index out of bounds (JAX: NaN, or the extreme integer)."""
    if value is not None:
        return jnp.asarray(value, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(np.nan, dtype)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return jnp.asarray(iinfo(dtype).min, dtype)
    return jnp.asarray(True if dtype == bool else iinfo(dtype).max, dtype)


def _limits(layout: Layout, index_map: Sequence[int], sizes: Sequence[int], dtype: DType) -> NDArray[Any]:
    """The largest index along each indexed dim whose window is in bounds."""
    return np.array([layout.shape[d] - sizes[d] for d in index_map], dtype)


def _legal(index: jax.Array, layout: Layout, index_map: Sequence[int], sizes: Sequence[int]) -> jax.Array:
    """Which index vectors are in bounds, logically."""
    return jnp.all((index >= 0) & (index <= _limits(layout, index_map, sizes, index.dtype)), axis=-1)


def _clamped(index: jax.Array, layout: Layout, index_map: Sequence[int], sizes: Sequence[int]) -> jax.Array:
    """Index vectors moved to the nearest whose window is in bounds."""
    return jnp.clip(index, 0, _limits(layout, index_map, sizes, index.dtype))


def _per_window(flag: jax.Array, rows: jax.Array, offset_dims: Sequence[int]) -> jax.Array:
    """A flag per index vector, shaped to select among `rows`."""
    return lax.broadcast_in_dim(flag, rows.shape, [d for d in range(rows.ndim) if d not in offset_dims])


def scatter_local(ctx: Context, x: jax.Array, index: jax.Array, updates: jax.Array) -> list[jax.Array]:
    """Padded updates are dropped; with a split looked-up dim every device keeps the updates of its rows.

    Where JAX was promised indices in bounds XLA drops the others, as `mode="drop"` does.
    """
    dn, layout = ctx.params["dimension_numbers"], ctx.operands[0]
    dims = _split_lookups(layout, dn.scatter_dims_to_operand_dims, dn.inserted_window_dims)
    padded = [i for i in range(index.ndim - 1) if ctx.operands[1].has_padding(i)]
    if not dims and not padded:
        return ctx.bind(x, index, updates)
    index_map = list(dn.scatter_dims_to_operand_dims)
    index, windows = signed_index(index), _update_sizes(ctx)
    keep = jnp.ones(index.shape[:-1], bool)
    if GatherScatterMode.from_any(ctx.params["mode"]) == CLIP:
        index = _clamped(index, layout, index_map, windows)
    for i in padded:
        keep &= lax.broadcasted_iota(np.int32, keep.shape, i) < ctx.length(ctx.operands[1], i)
    if dims:
        keep &= _legal(index, layout, index_map, windows)
        index, mine = _owned_rows(ctx, index, layout, dims, index_map)
        keep &= mine
        # XLA of jax 0.10 reads through the slice that made a shard, without clamping to the shard first.
        x = optimization_barrier(x)
    index = jnp.where(keep[..., None], index, iinfo(index.dtype).max)
    return ctx.bind(x, index, updates, mode=FILL, indices_are_sorted=False, unique_indices=False)


def _update_sizes(ctx: Context) -> list[int]:
    """The logical window size along every operand dim."""
    dn = ctx.params["dimension_numbers"]
    sizes = [1] * len(ctx.operands[0].shape)
    window = window_dims(len(sizes), (*dn.inserted_window_dims, *dn.operand_batching_dims))
    for d, at in zip(window, dn.update_window_dims, strict=True):
        sizes[d] = ctx.operands[2].shape[at]
    return sizes
