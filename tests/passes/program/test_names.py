"""What tensors are called: a gradient is called by its argument, however it is made and used."""

import jax
import jax.numpy as jnp
import optax

import sbp
from sbp import AUTO, B, S
from sbp.placement import Placement

LINE = sbp.placement("cpu", shape=(8,))


def sent(fn, *args, in_sbp, on: Placement = LINE) -> set[str]:  # type: ignore[no-untyped-def]
    """The names of the tensors that a plan sends."""
    plan = sbp.compile(fn, on, in_sbp=in_sbp).plan(*args)
    return {c.tensor for c in plan.collectives}


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_gradients_that_a_scan_makes_together() -> None:
    """The backward of a scan has a result per stack of weights."""
    optimizer = optax.adamw(1e-3)
    weights = {"down": array(3, 16, 16), "up": array(3, 16, 16), "scale": array(3, 16)}

    def layer(x, w):  # type: ignore[no-untyped-def]
        return x + jnp.tanh(x @ w["up"]) @ w["down"] * w["scale"], None

    def step(weights, state, x):  # type: ignore[no-untyped-def]
        loss, grads = jax.value_and_grad(lambda w: jnp.square(jax.lax.scan(layer, x, w)[0]).mean())(weights)
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    state = jax.eval_shape(optimizer.init, weights)
    found = sent(step, weights, state, array(1024, 16), in_sbp=([B], [B], [S(0)]))
    assert found == {*(f"gradient of weights['{name}']" for name in weights), "reduce_sum"}


def test_the_gradient_of_what_does_not_divide() -> None:
    """Such an argument is annotated inside: it is used by way of the annotation."""

    def step(w, x):  # type: ignore[no-untyped-def]
        return w - jax.grad(lambda w: jnp.square(x @ w).mean())(w)

    found = sent(step, array(13, 13), array(4096, 13), in_sbp=([S(0)], [S(0)]))
    assert "gradient of w" in found


def test_the_gradient_of_one_weight() -> None:
    def step(w, x):  # type: ignore[no-untyped-def]
        return w - jax.grad(lambda w: jnp.square(x @ w).mean())(w)

    assert sent(step, array(16, 16), array(4096, 16), in_sbp=(AUTO, [S(0)])) == {"gradient of w"}


def test_the_gradient_of_a_weight_of_two_stages() -> None:
    """Each stage adds up its part over micro-batches; these meet where the weight lives."""
    line = sbp.placement("cpu", shape=(2,), axes=("stage",))
    first, second = line.split("stage")
    optimizer = optax.adam(0.1)

    def loss(w, x):  # type: ignore[no-untyped-def]
        with sbp.on(first):
            low = jnp.tanh(x @ w)
        with sbp.on(second):
            return jnp.square(low @ w.T - x).mean()

    def step(w, state, x):  # type: ignore[no-untyped-def]
        value, grad = sbp.microbatch(jax.value_and_grad(loss), 4, batch_args=1)(w, x)
        updates, state = optimizer.update(grad, state, w)
        return optax.apply_updates(w, updates), state, value

    w = array(8, 16)
    plan = sbp.compile(step, line).plan(w, jax.eval_shape(optimizer.init, w), array(16, 8))
    assert "part of the gradient of w" in {s.tensor for s in plan.sends}
