"""Boxing moves on one device: each is one `jax.lax` collective, or a local step.

A bucket of boxing moves on one device: packed, sent as one collective, unpacked.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout
from jax.typing import ArrayLike

from sbp.communication import bits
from sbp.communication.bits import identity_of
from sbp.compat import core, untyped
from sbp.compat.untyped import optimization_barrier
from sbp.layout import chunk_sizes, local_shape
from sbp.passes.boxing.moves import Move, find_permutation, frame
from sbp.signature import Partial, Split


@dataclass(frozen=True, slots=True)
class Site:
    """A move on a device.

    Arguments:
      shape: the logical shape.
      hierarchy: the placement's sizes.
      names, groups: of the axes of the move, their names and sizes.
      coords: this device's traced position along each axis of the placement.
    """

    move: Move
    shape: Sequence[int]
    hierarchy: Sequence[int]
    names: tuple[str, ...]
    groups: Sequence[int]
    coords: Sequence[jax.Array]


Apply: TypeAlias = Callable[[jax.Array, Site], jax.Array]
"""What becomes of this device's shard."""


def explode(x: jax.Array, dim: int, groups: Sequence[int], fill: ArrayLike = 0) -> jax.Array:
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


def _pad(x: jax.Array, widths: Sequence[tuple[int, int]], fill: ArrayLike) -> jax.Array:
    """Adds rows of padding at the end of a dim; keys are padded by their words."""
    if core.is_key(x.dtype):
        words = jnp.pad(jax.random.key_data(x), [*widths, (0, 0)])
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return jnp.pad(x, widths, constant_values=fill)


def implode(x: jax.Array, dim: int, groups: Sequence[int], size: int) -> jax.Array:
    """The inverse of `explode`: removes the padding between shards; the dim has `size` rows."""
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
    x: jax.Array,
    move: Move,
    shape: Sequence[int],
    hierarchy: Sequence[int],
    axes: Sequence[str],
    coords: Sequence[jax.Array],
    owned: bool = False,
) -> jax.Array:
    """One move on this device's shard.

    Arguments:
      x: the shard under `move.before`.
      shape: the logical shape.
      hierarchy, axes: the placement's sizes and axis names.
      coords: this device's traced position along each axis.
      owned: of a sum, whether each element is nonzero on one device only.
    """
    if math.prod(shape) == 0:  # nothing to send, and XLA refuses empty collectives
        return jnp.zeros(local_shape(shape, move.after, hierarchy), x.dtype)
    names = tuple(axes[a] for a in move.axes)
    groups = [hierarchy[a] for a in move.axes]
    apply = _OWNED[move.kind] if owned else _APPLY[move.kind]
    return apply(x, Site(move, shape, hierarchy, names, groups, coords))


def dims_in_order(x: jax.Array) -> jax.Array:
    """The same tensor with its first dim outermost in memory, whatever the compiler prefers."""
    return untyped.with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _all_reduce(x: jax.Array, at: Site) -> jax.Array:
    assert isinstance(at.move.old, Partial)
    return bits.reduction(x, at.move.old.op, at.names)


def _owned_all_reduce(x: jax.Array, at: Site) -> jax.Array:
    return bits.owned_sum(x, at.names)


def _all_gather(x: jax.Array, at: Site) -> jax.Array:
    if isinstance(at.move.old, Partial):
        return _all_reduce(x, at)
    assert isinstance(at.move.old, Split)
    size, _ = frame(at.move, at.move.old, at.shape, at.hierarchy)
    whole = untyped.all_gather(x, at.names, axis=at.move.old.dim, tiled=True)
    return implode(whole, at.move.old.dim, at.groups, size)


def _reduce_scatter(x: jax.Array, at: Site) -> jax.Array:
    assert isinstance(at.move.new, Split)
    return untyped.psum_scatter(
        explode(x, at.move.new.dim, at.groups), at.names, scatter_dimension=at.move.new.dim, tiled=True
    )


def _owned_reduce_scatter(x: jax.Array, at: Site) -> jax.Array:
    assert isinstance(at.move.new, Split)
    d, group = at.move.new.dim, math.prod(at.groups)
    return bits.owned_scatter(explode(x, d, at.groups), at.names, d, group)


def _all_to_all(x: jax.Array, at: Site) -> jax.Array:
    assert isinstance(at.move.new, Split)
    j, g = at.move.new.dim, math.prod(at.groups)
    parts = explode(x, j, at.groups)
    if parts.shape != x.shape:
        # XLA on CPUs takes the pieces apart, and may give those that are padding alone another layout.
        parts = optimization_barrier(parts)
    if isinstance(at.move.old, Partial):
        swapped = untyped.all_to_all(parts, at.names, split_axis=j, concat_axis=j, tiled=True)
        rows = swapped.shape[j] // g
        stacked = swapped.reshape(*swapped.shape[:j], g, rows, *swapped.shape[j + 1 :])
        return bits.fold(stacked, at.move.old.op, j)
    assert isinstance(at.move.old, Split)
    size, _ = frame(at.move, at.move.old, at.shape, at.hierarchy)
    swapped = untyped.all_to_all(parts, at.names, split_axis=j, concat_axis=at.move.old.dim, tiled=True)
    return implode(swapped, at.move.old.dim, at.groups, size)


def _slice(x: jax.Array, at: Site) -> jax.Array:
    assert isinstance(at.move.new, Split)
    d, (axis,) = at.move.new.dim, at.move.axes
    whole = explode(x, d, at.groups)
    rows = whole.shape[d] // at.groups[0]
    start = at.coords[axis] * np.int32(rows)
    return lax.dynamic_slice_in_dim(whole, start, rows, d, allow_negative_indices=False)


