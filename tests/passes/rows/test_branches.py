"""Lazy steps in branches: they are taken on gradients that may be zero, and all is as on one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp import B, S
from tests.passes.rows.test_gradient_accumulation import micro_batches
from tests.passes.rows.test_tables import DEAR, LINE, batch, compare, sums, table_sized, updates

IN_SBP = [S(0)], sbp.AUTO, [B], [S(0)]
Choice = Callable[[Any, Any, Any, Any], Any]


def adam() -> Any:
    """A lazy optimizer with state by rows, and a count."""
    return sbp.rows(optax.adam(0.05))


def if_finite() -> Any:
    """Steps whose gradients are not finite are left out, twice at the most."""
    return optax.apply_if_finite(adam(), 2)


def trained(table: Any, weight: Any, ids: Any) -> Any:
    """A gradient by rows; one id makes it infinite."""
    odd = jnp.where(ids.max() == 0, jnp.inf, 1.0)
    return jax.grad(lambda t: odd * jnp.square(sums(t, ids) @ weight - 1).mean())(table)


def stepping(tx: Any, gradient: Callable[..., Any] = trained) -> Callable[..., Any]:
    """A step of an optimizer."""

    def step(table: Any, state: Any, weight: Any, ids: Any) -> Any:
        added, state = tx.update(gradient(table, weight, ids), state, table)
        return optax.apply_updates(table, added), state, weight, jnp.zeros(())

    return step


@pytest.mark.some(1)
@pytest.mark.parametrize("gradient", [trained, micro_batches])
def test_a_step_if_all_is_finite(gradient: Callable[..., Any]) -> None:
    plan = compare(stepping(if_finite(), gradient), if_finite(), LINE, IN_SBP, steps=2, hardware=DEAR)
    assert len(updates(plan)) == 1 and table_sized(plan) == 0
    assert plan.physical is not None
    assert all(node.op != "cond" for node in plan.physical.graph.walk())


def test_steps_that_are_left_out() -> None:
    """One of four is not finite; of three more in a row the last is taken all the same, and rows are NaN."""
    step, tx = stepping(if_finite()), if_finite()
    rng = np.random.default_rng(0)
    table, weight = rng.normal(size=(400, 6)).astype(np.float32), rng.normal(size=(6, 2)).astype(np.float32)
    one = many = table, jax.tree.map(np.asarray, tx.init(table)), weight
    program, plain = sbp.compile(step, LINE, in_sbp=IN_SBP), jax.jit(step)
    zeros = np.zeros((16, 3), np.int32)
    for ids in (batch(0), zeros, batch(1), zeros, zeros, zeros):
        *one, _ = plain(*one, ids)
        *many, _ = program(*many, ids)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    assert np.isnan(np.asarray(many[0])).any(axis=1).sum() == 1


def choosing(choice: Choice) -> Callable[[Any], Callable[..., Any]]:
    """A step in one of several branches."""

    def made(tx: Any) -> Callable[..., Any]:
        def step(table: Any, state: Any, weight: Any, ids: Any) -> Any:
            grad = trained(table, weight, ids)
            added, state = choice(tx, grad, state, table)
            return table + added, state, weight, jnp.zeros(())

        return step

    return made


def of_three(tx: Any, grad: Any, state: Any, table: Any) -> Any:
    """The last of three branches, by a number that may be out of bounds."""
    nothing = lambda g, s, t: (jnp.zeros_like(g), s)  # noqa: E731
    return jax.lax.switch(7 + (grad[0, 0] > 0), [nothing, nothing, tx.update], grad, state, table)


def of_two_steps(tx: Any, grad: Any, state: Any, table: Any) -> Any:
    """Two branches take steps."""
    twice = lambda g, s, t: tx.update(2 * g, s, t)  # noqa: E731
    return jax.lax.cond(grad.sum() > 0, tx.update, twice, grad, state, table)


def forgetting(tx: Any, grad: Any, state: Any, table: Any) -> Any:
    """The branch without a step begins anew."""
    anew = lambda g, s, t: (jnp.zeros_like(g), jax.tree.map(jnp.zeros_like, s))  # noqa: E731
    return jax.lax.cond(grad.sum() > 0, tx.update, anew, grad, state, table)


def moving(tx: Any, grad: Any, state: Any, table: Any) -> Any:
    """The branch without a step moves the table too."""
    away = lambda g, s, t: (0.1 * t, s)  # noqa: E731
    return jax.lax.cond(grad.sum() > 0, tx.update, away, grad, state, table)


def test_one_of_three_branches() -> None:
    plan = compare(choosing(of_three)(adam()), adam(), LINE, IN_SBP, steps=2, hardware=DEAR)
    assert len(updates(plan)) == 1


@pytest.mark.some(1)
@pytest.mark.parametrize("choice", [of_two_steps, forgetting, moving])
def test_other_branches_stay(choice: Choice) -> None:
    plan = compare(choosing(choice)(adam()), adam(), LINE, IN_SBP, steps=2)
    assert plan.physical is not None
    assert any(node.op == "cond" for node in plan.physical.graph.walk())
