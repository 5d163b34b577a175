"""Batches of keys from which the capacity of a sparse exchange (docs/communication.md) is planned."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbp.communication.extents import Coords
from sbp.communication.legs import Exchange, Leg, legs
from sbp.layout import Layout, offset, valid_length


@dataclass(frozen=True, eq=False)
class KeySample:
    """The ids of one lookup in one batch, as host integers; equal to nothing but itself.

    Arguments:
      again: whether the batch replaces an earlier one that others were not like.
    """

    ids: NDArray[Any]
    again: bool = False

    def shard(self, layout: Layout, coords: Coords) -> NDArray[Any]:
        """The distinct ids of the device at `coords`."""
        part = self.ids
        for d, n in enumerate(layout.shape):
            axes = layout.axes(d)
            if axes:
                start = offset(n, axes, layout.hierarchy, coords)
                stop = start + valid_length(n, axes, layout.hierarchy, coords)
                part = part[(slice(None),) * d + (slice(start, stop),)]
        return np.unique(part)


def with_planned_capacity(
    exchange: Exchange, samples: tuple[KeySample, ...], layouts: Sequence[Layout]
) -> Exchange:
    """The exchange with a capacity for its samples and a little more, unless the user gave it one.

    The buckets of other batches differ by about the root of their size; one more round costs a message. A
    batch that asks no owner for two rows, such as one of zeros, says nothing about the next: the capacity is
    then that of an exchange without samples, more than an even share. The same holds as a minimum where
    batches have been misleading.
    """
    if exchange.capacity is not None or not samples:
        return exchange
    most = fullest_bucket(exchange, samples, tuple(layouts))
    if most == 1:
        return exchange
    capacity = most + math.isqrt(most) // 2
    if any(s.again for s in samples):
        groups = [leg.group for leg in legs(exchange)]
        capacity = max(capacity, *(exchange.even_share(group) for group in groups))
    return replace(exchange, capacity=capacity, planned=True)


@lru_cache(maxsize=256)
def fullest_bucket(exchange: Exchange, samples: tuple[KeySample, ...], layouts: tuple[Layout, ...]) -> int:
    """The most keys that any device sends to one owner, with these batches; at least 1.

    Arguments:
      exchange: where the keys travel; its own capacity does not count.
      samples, layouts: of each lookup, its ids and their layout.
    """
    hierarchy = exchange.rows.hierarchy
    held = {
        at: np.unique(np.concatenate([s.shard(x, at) for s, x in zip(samples, layouts, strict=True)]))
        for at in itertools.product(*map(range, hierarchy))
    }
    most = 1
    for leg in legs(replace(exchange, capacity=None)):
        received: dict[Coords, list[NDArray[Any]]] = {}
        for at, keys in held.items():
            for owner, bucket in enumerate(_buckets(leg, at, keys)):
                most = max(most, len(bucket))
                received.setdefault((*at[: leg.axis], owner, *at[leg.axis + 1 :]), []).append(bucket)
        held = {at: np.unique(np.concatenate(buckets)) for at, buckets in received.items()}
    return most


def _buckets(leg: Leg, at: Coords, keys: NDArray[Any]) -> Sequence[NDArray[Any]]:
    """The keys that the device at `at` sends to each owner."""
    axes = leg.outer.axes(0)
    size = leg.outer.shape[0]
    first = offset(size, axes, leg.outer.hierarchy, at)
    last = first + valid_length(size, axes, leg.outer.hierarchy, at)
    bounds = np.minimum(first + np.arange(leg.group + 1) * leg.chunk, last)
    return [keys[a:b] for a, b in itertools.pairwise(np.searchsorted(keys, bounds))]
