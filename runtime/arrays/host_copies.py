"""Copies of arrays on devices of several processes, or of another one, on the host of each."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from sbp.compat.core import is_key
from sbp.compat.forks import check_not_forked
from sbp.compat.untyped import Leaf, PyTree
from sbp.passes.explain.internal_errors import public
from sbp.runtime.arrays.stage_state import spread_sharding
from sbp.runtime.pipeline.transfer_engine import StageTransfer, TransferEngine
from sbp.runtime.processes.addressable import takes_part


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
    found: np.ndarray[Any, Any] = multihost_utils.process_allgather(whole, tiled=True)
    return found


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
