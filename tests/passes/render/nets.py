"""Programs that the tests of pictures and pages draw."""

import jax
import jax.numpy as jnp

import sbp
from sbp import B, S
from sbp.passes.face import Plan


def deep(layers: int, shape: tuple[int, ...] = (2, 2)) -> Plan:
    """A residual network of many layers, without scopes: its lines are all the same."""

    def block(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        hidden = x @ w["up"]
        hidden = jnp.tanh(hidden)
        return x + hidden @ w["down"]

    def loss(ws: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for w in ws:
            x = block(x, w)
        return jnp.square(x).mean()

    def step(ws, x):  # type: ignore[no-untyped-def]
        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws, x))

    w = {"down": jax.ShapeDtypeStruct((64, 16), "float32"), "up": jax.ShapeDtypeStruct((16, 64), "float32")}
    given = [{"down": [B, S(0)], "up": [B, S(1)]}] * layers, [S(0), B]
    program = sbp.compile(step, sbp.placement("cpu", shape=shape), in_sbp=given)
    return program.plan([w] * layers, jax.ShapeDtypeStruct((32, 16), "float32"))


def scanned() -> Plan:
    """A loop over stacked weights, one of which is gathered inside."""

    def f(x: jax.Array, ws: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]

    program = sbp.compile(f, sbp.placement("cpu", shape=(4,)), in_sbp=([S(0)], [S(1)]))
    return program.plan(
        jax.ShapeDtypeStruct((8, 16), "float32"), jax.ShapeDtypeStruct((3, 16, 16), "float32")
    )


def piped() -> Plan:
    """Two stages with micro-batches."""
    whole = sbp.placement("cpu", shape=(2, 2), axes=("stage", "data"))
    first, last = whole.split("stage")

    def loss(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        with sbp.on(first):
            h = jax.nn.relu(x @ weights["up"])
        with sbp.on(last):
            return jnp.mean((h @ weights["down"] - y) ** 2)

    def step(weights, x, y):  # type: ignore[no-untyped-def]
        gradients = sbp.microbatch(jax.value_and_grad(loss), 4, batch_args=(1, 2))
        value, grads = gradients(weights, x, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, "float32")

    program = sbp.compile(step, whole, in_sbp=([B], [S(0)], [S(0)]))
    weights = {"up": shape(64, 256), "down": shape(256, 64)}
    return program.plan(weights, shape(4096, 64), shape(4096, 64))
