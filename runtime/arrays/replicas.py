"""Copies of one array on several devices: for a save each of them becomes a part.

So every device hands over a share of what is replicated, and every element is handed over once: who computes
a checksum of a part has just what is written. Devices cut their share out of what they have; nothing is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from sbp.compat.untyped import Leaf, partition_spec

SMALL_BYTES = 1 << 20
"""Below this the first copy is handed over: a program for the cut would cost more than it spares."""


def without_replicas(leaves: Sequence[Leaf]) -> list[Leaf]:
    """The leaves, large replicated ones split over the devices that have copies; all processes come here."""
    found = list(leaves)
    cuts = {i: s for i, x in enumerate(found) if (s := _cut(x)) is not None}
    groups = dict[Any, list[int]]()
    for i, sharding in cuts.items():
        groups.setdefault(sharding.mesh, []).append(i)
    for group in groups.values():
        cut = _cutter(tuple(cuts[i] for i in group))
        for i, part in zip(group, cut(*(found[i] for i in group)), strict=True):
            found[i] = part
    return found


def _cut(x: Leaf) -> NamedSharding | None:
    """How a replicated array is split further; None for what is left as it is."""
    if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding) or x.nbytes < SMALL_BYTES:
        return None
    return further_split(x.sharding, x.shape)


def further_split(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding | None:
    """A sharding split also by the axes that have copies, as far as a dim divides; None if none does.

    Arguments:
      shape: of the whole array.
    """
    spec = [_axes(entry) for entry in sharding.spec]
    spec += [()] * (len(shape) - len(spec))
    used = {a for axes in spec for a in axes}
    free = [a for a, n in sharding.mesh.shape.items() if n > 1 and a not in used]
    is_cut = False
    for axis in free:
        for dim, n in enumerate(shape):
            parts = int(np.prod([sharding.mesh.shape[a] for a in (*spec[dim], axis)]))
            if n % parts == 0:
                spec[dim] = (*spec[dim], axis)
                is_cut = True
                break
    if not is_cut:
        return None
    entries = [axes if axes else None for axes in spec]
    return NamedSharding(sharding.mesh, partition_spec(*entries), memory_kind=sharding.memory_kind)


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


@functools.lru_cache(maxsize=16)
def _cutter(shardings: tuple[NamedSharding, ...]) -> Any:
    return jax.jit(lambda *xs: xs, out_shardings=shardings)