def _fill(x: jax.Array, at: Site) -> jax.Array:
    (axis,) = at.move.axes
    assert isinstance(at.move.new, Partial)
    return jnp.where(at.coords[axis] == 0, x, jnp.asarray(identity_of(at.move.new.op, x.dtype)))


def _keep(x: jax.Array, at: Site) -> jax.Array:
    return x


def _embed(x: jax.Array, at: Site) -> jax.Array:
    assert isinstance(at.move.old, Split) and isinstance(at.move.new, Partial)
    d, (axis,) = at.move.old.dim, at.move.axes
    size, chunks = frame(at.move, at.move.old, at.shape, at.hierarchy)
    whole = list(x.shape)
    whole[d] = at.groups[0] * chunks[-1]
    ground = jnp.full(whole, identity_of(at.move.new.op, x.dtype), x.dtype)
    start = at.coords[axis] * np.int32(chunks[-1])
    out = lax.dynamic_update_slice_in_dim(ground, x, start, d, allow_negative_indices=False)
    return lax.slice_in_dim(out, 0, size, axis=d)


def _permute(x: jax.Array, at: Site) -> jax.Array:
    way = find_permutation(at.shape, at.move.before, at.move.after, at.hierarchy)
    assert way is not None
    linear: jax.Array | np.int32 = np.int32(0)
    for axis, n in enumerate(at.hierarchy):
        linear = linear * np.int32(n) + at.coords[axis]
    table = jnp.asarray(np.array(way.starts, np.int32))
    starts = lax.dynamic_index_in_dim(table, linear, keepdims=False, allow_negative_indices=False)
    start = [starts[d] for d in range(x.ndim)]
    piece = lax.dynamic_slice(x, start, way.shape, allow_negative_indices=False)
    return untyped.ppermute(piece, at.names, way.pairs)


_APPLY: dict[str, Apply] = {
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
_OWNED: dict[str, Apply] = {
    "all_reduce": _owned_all_reduce,
    "reduce_scatter": _owned_reduce_scatter,
}


@dataclass(frozen=True)
class FusedSend:
    """One tensor of a bucket.

    Arguments:
      x: the shard under `move.before`.
      move, shape: the move, and the logical shape.
      owned: of a sum, whether each element is nonzero on one device only.
    """

    x: jax.Array
    move: Move
    shape: tuple[int, ...]
    owned: bool = False


# Shards to one array with a row per device of the group, that array sent, and its part as a shard again.
Pack: TypeAlias = Callable[[FusedSend, Sequence[int]], jax.Array]
Send: TypeAlias = Callable[[jax.Array, Sequence[str]], jax.Array]
Unpack: TypeAlias = Callable[[jax.Array, FusedSend, Sequence[int], Sequence[int]], jax.Array]


def apply_bucket(
    sends: Sequence[FusedSend], hierarchy: Sequence[int], axes: Sequence[str]
) -> list[jax.Array]:
    """Runs moves of one kind over the same axes as one collective; the shards under each `move.after`."""
    first = sends[0].move
    names, groups = tuple(axes[a] for a in first.axes), [hierarchy[a] for a in first.axes]
    pack, send, unpack = _WAYS[first.kind]
    send = _scatter_owned if sends[0].owned else send
    packed = [pack(p, groups) for p in sends]
    sent = send(jnp.concatenate([x.reshape(x.shape[0], -1) for x in packed], axis=1), names)
    out, at = [], 0
    for p, x in zip(sends, packed, strict=True):
        n = math.prod(x.shape[1:])
        piece = lax.slice_in_dim(sent, at, at + n, axis=1)
        out.append(unpack(piece.reshape(-1, *x.shape[1:]), p, groups, hierarchy))
        at += n
    return out


def _whole(p: FusedSend, groups: Sequence[int]) -> jax.Array:
    return p.x[None]


def _parts(p: FusedSend, groups: Sequence[int]) -> jax.Array:
    """One part for each device of the group, along a new first dim."""
    assert isinstance(p.move.new, Split)
    d, g = p.move.new.dim, math.prod(groups)
    whole = explode(p.x, d, groups)
    shape = whole.shape[:d], (g, whole.shape[d] // g), whole.shape[d + 1 :]
    return jnp.moveaxis(whole.reshape(sum(shape, ())), d, 0)


def _gather(x: jax.Array, names: Sequence[str]) -> jax.Array:
    return untyped.all_gather(x, names, axis=0, tiled=True)


def _scatter(x: jax.Array, names: Sequence[str]) -> jax.Array:
    return untyped.psum_scatter(x, names, scatter_dimension=0, tiled=True)


def _scatter_owned(x: jax.Array, names: Sequence[str]) -> jax.Array:
    return bits.owned_scatter(x, names, 0, len(x))


def _swap(x: jax.Array, names: Sequence[str]) -> jax.Array:
    return untyped.all_to_all(x, names, split_axis=0, concat_axis=0, tiled=True)


def _joined(x: jax.Array, p: FusedSend, groups: Sequence[int], hierarchy: Sequence[int]) -> jax.Array:
    """The parts of the group, joined along the dim that was split."""
    assert isinstance(p.move.old, Split)
    d = p.move.old.dim
    size, _ = frame(p.move, p.move.old, p.shape, hierarchy)
    x = jnp.moveaxis(x, 0, d)
    return implode(x.reshape(*x.shape[:d], -1, *x.shape[d + 2 :]), d, groups, size)


def _own(x: jax.Array, p: FusedSend, groups: Sequence[int], hierarchy: Sequence[int]) -> jax.Array:
    return x[0]


_WAYS: dict[str, tuple[Pack, Send, Unpack]] = {
    "all_gather": (_whole, _gather, _joined),
    "reduce_scatter": (_parts, _scatter, _own),
    "all_to_all": (_parts, _swap, _joined),
}
