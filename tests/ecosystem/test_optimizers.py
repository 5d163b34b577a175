"""Every optimizer of optax that people use, unchanged: equal to one device, split or AUTO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp.signature import AUTO, S

STEPS = 20
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 3e-2, 5, STEPS)
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd with momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lion": lambda: optax.lion(1e-3),
    "lamb": lambda: optax.lamb(1e-2),
    "clipped adam": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    "schedule": lambda: optax.adamw(SCHEDULE),
    "accumulation": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=3).gradient_transformation(),
}
# Parameters and their state split (ZeRO), or everything open.
SIGNATURES = {"zero": ((8,), ([S(0)], AUTO, [S(0)])), "auto": ((2, 4), AUTO)}


def init(dtype: Any) -> Any:
    rng = np.random.default_rng(0)
    shapes = {"w1": (16, 32), "b1": (32,), "w2": (32, 24), "w3": (24, 1)}
    return {k: jnp.asarray(rng.normal(size=s) * 0.3, dtype) for k, s in shapes.items()}


def batch(i: int, dtype: Any) -> Any:
    x = np.random.default_rng(i).normal(size=(24, 16))
    return x.astype(dtype), np.sin(x.sum(1, keepdims=True)).astype(dtype)


def make_step(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    def loss(p: Any, data: Any) -> Any:
        x, y = data
        h = jnp.tanh(x @ p["w1"] + p["b1"])
        return jnp.mean((jax.nn.gelu(h @ p["w2"]) @ p["w3"] - y) ** 2)

    def step(params: Any, state: Any, data: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, data)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def run(
    step: Callable[..., Any], optimizer: optax.GradientTransformation, dtype: Any
) -> tuple[Any, list[float]]:
    params, losses = init(dtype), []
    state = optimizer.init(params)
    for i in range(STEPS):
        params, state, loss = step(params, state, batch(i, dtype))
        losses.append(float(loss))
    return params, losses


@pytest.mark.some(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", SIGNATURES)
def test_equals_one_device(name: str, how: str, x64: None) -> None:
    """Losses and parameters over 20 steps, in float64, which separates bugs from rounding."""
    shape, in_sbp = SIGNATURES[how]
    optimizer = OPTIMIZERS[name]()
    step = make_step(optimizer)
    program = sbp.compile(step, sbp.placement("cpu", shape=shape), in_sbp=in_sbp)
    params, losses = run(program, optimizer, np.float64)
    expected, one = run(jax.jit(step), optimizer, np.float64)
    assert losses == pytest.approx(one, rel=1e-10)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("name", ("adamw", "lamb"))
def test_float32_losses(name: str) -> None:
    """Losses over 20 steps within 1e-5, in float32."""
    optimizer = OPTIMIZERS[name]()
    step = make_step(optimizer)
    shape, in_sbp = SIGNATURES["zero"]
    program = sbp.compile(step, sbp.placement("cpu", shape=shape), in_sbp=in_sbp)
    assert run(program, optimizer, np.float32)[1] == pytest.approx(
        run(jax.jit(step), optimizer, np.float32)[1], rel=1e-5
    )
