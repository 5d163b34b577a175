"""A small train step whose layers lie in a scan: momentum, gradients clipped by the norm of all of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import sbp

LAYERS, WIDTH, BATCH, PARTS = 4, 8, 16, 4


def layer(x: Any, w: Any) -> Any:
    """One layer; its two products are what may be kept."""
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def loss(params: Any, x: Any, *, layers: int = LAYERS, checkpoint: bool = True) -> Any:
    """The mean square of what all layers make of a batch."""
    one = jax.checkpoint(layer, prevent_cse=False) if checkpoint else layer
    x = x @ params["first"]
    x, _ = lax.scan(lambda x, w: (one(x, w), None), x, params["layers"], length=layers)
    return jnp.mean((x @ params["last"]) ** 2)


def step_of(parts: int = PARTS, checkpoint: bool = True) -> Callable[..., Any]:
    """The train step with so many micro-batches."""
    gradients = jax.value_and_grad(lambda p, x: loss(p, x, checkpoint=checkpoint))

    def train_step(params: Any, speed: Any, x: Any) -> Any:
        value, grads = sbp.microbatch(gradients, parts, batch_args=1)(params, x)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        speed = jax.tree.map(lambda s, g: 0.9 * s + g / jnp.maximum(norm, 1.0), speed, grads)
        return jax.tree.map(lambda w, s: w - 0.1 * s, params, speed), speed, value

    return train_step


def arguments(layers: int = LAYERS) -> tuple[Any, ...]:
    """Weights, their speeds and a batch."""
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "first": jax.random.normal(keys[0], (WIDTH, WIDTH)),
        "layers": {
            "up": 0.3 * jax.random.normal(keys[1], (layers, WIDTH, 2 * WIDTH)),
            "down": 0.3 * jax.random.normal(keys[2], (layers, 2 * WIDTH, WIDTH)),
        },
        "last": jax.random.normal(keys[3], (WIDTH, WIDTH)),
    }
    return params, jax.tree.map(jnp.zeros_like, params), jax.random.normal(keys[4], (BATCH, WIDTH))
