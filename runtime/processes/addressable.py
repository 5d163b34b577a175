"""The part of a placement that this process has, and arrays over devices of several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from sbp.compat.core import is_key
from sbp.compat.untyped import DType, JaxDevice, Leaf


def is_here(device: JaxDevice) -> bool:
    """Whether a device belongs to this process."""
    return bool(device.process_index == jax.process_index())


def is_alone(*shardings: Sharding) -> bool:
    """Whether this process has all devices of some shardings."""
    return all(s.is_fully_addressable for s in shardings)


def takes_part(sharding: Sharding) -> bool:
    """Whether this process has devices of a sharding."""
    return bool(sharding.addressable_devices)


def array_of(
    shape: tuple[int, ...], sharding: NamedSharding, shards: Sequence[jax.Array], dtype: DType
) -> jax.Array:
    """An array from the shards that this process has, which may be none."""
    make: Callable[..., jax.Array] = jax.make_array_from_single_device_arrays
    return make(shape, sharding, list(shards), dtype=dtype)


def absent(shape: tuple[int, ...], sharding: NamedSharding, dtype: DType) -> jax.Array:
    """An array without any shard in this process: a result of stages that other processes run."""
    return array_of(shape, sharding, [], dtype)


def relaid(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array under another sharding on its devices, moved by the processes that have some of them."""
    if not takes_part(sharding):
        return absent(x.shape, sharding, x.dtype)
    moved: jax.Array = jax.device_put(x, sharding)
    return moved


def moved_to(xs: Sequence[Leaf], shardings: Sequence[Sharding]) -> Sequence[jax.Array]:
    """Arrays under the wanted shardings.

    Host arrays, and arrays on devices of this process alone, are equal in all processes: each process puts
    its part on its own devices, and nothing is sent.
    """
    if is_alone(*shardings):
        moved: Sequence[jax.Array] = jax.device_put(list(xs), list(shardings))
        return moved
    return [
        jax.device_put(x, s) if isinstance(x, jax.Array) and not x.is_fully_addressable else brought(x, s)
        for x, s in zip(xs, shardings, strict=True)
    ]


def brought(x: Leaf, sharding: Sharding) -> jax.Array:
    """A host array, equal in all processes, on devices of several of them; nothing is sent."""
    if isinstance(x, jax.Array) and is_key(x.dtype):
        words = brought(jax.random.key_data(x), sharding)
        key: jax.Array = jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
        return key
    held: np.ndarray[Any, Any] = np.asarray(x)
    return jax.make_array_from_callback(held.shape, sharding, lambda at: held[at])
