"""Ops without a tensor to split: branches by platform, and numbers from a device's own state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp import S
from sbp.runtime.hlo.meter import read_compiled

GRID = sbp.placement("cpu", shape=(2, 4))


def test_branches_by_platform_are_split() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return lax.platform_dependent(x, cpu=lambda x: jnp.sin(x), default=lambda x: jnp.cos(x))

    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    program = sbp.compile(fn, GRID, in_sbp=([S(0), S(0)],), out_sbp=[S(0), S(0)])
    plan = program.plan(x)
    assert (plan.notes, plan.wire_bytes) == ((), 0)
    np.testing.assert_allclose(program(x), np.sin(x), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.int32], ids=lambda t: t.__name__)
def test_numbers_of_a_device_are_the_same_on_all(dtype: type) -> None:
    """They differ from call to call, as on one device; what is made of the parts is made of one draw."""

    def fn(low: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        drawn = lax.rng_uniform(low, dtype(90), x.shape)
        return drawn, sbp.annotate(drawn + x, [S(0), S(0)])

    x = np.zeros((16, 3), dtype)
    program = sbp.compile(fn, GRID, out_sbp=([sbp.B, sbp.B], [S(0), S(0)]))
    plan = program.plan(dtype(10), x)
    assert not plan.notes
    assert "the numbers that the first one drew" in plan.collectives[0].reason
    compiled = program.lower(dtype(10), x).compile()
    assert read_compiled(compiled).wire_bytes == pytest.approx(plan.wire_bytes)
    drawn, parts = program(dtype(10), x)
    for shard in drawn.addressable_shards:
        np.testing.assert_array_equal(shard.data, drawn)
    np.testing.assert_array_equal(parts, drawn)
    assert np.min(drawn) >= 10 and np.max(drawn) < 90 and len(np.unique(drawn)) > 5
