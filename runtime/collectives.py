"""Boxing moves on one device: each becomes one `jax.lax` collective, or a local step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import compat
from sbp.layout import chunk_sizes, local_shape
from sbp.limits import identity_of
from sbp.passes.boxing.moves import Move, find_permutation, frame
from sbp.signature import Partial, Split
from sbp.talk import bits
from sbp.talk.local import barrier


def explode(x: Any, dim: int, groups: Sequence[int], fill: Any = 0) -> Any:
    """A dim padded so that it is the concatenation of all shards, nested over `groups` outer to inner."""
    size, shape = x.shape[dim], x.shape
    chunks = chunk_sizes(size, range(len(groups)), groups)
    if size == math.prod(groups) * chunks[-1]:
        return x
    at, lead = dim, 1
    for g, c in zip(groups, chunks, strict=True):
        widths = [(0, 0)] * x.ndim
        widths[at] = (0, g * c - x.shape[at])
        x = _pad(x, widths, fill)
        x = x.reshape(*x.shape[:at], g, c, *x.shape[at + 1 :])
        at, lead = at + 1, lead * g
    return x.reshape(*shape[:dim], lead * chunks[-1], *shape[dim + 1 :])


def _pad(x: Any, widths: Sequence[tuple[int, int]], fill: Any) -> Any:
    """Rows of padding behind a dim; keys are padded by their words."""
    if compat.is_key(x.dtype):
        words = jnp.pad(jax.random.key_data(x), [*widths, (0, 0)])
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return jnp.pad(x, widths, constant_values=fill)


def implode(x: Any, dim: int, groups: Sequence[int], size: int) -> Any:
    """The inverse of `explode`: the padding between the shards is cut out; the dim has `size` rows."""
    chunks = chunk_sizes(size, range(len(groups)), groups)
    if size == math.prod(groups) * chunks[-1]:
        return x
    head, tail = x.shape[:dim], x.shape[dim + 1 :]
    for k in reversed(range(len(groups))):
        rows = groups[k] * chunks[k]
        outer = math.prod(groups[:k])
        x = x.reshape(*head, outer, rows, *tail)
        x = lax.slice_in_dim(x, 0, chunks[k - 1] if k else size, axis=dim + 1)
        x = x.reshape(*head, -1, *tail) if x.size else x.reshape(*head, outer * x.shape[dim + 1], *tail)
    return x


def apply_move(
    x: Any,
    move: Move,
    shape: Sequence[int],
    hierarchy: Sequence[int],
    axes: Sequence[str],
    coords: Any,
    owned: bool = False,
) -> Any:
    """One move on this device's shard.

    Arguments:
      x: the shard under `move.before`.
      shape: the logical shape.
      hierarchy, axes: the placement's sizes and axis names.
      coords: this device's traced position along each axis.
      owned: whether of each element of a sum one device has it, and the others zeros.
    """
    if math.prod(shape) == 0:  # nothing to send, and XLA refuses empty collectives
        return jnp.zeros(local_shape(shape, move.after, hierarchy), x.dtype)
    names = tuple(axes[a] for a in move.axes)
    groups = [hierarchy[a] for a in move.axes]
    apply = _OWNED[move.kind] if owned else _APPLY[move.kind]
    return apply(x, move, shape, hierarchy, names, groups, coords)


def _all_reduce(x: Any, move: Move, shape: Any, hierarchy: Any, names: Any, groups: Any, coords: Any) -> Any:
    assert isinstance(move.old, Partial)
    return lax.psum(x, names) if move.old.op == "sum" else bits.extremum(x, move.old.op, names)


def _owned_all_reduce(
    x: Any, move: Move, shape: Any, hierarchy: Any, names: Any, groups: Any, coords: Any
) -> Any:
    return bits.owned_sum(x, names)


def _all_gather(x: Any, move: Move, shape: Any, hierarchy: Any, names: Any, groups: Any, coords: Any) -> Any:
    assert isinstance(move.old, Split)
    size, _ = frame(move, move.old, shape, hierarchy)
    whole = lax.all_gather(x, names, axis=move.old.dim, tiled=True)
    return implode(whole, move.old.dim, groups, size)


def _reduce_scatter(
    x: Any, move: Move, shape: Any, hierarchy: Any, names: Any, groups: Any, coords: Any
) -> Any:
    assert isinstance(move.new, Split)
    return lax.psum_scatter(
        explode(x, move.new.dim, groups), names, scatter_dimension=move.new.dim, tiled=True
    )


def _owned_reduce_scatter(
    x: Any, move: Move, shape: Any, hierarchy: Any, names: Any, groups: Any, coords: Any
) -> Any:
    assert isinstance(move.new, Split)
    return bits.owned_scatter(explode(x, move.new.dim, groups), names, move.new.dim)


def _all_to_all(x: Any, move: Move, shape: Any, hierarchy: Any, names: Any, groups: Any, coords: Any) -> Any:
    assert isinstance(move.new, Split)
    j, g = move.new.dim, math.prod(groups)
    parts = explode(x, j, groups)
    if parts.shape != x.shape:
        # XLA on CPUs takes the pieces apart, and may give those that are padding alone another layout.
        parts = barrier(parts)
    if isinstance(move.old, Partial):
        swapped = lax.all_to_all(parts, names, split_axis=j, concat_axis=j, tiled=True)
        rows = swapped.shape[j] // g
        stacked = swapped.reshape(*swapped.shape[:j], g, rows, *swapped.shape[j + 1 :])
        return bits.fold(stacked, move.old.op, j)
    assert isinstance(move.old, Split)
    size, _ = frame(move, move.old, shape, hierarchy)
    swapped = lax.all_to_all(parts, names, split_axis=j, concat_axis=move.old.dim, tiled=True)
    return implode(swapped, move.old.dim, groups, size)


def _slice(x: Any, move: Move, shape: Any, hierarchy: Any, names: Any, groups: Any, coords: Any) -> Any:
    assert isinstance(move.new, Split)
    d, (axis,) = move.new.dim, move.axes
    whole = explode(x, d, groups)
    rows = whole.shape[d] // groups[0]
    return lax.dynamic_slice_in_dim(whole, coords[axis] * np.int32(rows), rows, axis=d)


def _fill(x: Any, move: Move, shape: Any, hierarchy: Any, names: Any, groups: Any, coords: Any) -> Any:
    (axis,) = move.axes
    return jnp.where(coords[axis] == 0, x, jnp.zeros((), x.dtype))


def _keep(x: Any, move: Move, shape: Any, hierarchy: Any, names: Any, groups: Any, coords: Any) -> Any:
    return x


def _embed(x: Any, move: Move, shape: Any, hierarchy: Any, names: Any, groups: Any, coords: Any) -> Any:
    assert isinstance(move.old, Split) and isinstance(move.new, Partial)
    d, (axis,) = move.old.dim, move.axes
    size, chunks = frame(move, move.old, shape, hierarchy)
    whole = list(x.shape)
    whole[d] = groups[0] * chunks[-1]
    ground = jnp.full(whole, identity_of(move.new.op, x.dtype), x.dtype)
    out = lax.dynamic_update_slice_in_dim(ground, x, coords[axis] * np.int32(chunks[-1]), axis=d)
    return lax.slice_in_dim(out, 0, size, axis=d)


def _permute(x: Any, move: Move, shape: Any, hierarchy: Any, names: Any, groups: Any, coords: Any) -> Any:
    way = find_permutation(shape, move.before, move.after, hierarchy)
    assert way is not None
    linear: Any = np.int32(0)
    for axis, n in enumerate(hierarchy):
        linear = linear * np.int32(n) + coords[axis]
    starts = jnp.asarray(np.array(way.starts, np.int32))[linear]
    piece = lax.dynamic_slice(x, [starts[d] for d in range(x.ndim)], way.shape)
    return lax.ppermute(piece, names, way.pairs)


_APPLY: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "fill": _fill,
    "keep": _keep,
    "embed": _embed,
    "permute": _permute,
}
_OWNED: dict[str, Callable[..., Any]] = {
    "all_reduce": _owned_all_reduce,
    "reduce_scatter": _owned_reduce_scatter,
}
