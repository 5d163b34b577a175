"""What each axis of a placement does, in words."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import sbp
from sbp import B, S
from sbp.passes.explain.parallelism import AxisUse, axis_uses, named_state, parallelism_text
from tests.golden.hardware import HARDWARE

# Arithmetic takes so long that plans do as they are told, and split all of it.
SLOW = replace(HARDWARE, flops_per_second=((4, 1e11),), vector_flops_per_second=1e11)
OPTIMIZER = optax.adam(1e-3)
STATE = {"w['down']", "w['up']"}


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


WEIGHTS = {"down": array(1024, 256), "up": array(256, 1024)}


def loss(w: Any, x: Any) -> Any:
    return jnp.square(jnp.tanh(x @ w["up"]) @ w["down"]).mean()


def step(w: Any, x: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x))


def plan_of(fn: Any, shape: tuple[int, ...], in_sbp: Any, *args: Any) -> sbp.Plan:
    options = sbp.Options(hardware=SLOW)
    return sbp.compile(fn, sbp.placement("h100", shape=shape), in_sbp=in_sbp, options=options).plan(*args)


@pytest.mark.parametrize(
    ("shape", "weights", "x", "words"),
    [
        ((8,), [B], [S(0)], "8 data"),
        ((8,), [S(0)], [S(0)], "8 data + ZeRO-3"),
        ((2, 4), {"down": [B, S(0)], "up": [B, S(1)]}, [S(0), B], "2 data, 4 tensor"),
        ((2, 4), [B, B], [S(0), S(0)], "8 data"),
        ((1, 8), [B, B], [B, S(0)], "8 data"),
        ((1,), [B], [B], "alone"),
    ],
)
def test_a_train_step(shape: tuple[int, ...], weights: Any, x: Any, words: str) -> None:
    """The signatures as given; axes of one use are one."""
    plan = plan_of(step, shape, (weights, x), WEIGHTS, array(4096, 256))
    assert parallelism_text(plan, STATE) == words


def test_a_sequence_is_another_dim_of_the_batch() -> None:
    plan = plan_of(step, (2, 4), ([B, B], [S(0), S(1)]), WEIGHTS, array(16, 256, 256))
    assert parallelism_text(plan, STATE) == "2 data, 4 sequence"


def adam_step(w: Any, state: Any, x: Any) -> Any:
    updates, state = OPTIMIZER.update(jax.grad(loss)(w, x), state, w)
    return optax.apply_updates(w, updates), state


@pytest.mark.parametrize(
    ("weights", "state", "words"),
    [(B, B, "8 data"), (B, S(0), "8 data + ZeRO-1"), (S(0), S(0), "8 data + ZeRO-3")],
)
def test_the_state_of_an_optimizer(weights: Any, state: Any, words: str) -> None:
    at = jax.eval_shape(OPTIMIZER.init, WEIGHTS)
    plan = plan_of(adam_step, (8,), ([weights], [state], [S(0)]), WEIGHTS, at, array(4096, 256))
    assert parallelism_text(plan, {p for p in plan.in_paths if p != "x"}) == words


def test_layers_of_a_scan() -> None:
    """Weights are found through the border of the loop, and what is cut out of them."""

    def layers(w: Any, x: Any) -> Any:
        def deep(w: Any) -> Any:
            return jnp.square(jax.lax.scan(lambda y, v: (jnp.tanh(y @ v), None), x, w)[0]).mean()

        return w - jax.grad(deep)(w)

    plan = plan_of(layers, (4,), ([B], [S(0)]), array(6, 256, 256), array(4096, 256))
    assert parallelism_text(plan, {"w"}) == "4 data"


def test_a_program_without_layers() -> None:
    """The largest argument speaks for it."""
    plan = plan_of(lambda x, y: (x * 2, y + 1), (4,), ([S(1)], [B]), array(64, 64), array(8))
    assert axis_uses(plan, ()) == () and parallelism_text(plan, ()) == "x [S(1)]"
    assert parallelism_text(plan_of(lambda: jnp.ones(3), (4,), sbp.AUTO), ()) == "no arguments"


def test_words() -> None:
    assert str(AxisUse(8, ("tensor", "data"), "")) == "8 tensor and data"
    assert str(AxisUse(8, (), "ZeRO-3")) == "8 copies + ZeRO-3"
    assert list(named_state(("a", "b", "c"), (2, None, 0))) == ["c", "a"]
