"""What gradients of max pooling hold."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import sbp
from sbp.passes.physical.fusing import ShardSizes, op_of
from sbp.passes.physical.kernels import kernels
from sbp.passes.physical.layouts import Places, places
from sbp.passes.physical.order import turns

IMAGE = (16, 32, 32, 64)
BYTES = 4 * 16 * 32 * 32 * 64


def pooled(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")


def waiting(x: Any) -> Any:
    """A mean over the batch behind the pool is a collective."""
    y = pooled(jnp.tanh(x))
    return jnp.square(y - y.mean(0)).sum()


def found(fn: Any, devices: int, hides: bool) -> list[Places]:
    """What is found where a collective is as long as a kernel, or nothing hides it."""
    program = sbp.compile(fn, sbp.placement("h100", shape=(devices,)), in_sbp=[sbp.S(0)])
    p = program.plan(jax.ShapeDtypeStruct(IMAGE, jnp.float32)).physical
    assert p is not None
    sizes, held = ShardSizes(p), list(zip(p.graph.inputs, p.inputs, strict=True))
    kept: Any = list(zip(p.graph.outputs, p.outputs, strict=True))
    k = kernels([op_of(s, p) for s in p.steps], sizes, kept, held)
    there = {t for t in k.tensors if t.maker < 0}
    return list(places(k, sizes, turns(k, there, (lambda op: 1.0) if hides else None)))


def test_a_number_per_dim_and_maximum() -> None:
    [one] = found(jax.grad(lambda x: jnp.square(pooled(jnp.tanh(x))).sum()), 1, hides=True)
    # Four dims; a quarter of the numbers are maxima.
    assert one.places_bytes == BYTES
    # They are found as early as they can be, and the gradient takes the space of the zeros.
    assert one.first < one.last and one.zeros_bytes == 0


def test_they_are_early_beside_collectives() -> None:
    [early] = found(jax.grad(waiting), 8, hides=True)
    [late] = found(jax.grad(waiting), 8, hides=False)
    assert early.first < early.last and late.first < late.last
    assert early.zeros_bytes == BYTES / 8 and late.zeros_bytes == 0


def test_other_pools_have_none() -> None:
    assert found(pooled, 1, hides=True) == []
    mean = jax.grad(
        lambda x: jnp.square(lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")).sum()
    )
    assert found(mean, 1, hides=True) == []
