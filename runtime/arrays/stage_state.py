"""The state of stages within one process, spread over the devices of all processes to save or restore it.

orbax takes an array that all of its processes know, or one of a process that is the only one. So each array
of a stage within one process is sent, leaf by leaf, to all devices; every process then writes its part.
"""

from typing import TypeGuard

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sbp.compat.untyped import DType, Leaf, partition_spec
from sbp.runtime.pipeline.transfer_engine import StageTransfer, TransferEngine
from sbp.runtime.processes.addressable import absent, takes_part


def is_of_one(sharding: object) -> TypeGuard[NamedSharding]:
    """Whether one of several processes has all of an array, which the others know."""
    if jax.process_count() == 1 or not isinstance(sharding, NamedSharding):
        return False
    return len({d.process_index for d in sharding.mesh.devices.flat}) == 1


def spread_sharding(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of such an array over the devices of all processes: split as often as a dim allows."""
    platform = sharding.mesh.devices.flat[0].platform
    devices = sorted(jax.devices(platform), key=lambda d: d.process_index)
    mesh = Mesh(np.array(devices, dtype=object).reshape(jax.process_count(), -1), ("process", "device"))
    for axes in (("process", "device"), ("process",)):
        parts = int(np.prod([mesh.shape[a] for a in axes]))
        for dim, n in enumerate(shape):
            if n % parts == 0:
                return NamedSharding(mesh, partition_spec(*[None] * dim, axes))
    return NamedSharding(mesh, partition_spec())


def spread(x: Leaf, engine: TransferEngine) -> Leaf:
    """A leaf as it is saved; all processes call this with all leaves in one order."""
    if not isinstance(x, jax.Array) or not is_of_one(x.sharding):
        return x
    transfer = StageTransfer(x.shape, x.dtype, x.sharding, spread_sharding(x.sharding, x.shape))
    return engine.send(x if takes_part(x.sharding) else None, transfer)


def gathered(x: Leaf, sharding: NamedSharding, dtype: DType, engine: TransferEngine) -> jax.Array:
    """A leaf that was restored spread, under the wanted sharding."""
    transfer = StageTransfer(x.shape, dtype, x.sharding, sharding)
    found = engine.send(x, transfer)
    return absent(x.shape, sharding, dtype) if found is None else found
