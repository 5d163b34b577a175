"""A bucket of boxing moves on one device: packed, sent as one collective, unpacked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp.passes.boxing.moves import Move, frame
from sbp.runtime.collectives import explode, implode
from sbp.signature import Split
from sbp.talk import bits


@dataclass(frozen=True)
class Parcel:
    """One tensor of a bucket.

    Arguments:
      x: the shard under `move.before`.
      move, shape: the move, and the logical shape.
      owned: of a sum, whether of each element one device has it, and the others zeros.
    """

    x: Any
    move: Move
    shape: tuple[int, ...]
    owned: bool = False


def apply_bucket(parcels: Sequence[Parcel], hierarchy: Sequence[int], axes: Sequence[str]) -> list[Any]:
    """Moves of one kind over the same axes; the shards under each `move.after`."""
    first = parcels[0].move
    names, groups = tuple(axes[a] for a in first.axes), [hierarchy[a] for a in first.axes]
    pack, send, unpack = _WAYS[first.kind]
    send = _scatter_owned if parcels[0].owned else send
    packed = [pack(p, groups) for p in parcels]
    sent = send(jnp.concatenate([x.reshape(x.shape[0], -1) for x in packed], axis=1), names)
    out, at = [], 0
    for p, x in zip(parcels, packed, strict=True):
        n = math.prod(x.shape[1:])
        piece = lax.slice_in_dim(sent, at, at + n, axis=1)
        out.append(unpack(piece.reshape(-1, *x.shape[1:]), p, groups, hierarchy))
        at += n
    return out


def _whole(p: Parcel, groups: Sequence[int]) -> Any:
    return p.x[None]


def _parts(p: Parcel, groups: Sequence[int]) -> Any:
    """One part for each device of the group, in front."""
    assert isinstance(p.move.new, Split)
    d, g = p.move.new.dim, math.prod(groups)
    whole = explode(p.x, d, groups)
    shape = whole.shape[:d], (g, whole.shape[d] // g), whole.shape[d + 1 :]
    return jnp.moveaxis(whole.reshape(sum(shape, ())), d, 0)


def _gather(x: Any, names: Sequence[str]) -> Any:
    return lax.all_gather(x, names, axis=0, tiled=True)


def _scatter(x: Any, names: Sequence[str]) -> Any:
    return lax.psum_scatter(x, names, scatter_dimension=0, tiled=True)


def _scatter_owned(x: Any, names: Sequence[str]) -> Any:
    return bits.owned_scatter(x, names, 0)


def _swap(x: Any, names: Sequence[str]) -> Any:
    return lax.all_to_all(x, names, split_axis=0, concat_axis=0, tiled=True)


def _joined(x: Any, p: Parcel, groups: Sequence[int], hierarchy: Sequence[int]) -> Any:
    """The parts of the group behind each other, along the dim that was split."""
    assert isinstance(p.move.old, Split)
    d = p.move.old.dim
    size, _ = frame(p.move, p.move.old, p.shape, hierarchy)
    x = jnp.moveaxis(x, 0, d)
    return implode(x.reshape(*x.shape[:d], -1, *x.shape[d + 2 :]), d, groups, size)


def _own(x: Any, p: Parcel, groups: Sequence[int], hierarchy: Sequence[int]) -> Any:
    return x[0]


_WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "all_gather": (_whole, _gather, _joined),
    "reduce_scatter": (_parts, _scatter, _own),
    "all_to_all": (_parts, _swap, _joined),
}
