"""Programs that XLA has compiled, here for the CPU: their FLOPs beside those that XLA counts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from sbp.rates.chips import CHIPS
from sbp.runtime.target.simulation import simulate

H100 = CHIPS["h100"]


def attention(w: jax.Array, x: jax.Array) -> jax.Array:
    q, k, v = jnp.einsum("bsd,tdhe->tbhse", x, w)
    weights = jax.nn.softmax(jnp.einsum("bhqe,bhke->bhqk", q, k))
    return jnp.einsum("bhqk,bhke->bqhe", weights, v).sum()


def convolutions(w: jax.Array, x: jax.Array) -> jax.Array:
    dims = ("NHWC", "HWIO", "NHWC")
    return jnp.tanh(jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=dims)).sum()


def perceptron(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.tanh(x @ w) @ w.T).sum()


@pytest.mark.parametrize(
    ("function", "w", "x"),
    [
        (attention, (3, 128, 8, 16), (4, 64, 128)),
        (convolutions, (3, 3, 32, 32), (4, 16, 16, 32)),
        (perceptron, (256, 512), (128, 256)),
    ],
)
def test_flops_of_products_are_nearly_all_that_xla_counts(
    function: Callable[..., Any], w: tuple[int, ...], x: tuple[int, ...]
) -> None:
    """XLA counts element-wise arithmetic too."""
    args = (jax.ShapeDtypeStruct(w, jnp.float32), jax.ShapeDtypeStruct(x, jnp.float32))
    lowered = jax.jit(jax.grad(function, argnums=(0, 1))).lower(*args)
    found = simulate(lowered.compile(), H100)
    counted: Any = lowered.cost_analysis()
    assert 0.9 < found.flops / counted["flops"] <= 1


def test_a_scan_counts_every_trip() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0]

    args = (jax.ShapeDtypeStruct((12, 64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32))
    found = simulate(jax.jit(step).lower(*args).compile(), H100)
    assert found.flops == 12 * 2 * 32 * 64 * 64
    assert found.unknown_trip_counts == ()


def test_devices_share_the_flops() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("x"))
    args = (
        jax.ShapeDtypeStruct((512, 256), jnp.float32, sharding=rows),
        jax.ShapeDtypeStruct((256, 128), jnp.float32),
    )
    found = simulate(jax.jit(lambda x, w: (x @ w).sum()).lower(*args).compile(), H100)
    assert found.flops == 2 * 512 * 256 * 128 / 8
    assert set(found.network_seconds) == {"nvlink"}
