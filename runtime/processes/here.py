"""What of a placement this process has, and arrays on devices of which it has some, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from sbp.compat import is_key
from sbp.untyped import DType, JaxDevice, Leaf


def is_here(device: JaxDevice) -> bool:
    """Whether a device is of this process."""
    return bool(device.process_index == jax.process_index())


def is_alone(*shardings: Sharding) -> bool:
    """Whether this process has all devices of some shardings."""
    return all(s.is_fully_addressable for s in shardings)


def takes_part(sharding: Sharding) -> bool:
    """Whether this process has devices of a sharding."""
    return bool(sharding.addressable_devices)


def absent(shape: tuple[int, ...], sharding: NamedSharding, dtype: DType) -> jax.Array:
    """An array of which this process has nothing: its results of stages that other processes run."""
    make: Callable[..., jax.Array] = jax.make_array_from_single_device_arrays
    return make(shape, sharding, [], dtype=dtype)


def brought(x: Leaf, sharding: NamedSharding) -> jax.Array:
    """A host array, the same in all processes that have devices there, on these devices; nothing is sent."""
    if isinstance(x, jax.Array) and is_key(x.dtype):
        words = brought(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    held: np.ndarray[Any, Any] = np.asarray(x)
    return jax.make_array_from_callback(held.shape, sharding, lambda at: held[at])
