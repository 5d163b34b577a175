"""A bucket of boxing moves on one device: packed, sent as one collective, unpacked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from sbp.communication import bits
from sbp.compat import untyped
from sbp.passes.boxing.moves import Move, frame
from sbp.runtime.lower.collectives import explode, implode
from sbp.signature import Split


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
    own: jax.Array = bits.owned_scatter(x, names, 0, len(x))
    return own


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
