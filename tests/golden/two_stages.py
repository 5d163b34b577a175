"""A train step of two stages and four micro-batches, for plans and profiles; whole on each of its devices."""

import jax
import jax.numpy as jnp

import sbp

MICROBATCHES = 4
step_placement = sbp.placement("cpu", shape=(2, 2), axes=("stage", "data"))
FIRST, LAST = step_placement.split("stage")


def loss(weights, x, y):
    with sbp.on(FIRST):
        h = jnp.tanh(x @ weights["up"])
    with sbp.on(LAST):
        return jnp.mean((h @ weights["down"] - y) ** 2)


def step(weights, x, y):
    value, grads = sbp.microbatch(jax.value_and_grad(loss), MICROBATCHES, batch_args=(1, 2))(weights, x, y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def step_args():
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return {"up": array(16, 32), "down": array(32, 16)}, array(64, 16), array(64, 16)


step_sbp = [sbp.B], [sbp.S(0)], [sbp.S(0)]


def values():
    """Arrays for a call."""
    shapes = step_args()
    keys = iter(jax.random.split(jax.random.key(0), 4))
    return jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape, s.dtype), shapes)
