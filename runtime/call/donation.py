"""Donated memory: who else holds it, and copies that nobody else holds."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sbp.compat.core import is_key
from sbp.compat.untyped import Leaf
from sbp.errors import DonationError, Problem
from sbp.runtime.call.arguments import LeafNames
from sbp.runtime.processes.addressable import is_alone, to_devices

SHARDING = attrgetter("sharding")
LeafSharding: TypeAlias = jax.sharding.Sharding | None
"""The sharding of a leaf; None for what is no `jax.Array`."""


def buffers(x: jax.Array) -> frozenset[tuple[int, int]]:
    """The memory of the shards of an array, as (device id, address), of those that this process can see.

    >>> x = jnp.ones(4)
    >>> buffers(x) == buffers(jax.device_put(x, x.sharding)), buffers(x) == buffers(x + 0)
    (True, False)
    """
    if is_key(x.dtype):
        x = jax.random.key_data(x)
    shards = [(s.device.id, s.data) for s in x.addressable_shards]
    return frozenset((device, data.unsafe_buffer_pointer()) for device, data in shards if data.size)


def own_copy(x: ArrayLike, sharding: jax.sharding.Sharding, name: str) -> jax.Array:
    """An array under the wanted sharding in memory of its own, so that donating it does not affect `x`.

    `device_put` alone would return an array that is in place, even with `may_alias=False`.

    Raises:
      DonationError: if `x` was deleted.
    """
    if isinstance(x, jax.Array) and x.is_deleted():
        raise DonationError(_closed_over(x, name))
    if not is_alone(sharding):  # a copy anyhow, and others may not come here
        return to_devices(x, sharding)
    placed = jax.device_put(x, sharding, may_alias=False)
    return jnp.copy(placed) if isinstance(x, jax.Array) and buffers(x) & buffers(placed) else placed


def _closed_over(x: jax.Array, name: str) -> Problem:
    return Problem(
        "donation",
        f"{name}: {x.dtype}{list(x.shape)}, which the function closes over",
        "an array whose memory is gone: donated or deleted since the function was traced",
        "an array that still exists at the first call",
        "the first call takes a copy of what the function closes over, which it keeps",
        "call the program before the array is donated, or pass the array as an argument",
    )


@dataclass
class Owners:
    """Finds donated leaves that share memory with another leaf of the same call.

    Comparing addresses takes longer than running a small program, so a leaf is checked when its layout is a
    new object: the results of a compiled program have the same one each time.

    Arguments:
      donate: positions of donated leaves.
      layouts: per leaf, the layout with which it last shared no memory.
    """

    donate: tuple[int, ...]
    layouts: list[LeafSharding] = field(default_factory=list)

    def check(
        self, leaves: Sequence[Leaf], layouts: Sequence[LeafSharding], names: LeafNames
    ) -> list[Problem]:
        """The problems of the leaves of a call.

        Arguments:
          layouts: of these leaves.
        """
        if not self.donate:
            return []
        known = self.layouts or [None] * len(leaves)
        new = {i for i, (a, b) in enumerate(zip(layouts, known, strict=True)) if a is not b and a is not None}
        if not new and distinct(leaves):
            return []
        found = list(self.clashes(leaves, layouts, new, names))
        if not found:
            self.layouts = list(layouts)
        return found

    def clashes(
        self, leaves: Sequence[Leaf], layouts: Sequence[LeafSharding], new: set[int], names: LeafNames
    ) -> Iterator[Problem]:
        """A problem for each leaf that shares memory with an earlier one, if one of the two is donated."""
        alike: dict[float, list[int]] = {}
        for i, (x, layout) in enumerate(zip(leaves, layouts, strict=True)):
            if layout is not None and not x.is_deleted():
                # What shares memory has shards of one size.
                alike.setdefault(math.prod(layout.shard_shape(x.shape)) * x.dtype.itemsize, []).append(i)
        donated = set(self.donate)
        for group in alike.values():
            if not new.intersection(group) and len({id(leaves[i]) for i in group}) == len(group):
                continue
            holders: dict[tuple[int, int], int] = {}
            for i in group:
                for at in buffers(leaves[i]):
                    j = holders.setdefault(at, i)
                    if j != i and (i in donated or j in donated):
                        yield _shared(leaves[i], leaves[i] is leaves[j], names()[i], names()[j])
                        break


def _shared(x: jax.Array, same: bool, path: str, other: str) -> Problem:
    return Problem(
        "donation",
        f"{path}: {x.dtype}{list(x.shape)}",
        f"the same array as {other}" if same else f"an array in the memory of {other}",
        "an array of its own",
        "one of the two is donated, and its memory can be given away only once",
        "donate neither, or pass a copy: jnp.array(x, copy=True)",
    )


def distinct(leaves: Sequence[Leaf]) -> bool:
    """Whether no object occurs twice."""
    return len(set(map(id, leaves))) == len(leaves)


def layouts_of(leaves: Sequence[Leaf]) -> list[LeafSharding]:
    """The layouts of the leaves."""
    try:
        return list(map(SHARDING, leaves))
    except AttributeError:
        return [getattr(x, "sharding", None) for x in leaves]
