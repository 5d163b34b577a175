"""Equal programs on other devices are loaded, not compiled, and run where they should."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import sbp
from sbp.runtime.pipeline.shared_executables import Executables


def lowered(first: int, scale: float, callback: bool = False) -> tuple[Any, list[Any], Any]:
    """A program with a collective and a donated argument, on two devices, and how its argument lies."""
    devices = jax.devices("cpu")[first : first + 2]
    mesh = Mesh(np.array(devices), ("x",))
    split = NamedSharding(mesh, PartitionSpec("x"))

    def body(x: Any) -> Any:
        if callback:
            x = jax.pure_callback(lambda v: v, x, x)
        return scale * x + jax.lax.psum(x, "x")

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"), check_vma=False
    )
    jitted = jax.jit(mapped, in_shardings=split, out_shardings=split, donate_argnums=0)
    return jitted.lower(jax.ShapeDtypeStruct((4,), jnp.float32, sharding=split)), devices, split


def run(shared: Executables, first: int, scale: float, callback: bool = False) -> Any:
    program, devices, split = lowered(first, scale, callback)
    executable = shared.get(program, devices)
    x = jax.device_put(np.arange(4, dtype=np.float32), split)
    y = executable(x)
    assert y.devices() == set(devices) and (x.is_deleted() or callback)
    return np.asarray(y)


def test_equal_programs_are_compiled_once() -> None:
    shared = Executables()
    want = 3 * np.arange(4) + np.array([2, 4, 2, 4])
    for first in (0, 2, 4, 6):
        np.testing.assert_array_equal(run(shared, first, 3.0), want)
    assert (shared.compiled_count, shared.loaded_count) == (1, 3)
    run(shared, 0, 2.0)
    assert shared.compiled_count == 2


def test_programs_that_call_the_host_are_not_shared() -> None:
    shared = Executables()
    assert run(shared, 0, 1.0, True).tolist() == run(shared, 2, 1.0, True).tolist()
    assert (shared.compiled_count, shared.loaded_count) == (2, 0)


def test_stages_that_are_alike_share_their_programs() -> None:
    """Of eight stages the first and the last one differ from those between; each has four programs."""
    place = sbp.placement("cpu", shape=(8,))
    stages = place.split(0)

    def loss(weights: Any, x: Any) -> Any:
        for stage, w in zip(stages, weights, strict=True):
            with sbp.on(stage):
                x = jnp.tanh(x @ w)
        with sbp.on(stages[-1]):
            return jnp.mean(x * x)

    def step(weights: Any, x: Any) -> Any:
        value, grads = sbp.microbatch(jax.value_and_grad(loss), 2, batch_args=1)(weights, x)
        return [w - g for w, g in zip(weights, grads, strict=True)], value

    weights = [0.1 * i + jnp.eye(4) for i in range(8)]
    program = sbp.compile(step, place)
    assert sbp.verify(program, weights, jnp.ones((4, 4))).largest < 1e-5
    built: Any = program._prepare((weights, jnp.ones((4, 4))), {})[1]
    executables = built.executor.executables
    assert (executables.compiled_count, executables.loaded_count) == (11, 21)
