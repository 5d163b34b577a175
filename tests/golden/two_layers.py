"""A two-layer network and its train step: what the golden plan and the command line's tests are about."""

import jax
import jax.numpy as jnp

from sbp import B, S


def loss(weights, x):
    """A mean of squares, so that there is no label to carry about."""
    hidden = jnp.tanh(x @ weights["up"])
    return jnp.square(hidden @ weights["down"]).mean()


def step(weights, x):
    """One step of gradient descent."""
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def step_args():
    """The shapes that the step is planned for."""
    weights = {
        "down": jax.ShapeDtypeStruct((4096, 512), "float32"),
        "up": jax.ShapeDtypeStruct((512, 4096), "float32"),
    }
    return weights, jax.ShapeDtypeStruct((8192, 512), "float32")


def step_sbp(placement):
    """Data parallel over all axes but the last, tensor parallel over that."""
    data = placement.ndim - 1
    return (
        {"down": [*[B] * data, S(0)], "up": [*[B] * data, S(1)]},
        [*[S(0)] * data, B],
    )


# For the tests of the command line.
small_args = (
    {"down": jax.ShapeDtypeStruct((16, 8), "float32"), "up": jax.ShapeDtypeStruct((8, 16), "float32")},
    jax.ShapeDtypeStruct((32, 8), "float32"),
)
whole_sbp = ({"down": [B, B], "up": [B, B]}, [S(0), B])
wrong_sbp = ({"down": [B, S(7)], "up": [B, S(1)]}, [S(0), B])


def repeat(weights, x):
    """The two layers again and again, with other weights."""
    return jax.lax.scan(lambda y, w: (y + jnp.tanh(y @ w["up"]) @ w["down"], None), x, weights)[0]


repeat_args = (
    {
        "down": jax.ShapeDtypeStruct((6, 4096, 512), "float32"),
        "up": jax.ShapeDtypeStruct((6, 512, 4096), "float32"),
    },
    jax.ShapeDtypeStruct((256, 512), "float32"),
)
repeat_sbp = ({"down": [S(1)], "up": [S(2)]}, [B])


def lonely(x):
    """A function without arguments beside it."""
    return x + 1
