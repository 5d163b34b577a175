"""Sums of gradients that loops carry: rows are stacked and added to the table once, as on one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp import B, S
from sbp.compat.core import scan_counts
from tests.passes.rows.test_measures import clipped
from tests.passes.rows.test_tables import (
    DEAR,
    GRID,
    LINE,
    ROWS,
    WIDTH,
    batch,
    compare,
    sums,
    table_sized,
    twice,
    updates,
)

PARTS = 4


def loss(table: Any, ids: Any, weight: Any, lookup: Callable[..., Any] = sums) -> Any:
    """What the parts of a batch have in common."""
    return jnp.square(lookup(table, ids) @ weight - 1).mean()


def stepping(accumulated: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """Steps with a gradient that is the sum over parts of the batch."""

    def made(tx: Any) -> Callable[..., Any]:
        def step(table: Any, state: Any, weight: Any, ids: Any) -> Any:
            grad = accumulated(table, weight, ids)
            added, state = tx.update(grad, state, table)
            return optax.apply_updates(table, added), state, weight, jnp.zeros(())

        return step

    return made


def micro_batches(table: Any, weight: Any, ids: Any) -> Any:
    """As `sbp.microbatch` adds up."""
    part = lambda t, i: jax.grad(loss)(t, i, weight)  # noqa: E731
    return sbp.microbatch(part, PARTS, batch_args=1)(table, ids)


def two_lookups(table: Any, weight: Any, ids: Any) -> Any:
    """The table is looked up twice in each part."""
    part = lambda t, i: jax.grad(loss)(t, i, weight, twice)  # noqa: E731
    return sbp.microbatch(part, PARTS, batch_args=1)(table, ids)


def scanned(trip: Callable[..., Any]) -> Callable[..., Any]:
    """A scan of the user's own over the parts."""

    def run(table: Any, weight: Any, ids: Any) -> Any:
        parts = ids.reshape(PARTS, -1, ids.shape[-1])
        begin = jnp.zeros_like(table), jnp.zeros(())
        (total, other), _ = jax.lax.scan(lambda carry, i: (trip(carry, table, weight, i), None), begin, parts)
        return total / (1 + other)

    return run


def averaged(carry: Any, table: Any, weight: Any, ids: Any) -> Any:
    """The mean is added up, and beside it the losses."""
    value, grad = jax.value_and_grad(loss)(table, ids, weight)
    return carry[0] + grad / PARTS, carry[1] + value


def in_place(carry: Any, table: Any, weight: Any, ids: Any) -> Any:
    """Rows are added to what is carried."""
    return carry[0].at[ids].add(0.1 * table[ids], mode="drop"), carry[1]


def decayed(carry: Any, table: Any, weight: Any, ids: Any) -> Any:
    """What was added before counts less: more than a sum."""
    return 0.9 * carry[0] + jax.grad(loss)(table, ids, weight), carry[1]


def watched(carry: Any, table: Any, weight: Any, ids: Any) -> Any:
    """What is carried is looked at too."""
    return carry[0] + jax.grad(loss)(table, ids, weight), carry[1] + jnp.abs(carry[0]).max()


def of_the_sum(carry: Any, table: Any, weight: Any, ids: Any) -> Any:
    """Gradients depend on those before."""
    return carry[0] + jax.grad(loss)(table + carry[0], ids, weight), carry[1]


SUMS = {
    "micro-batches": micro_batches,
    "two lookups": two_lookups,
    "averaged": scanned(averaged),
    "in place": scanned(in_place),
}
OTHERS = {"decayed": scanned(decayed), "watched": scanned(watched), "of the sum": scanned(of_the_sum)}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", SUMS)
def test_rows_are_stacked(name: str) -> None:
    tx = sbp.rows(optax.adagrad(0.1))
    in_sbp = [S(0)], sbp.AUTO, [B], [S(0)]
    plan = compare(stepping(SUMS[name])(tx), tx, LINE, in_sbp, steps=2, hardware=DEAR)
    assert len(updates(plan)) == 1 and table_sized(plan) == 0


@pytest.mark.some(1)
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_more_than_a_sum_is_carried(name: str) -> None:
    tx = sbp.rows(optax.adagrad(0.1))
    plan = compare(stepping(OTHERS[name])(tx), tx, LINE, ([S(0)], sbp.AUTO, [B], [S(0)]), steps=1)
    assert not updates(plan) and table_sized(plan)
    (note,) = [n for n in plan.notes if n.startswith("sbp.rows at ")]
    assert "does not come only from lookups: scan at" in note


def test_on_a_grid_behind_a_norm() -> None:
    """The norm is of the sum, of which rows come twice."""
    in_sbp = [S(0), S(1)], sbp.AUTO, None, [S(0), B]
    step = stepping(micro_batches)(clipped())
    assert len(updates(compare(step, clipped(), GRID, in_sbp, steps=2, hardware=DEAR))) == 1


def test_a_sum_that_is_not_trained_is_carried() -> None:
    """Its rows may be more than the table has."""

    def step(table: Any, state: Any, weight: Any, ids: Any) -> Any:
        return table - micro_batches(table, weight, ids), state, weight, jnp.zeros(())

    plan = compare(step, optax.sgd(0.1), LINE, ([S(0)], sbp.AUTO, [B], [S(0)]), steps=1)
    assert plan.physical is not None
    loops = [n for n in plan.physical.graph.walk() if n.op == "scan"]
    assert [scan_counts(n.params, len(n.inputs))[1] for n in loops] == [1]


def test_stages_hand_out_the_rows_of_all_micro_batches() -> None:
    """A table on each of two stages: neither makes a gradient of its size."""
    first, second = (whole := sbp.placement("cpu", shape=(2, 4))).split(0)
    tx = sbp.rows(optax.adagrad(0.1))
    keys = jax.random.split(jax.random.key(0), 2)
    params = [0.5 * jax.random.normal(key, (ROWS, WIDTH)) for key in keys]

    def stages(params: Any, ids: Any) -> Any:
        with sbp.on(first):
            x = jnp.tanh(params[0][ids].sum(1))
        with sbp.on(second):
            return jnp.square(x * params[1][ids[:, 0]] - 1).mean()

    def step(params: Any, state: Any, ids: Any) -> Any:
        value, grads = sbp.microbatch(jax.value_and_grad(stages), PARTS, batch_args=1)(params, ids)
        added, state = tx.update(grads, state, params)
        return optax.apply_updates(params, added), state, value

    program = sbp.compile(
        step, whole, in_sbp=([S(0)], sbp.AUTO, [S(0)]), options=sbp.Options(check=True, hardware=DEAR)
    )
    one = many = params, tx.init(params)
    plain = jax.jit(step)
    for seed in range(2):
        *one, _ = plain(*one, batch(seed))
        *many, _ = jax.block_until_ready(program(*many, batch(seed)))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    plan = program.plan(*many, batch(0))
    for stage in plan.stages:
        assert len(updates(stage)) == 1 and table_sized(stage) == 0
