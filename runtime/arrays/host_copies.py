"""Copies of arrays on devices of several processes, or of another one, on the host of each.

The state of stages within one process is spread over the devices of all processes to save or restore it:
orbax takes an array that all of its processes know, or one of a process that is the only one. So each array
of such a stage is sent, leaf by leaf, to all devices; every process then writes its part.
"""

from typing import TypeGuard

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from sbp.compat.core import is_key
from sbp.compat.forks import check_not_forked
from sbp.compat.untyped import DType, Leaf, PyTree, partition_spec
from sbp.passes.explain.internal_errors import public
from sbp.runtime.pipeline.transfer_engine import StageTransfer, TransferEngine
from sbp.runtime.processes.addressable import absent, takes_part


def is_of_one(sharding: object) -> TypeGuard[NamedSharding]:
    """Whether one of several processes has all of an array, which the others know."""
    if jax.process_count() == 1 or not isinstance(sharding, NamedSharding):
        return False
    return len({d.process_index for d in sharding.mesh.devices.flat}) == 1


def spread_sharding(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of such an array over the devices of all processes: split as often as a dim allows."""
    devices = sorted(jax.devices(sharding.mesh.devices.flat[0].platform), key=lambda d: d.process_index)
    mesh = Mesh(np.array(devices, dtype=object).reshape(jax.process_count(), -1), ("process", "device"))
    for axes in (("process", "device"), ("process",)):
        parts = int(np.prod([mesh.shape[a] for a in axes]))
        for dim, n in enumerate(shape):
            if n % parts == 0:
                return NamedSharding(mesh, partition_spec(*[None] * dim, axes))
    return NamedSharding(mesh, partition_spec())


def spread_leaf(x: Leaf, engine: TransferEngine) -> Leaf:
    """A leaf as it is saved; all processes call this with all leaves in one order."""
    if not isinstance(x, jax.Array) or not is_of_one(x.sharding):
        return x
    transfer = StageTransfer(x.shape, x.dtype, x.sharding, spread_sharding(x.sharding, x.shape))
    return engine.send(x if takes_part(x.sharding) else None, transfer)


def gather_leaf(x: Leaf, sharding: NamedSharding, dtype: DType, engine: TransferEngine) -> jax.Array:
    """A leaf that was restored spread, under the wanted sharding."""
    found = engine.send(x, StageTransfer(x.shape, dtype, x.sharding, sharding))
    return absent(x.shape, sharding, dtype) if found is None else found


@public
def to_host(tree: PyTree) -> PyTree:
    """Copies the arrays of a tree to the host of every process, whole: `jax.device_get` across processes.

    All processes call it with the same arrays. Each host needs memory for the whole tree.

    Arguments:
      tree: arrays in containers, on any devices, also of stages that other processes run. PRNG keys are not
        converted.

    >>> to_host({"n": 3, "w": jax.numpy.ones(2)})
    {'n': 3, 'w': array([1., 1.], dtype=float32)}
    """
    check_not_forked("to_host(...)")
    engine = TransferEngine()
    return jax.tree.map(lambda x: _here(x, engine), tree)


def _here(x: Leaf, engine: TransferEngine) -> Leaf:
    if not isinstance(x, jax.Array) or is_key(x.dtype):
        return x
    whole = _of_all(x, engine)
    if whole.is_fully_addressable:
        return np.asarray(whole)
    if whole.is_fully_replicated:
        return np.asarray(whole.addressable_data(0))
    return multihost_utils.process_allgather(whole, tiled=True)


def _of_all(x: jax.Array, engine: TransferEngine) -> jax.Array:
    """An array of some processes only, such as that of a stage, on devices of all."""
    lies = x.sharding
    if jax.process_count() == 1 or not isinstance(lies, NamedSharding):
        return x
    if len({d.process_index for d in lies.mesh.devices.flat}) == jax.process_count():
        return x
    transfer = StageTransfer(x.shape, x.dtype, lies, spread_sharding(lies, x.shape))
    found = engine.send(x if takes_part(lies) else None, transfer)
    assert found is not None  # each process has devices there
    return found
