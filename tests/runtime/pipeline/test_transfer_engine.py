"""Ways of tensors between placements, as they go where these are of different processes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import sbp
from sbp.runtime.pipeline.shared_executables import Executables
from sbp.runtime.pipeline.transfer_engine import (
    CompiledTransfer,
    StageTransfer,
    TransferEngine,
    compiled_transfer,
)
from sbp.runtime.saved.pack import Programs, pack, unpack
from tests.runtime.program.starting import COMPILED, counted

FIRST, SECOND = sbp.placement("cpu", shape=(2, 4), axes=("stage", "data")).split("stage")
PAIR = sbp.placement("cpu", [4, 5], axes=("data",))
ROWS, COLUMNS, WHOLE = PartitionSpec("data"), PartitionSpec(None, "data"), PartitionSpec()
CARGOS: dict[str, tuple[Any, Any, Any, Any, int]] = {
    "rows": (np.arange(32.0, dtype=np.float32).reshape(8, 4), ROWS, SECOND, ROWS, 1),
    "rows to columns": (np.arange(32.0, dtype=np.float32).reshape(8, 4), ROWS, SECOND, COLUMNS, 2),
    "to fewer devices": (np.arange(32.0, dtype=np.float32).reshape(8, 4), ROWS, PAIR, ROWS, 2),
    "a number": (np.float32(3), WHOLE, SECOND, WHOLE, 3),
    "a key": (jax.random.key(3), WHOLE, SECOND, WHOLE, 3),
    "keys": (jax.random.split(jax.random.key(3), 8), ROWS, SECOND, ROWS, 3),
}
"""What is sent, how it lies, where to, how it is to lie there, and how many programs that takes."""


def sent(name: str) -> tuple[Any, StageTransfer, int]:
    value, leaves, there, comes, programs = CARGOS[name]
    x = jax.device_put(value, NamedSharding(FIRST.mesh, leaves))
    return x, StageTransfer(x.shape, x.dtype, x.sharding, NamedSharding(there.mesh, comes)), programs


def numbers(x: Any) -> Any:
    return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


@pytest.mark.parametrize("name", CARGOS)
def test_what_comes_is_what_was_sent(name: str) -> None:
    x, transfer, programs = sent(name)
    executables = Executables()
    compiled = compiled_transfer(transfer, executables)
    come = compiled.run(x)
    assert come is not None and come.sharding.is_equivalent_to(transfer.comes, come.ndim)
    np.testing.assert_array_equal(numbers(come), numbers(x))
    assert len(list(compiled.programs)) == programs
    assert all(id(program) in executables.keys for program, _ in compiled.programs)


@pytest.mark.parametrize("name", CARGOS)
def test_a_way_that_was_saved_compiles_nothing(name: str) -> None:
    x, transfer, _ = sent(name)
    engine = TransferEngine()
    engine.compile(transfer)
    keys = {id(p): engine.executables.keys[id(p)] for p, _ in engine.transfers[transfer].programs}
    serial = {key: engine.executables.by_text[key].serial for key in keys.values()}
    names = {id(p): (keys[id(p)], tuple(d.id for d in at)) for p, at in engine.transfers[transfer].programs}
    loaded = unpack(pack(engine, Programs(serial, names)), jax.devices())
    assert (
        isinstance(loaded.transfers[transfer], CompiledTransfer)
        and loaded.transfers[transfer] is not engine.transfers[transfer]
    )
    assert (
        loaded.transfers[transfer].process_transfer.receive_buffers.keys()
        == engine.transfers[transfer].process_transfer.receive_buffers.keys()
    )  # zeros are put there
    with counted() as events:
        come = loaded.transfers[transfer].run(x)
    assert events.get(COMPILED, 0) == 0
    np.testing.assert_array_equal(numbers(come), numbers(x))


def test_ways_that_are_alike_are_compiled_once() -> None:
    """Forth and back between the same devices in the same order of shards: one program, on each its own."""
    line = sbp.placement("cpu", shape=(4, 2), axes=("stage", "data")).split("stage")
    executables = Executables()
    x = np.arange(8.0, dtype=np.float32)
    for a, b in pairwise(line):
        sharding = NamedSharding(a.mesh, ROWS)
        compiled = compiled_transfer(
            StageTransfer(x.shape, x.dtype, sharding, NamedSharding(b.mesh, ROWS)), executables
        )
        np.testing.assert_array_equal(compiled.run(jax.device_put(x, sharding)), x)
    assert (executables.compiled_count, executables.loaded_count) == (1, 2)
