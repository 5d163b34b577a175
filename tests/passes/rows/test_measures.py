"""Norms and checks of gradients by rows: which need no table, and that they are those of one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import sbp
from sbp import B, S
from sbp.passes.physical.program import Compute
from tests.passes.rows.test_tables import (
    DEAR,
    GRID,
    LINE,
    compare,
    make_step,
    rescaled,
    sums,
    table_sized,
    updates,
)

# Duplicates of an id are added up before anything is measured, and most rows of the table have none.
MEASURES: dict[str, Callable[[Any], Any]] = {
    "norm": optax.tree.norm,
    "powers": lambda g: jnp.sum(g**2),
    "products": lambda g: jnp.sum(g * g),
    "absolute": lambda g: jnp.sum(jnp.abs(g)),
    "short": lambda g: jnp.sum(jnp.square(g.astype(jnp.bfloat16))).astype(jnp.float32),
    "scaled": lambda g: jnp.sum(jnp.square(g / (1 + jnp.abs(g).sum()))),
    "above": lambda g: jnp.sum(g > 0.01).astype(jnp.float32),
    "finite": lambda g: jnp.isfinite(g).all().astype(jnp.float32),
    "nan": lambda g: jnp.isnan(g).any().astype(jnp.float32),
}
# A zero counts for something in these, or rows do not add up.
OTHERS: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda g: jnp.exp(g).sum(),
    "below": lambda g: jnp.sum(g < 0.01).astype(jnp.float32),
    "largest": lambda g: jnp.abs(g).max(),
    "by row": lambda g: jnp.sqrt(jnp.square(g).sum(1)).sum(),
    "places": lambda g: jnp.sum(g * jnp.arange(g.shape[0])[:, None]),
}


def divided_by(measure: Callable[[Any], Any]) -> Callable[[Any], Callable[..., Any]]:
    """A step whose gradient is divided by what a measure says."""

    def made(tx: Any) -> Callable[..., Any]:
        def step(table: Any, state: Any, weight: Any, ids: Any) -> Any:
            grad = jax.grad(lambda t: jnp.square(sums(t, ids) @ weight - 1).mean())(table)
            added, state = tx.update(grad / (1 + measure(grad)), state, table)
            return optax.apply_updates(table, added), state, weight, jnp.zeros(())

        return step

    return made


def measures(plan: sbp.Plan) -> int:
    """How many sums over rows a program has."""
    assert plan.physical is not None
    steps = (s for s, _ in plan.physical.walk())
    return sum(isinstance(s, Compute) and s.node.op == "sbp_sum_rows" for s in steps)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", MEASURES)
def test_measures_need_no_table(name: str) -> None:
    tx = sbp.rows(optax.adagrad(0.1))
    tolerance = 2e-2 if name == "short" else 2e-5
    in_sbp = [S(0)], sbp.AUTO, [B], [S(0)]
    step = divided_by(MEASURES[name])(tx)
    plan = compare(step, tx, LINE, in_sbp, tolerance=tolerance, hardware=DEAR)
    assert measures(plan) == 1 + (name == "scaled") and len(updates(plan)) == 1 and table_sized(plan) == 0


@pytest.mark.some(1)
@pytest.mark.parametrize("name", OTHERS)
def test_other_reductions_are_of_the_whole_table(name: str) -> None:
    tx = sbp.rows(optax.adagrad(0.1))
    plan = compare(divided_by(OTHERS[name])(tx), tx, LINE, ([S(0)], sbp.AUTO, [B], [S(0)]))
    assert not measures(plan) and table_sized(plan)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("place", "table", "ids"),
    [
        (GRID, [S(0), S(0)], [S(0), S(0)]),
        (GRID, [S(0), S(1)], [S(0), B]),
        (GRID, [B, S(0)], [S(0), S(0)]),
        (LINE, [S(1)], [S(0)]),
        (LINE, [B], [S(0)]),
    ],
    ids=str,
)
def test_the_table_may_lie_in_any_way(place: sbp.Placement, table: Any, ids: Any) -> None:
    tx = sbp.rows(optax.adam(0.05))
    step = divided_by(MEASURES["norm"])(tx)
    assert measures(compare(step, tx, place, (table, sbp.AUTO, None, ids), hardware=DEAR)) == 1


def clipped() -> Any:
    """A lazy optimizer behind a norm of all gradients."""
    return optax.chain(optax.clip_by_global_norm(0.1), sbp.rows(optax.adagrad(0.1)))


def test_clipping_by_the_norm() -> None:
    plan = compare(make_step(clipped()), clipped(), LINE, ([S(0)], sbp.AUTO, [B], [S(0)]), hardware=DEAR)
    assert measures(plan) == len(updates(plan)) == 1 and table_sized(plan) == 0


def skipped(tx: Any, scale: float) -> Callable[..., Any]:
    """A loss is scaled up, and a step whose gradient is not finite counts as one without a gradient."""

    def step(table: Any, state: Any, weight: Any, ids: Any) -> Any:
        size = scale * (1 + jnp.square(weight).sum())
        grad = jax.grad(lambda t: size * jnp.square(sums(t, ids) @ weight - 1).mean())(table)
        grad = jnp.where(jnp.isfinite(grad).all(), grad / size, 0)
        added, state = tx.update(grad, state, table)
        return optax.apply_updates(table, added), state, weight, jnp.zeros(())

    return step


@pytest.mark.some(1)
@pytest.mark.parametrize("scale", [1024.0, 3e38])
def test_a_loss_scale(scale: float) -> None:
    tx = sbp.rows(optax.adagrad(0.1))
    plan = compare(skipped(tx, scale), tx, LINE, ([S(0)], sbp.AUTO, [B], [S(0)]), hardware=DEAR)
    assert measures(plan) == len(updates(plan)) == 1 and table_sized(plan) == 0


def test_numbers_that_may_not_be_finite() -> None:
    """They scale rows, unless all is to be as on one device where they are not."""
    tx = sbp.rows(optax.sgd(0.1))
    usual, strict = (
        compare(rescaled(tx), tx, LINE, ([S(0)], sbp.AUTO, [B], [S(0)]), strict_nonfinite=strict)
        for strict in (False, True)
    )
    assert len(updates(usual)) == 1 and not updates(strict)
    assert any("scaled by a number that may not be finite" in note for note in strict.notes)


def test_gradients_of_other_lookups_are_not_mixed() -> None:
    """A choice between the gradients of two lookups is no gradient by rows of either."""
    tx = sbp.rows(optax.sgd(0.1))

    def step(table: Any, state: Any, weight: Any, ids: Any) -> Any:
        first, second = (
            jax.grad(lambda t, i=i: jnp.square(sums(t, i) @ weight).mean())(table) for i in (ids, ids + 1)
        )
        added, state = tx.update(jnp.where(weight.sum() > 0, first, second), state, table)
        return optax.apply_updates(table, added), state, weight, jnp.zeros(())

    plan = compare(step, tx, LINE, ([S(0)], sbp.AUTO, [B], [S(0)]))
    assert not updates(plan)
    assert any("does not come only from lookups: select_n" in note for note in plan.notes)
