"""The part of a placement that this process has, and arrays over devices of several processes.

Process-local data: arguments of which every process reads its own rows from its own files.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from numpy.typing import NDArray

from sbp.compat.core import is_key
from sbp.compat.untyped import DType, JaxDevice, Leaf, PyTree, partition_spec
from sbp.errors import ArgumentError, Problem
from sbp.placement import Placement


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
        jax.device_put(x, s) if isinstance(x, jax.Array) and not x.is_fully_addressable else to_devices(x, s)
        for x, s in zip(xs, shardings, strict=True)
    ]


def to_devices(x: Leaf, sharding: Sharding) -> jax.Array:
    """A host array, equal in all processes, on devices of several of them; nothing is sent."""
    if isinstance(x, jax.Array) and is_key(x.dtype):
        words = to_devices(jax.random.key_data(x), sharding)
        key: jax.Array = jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
        return key
    held: np.ndarray[Any, Any] = np.asarray(x)
    return jax.make_array_from_callback(held.shape, sharding, lambda at: held[at])


def with_own_rows(tree: PyTree, placement: Placement, where: str) -> PyTree:
    """One array of the rows of all processes, in the order of the processes, per leaf; nothing is sent.

    Arguments:
      tree: "rows ..." in each process, of one shape in all. A single process has all rows.
      placement: each process puts its rows on its own devices of it.
      where: the argument, for messages.

    Raises:
      ArgumentError: for scalars, which have no rows, and placements with different numbers of devices per
        process.
    """
    if jax.process_count() == 1:
        return tree
    per_process = Counter(d.process_index for d in placement.mesh.devices.flat)
    if len(per_process) < jax.process_count() or len(set(per_process.values())) > 1:
        raise ArgumentError(_uneven(placement, where, per_process))
    return jax.tree.map_with_path(
        lambda path, x: _joined(x, placement, where + jax.tree_util.keystr(path)), tree
    )


def _joined(x: Leaf, placement: Placement, where: str) -> jax.Array:
    """One array of the rows of all processes."""
    own = np.asarray(x)
    if not own.ndim:
        raise ArgumentError(_no_rows(where, own))
    count = jax.process_count()
    devices = sorted(placement.mesh.devices.flat, key=lambda d: d.process_index)
    grid = np.array(devices, dtype=object).reshape(count, -1)
    mesh = Mesh(grid, ("process", "device"))
    rows = ("process", "device") if len(own) % grid.shape[1] == 0 else "process"
    sharding, begin = NamedSharding(mesh, partition_spec(rows)), jax.process_index() * len(own)

    def part(at: tuple[slice, ...] | None) -> NDArray[Any]:
        assert at is not None
        start, stop, _ = at[0].indices(count * len(own))
        return own[start - begin : stop - begin]

    return jax.make_array_from_callback((count * len(own), *own.shape[1:]), sharding, part)


def _no_rows(where: str, x: NDArray[Any]) -> Problem:
    return Problem(
        "argument",
        where,
        f"{x.dtype}[], of which this process is to have its own rows",
        "arrays of at least one dim",
        "rows are dim 0",
        "a number that is the same in all processes as an argument of its own",
    )


def _uneven(placement: Placement, where: str, per_process: Counter[int]) -> Problem:
    held = ", ".join(f"{n} in process {p}" for p, n in sorted(per_process.items()))
    return Problem(
        "argument",
        f"{where}, of which each process has its own rows",
        f"{placement}: {held} of {jax.process_count()}",
        "as many devices of each process",
        "the rows of a process are brought to its own devices of the placement",
        "the whole argument in every process, without own_rows",
    )
