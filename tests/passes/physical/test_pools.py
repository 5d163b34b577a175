"""What gradients of max pooling hold."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import sbp
from sbp.passes.physical.fusing import ShardSizes, op_of
from sbp.passes.physical.kernels import kernels
from sbp.passes.physical.pools import Places, places

IMAGE = (16, 32, 32, 64)
BYTES = 4 * 16 * 32 * 32 * 64


def pooled(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")


def waiting(x: Any) -> Any:
    """A mean over the batch behind the pool is a collective."""
    y = pooled(jnp.tanh(x))
    return jnp.square(y - y.mean(0)).sum()


def found(fn: Any, devices: int, hides: bool) -> list[Places]:
    program = sbp.compile(fn, sbp.placement("h100", shape=(devices,)), in_sbp=[sbp.S(0)])
    p = program.plan(jax.ShapeDtypeStruct(IMAGE, jnp.float32)).physical
    assert p is not None
    sizes, held = ShardSizes(p), list(zip(p.graph.inputs, p.inputs, strict=True))
    kept: Any = list(zip(p.graph.outputs, p.outputs, strict=True))
    k = kernels([op_of(s, p) for s in p.steps], sizes, kept, held)
    return list(places(k, sizes, range(len(k.ops) + 1), hides))


def test_a_number_per_dim_and_maximum() -> None:
    [one] = found(jax.grad(lambda x: jnp.square(pooled(jnp.tanh(x))).sum()), 1, hides=True)
    # Four dims; a quarter of the numbers are maxima.
    assert one.places_bytes == BYTES
    # The gradient takes the space of the zeros at once.
    assert one.first == one.last and one.zeros_bytes == 0


def test_they_are_early_beside_collectives() -> None:
    [early] = found(jax.grad(waiting), 8, hides=True)
    [late] = found(jax.grad(waiting), 8, hides=False)
    assert early.first < early.last == late.first == late.last
    assert early.zeros_bytes == 2 * BYTES / 8


def test_other_pools_have_none() -> None:
    assert found(pooled, 1, hides=True) == []
    mean = jax.grad(
        lambda x: jnp.square(lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")).sum()
    )
    assert found(mean, 1, hides=True) == []
