"""Lazy steps that a flag takes back: on rows the gradient is zero then, and a whole table is in a branch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp import B, S
from sbp.runtime.embedding.optimizers import rowwise_adagrad
from tests.passes.rows.test_branches import adam, stepping, trained
from tests.passes.rows.test_tables import DEAR, LINE, batch, compare, sums, table_sized, updates

IN_SBP = [S(0)], sbp.AUTO, [B], [S(0)]
Taken = Callable[..., Any]


def multi_steps(**options: Any) -> Any:
    """Three batches at a time."""
    return optax.MultiSteps(adam(), 3, **options)


def sgd_of_three() -> Any:
    """Without state, and with a factor behind the choice."""
    return optax.chain(optax.MultiSteps(sbp.rows(optax.sgd(0.1)), 3), optax.scale(0.5))


def sgd_of_three_scaled_by_a_flag() -> Any:
    """With numbers before the choice, one of which goes by another flag."""

    def half(updates: Any, state: Any, params: Any) -> Any:
        size = jnp.where(jnp.abs(params).sum() > 1e9, 0.25, 0.5)
        return jax.tree.map(lambda x: size * x, updates), state

    rest = optax.GradientTransformation(lambda _: optax.EmptyState(), half)
    return optax.MultiSteps(optax.chain(sbp.rows(optax.sgd(0.1)), optax.scale(3.0), rest), 3)


def branches(plan: sbp.Plan) -> list[Any]:
    """The ops that choose a branch."""
    assert plan.physical is not None
    return [node for node in plan.physical.graph.walk() if node.op == "cond"]


def outside_of_branches(plan: sbp.Plan) -> int:
    """How many tensors of the size of the table are made outside, the results of branches apart."""
    assert plan.physical is not None
    graph = plan.physical.graph
    made = (n for n in graph.nodes if n.op not in ("cond", "sbp_update_rows"))
    return sum(graph.values[v].shape == (400, 6) for n in made for v in n.outputs)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("tx", "passes"),
    [
        (multi_steps, 3),
        (lambda: multi_steps(use_grad_mean=False), 0),
        (sgd_of_three, 3),
        (sgd_of_three_scaled_by_a_flag, 4),  # one for its own measure of the table
    ],
    ids=["mean", "sum", "scaled", "scaled before"],
)
def test_sums_are_kept_by_rows_and_taken_in_a_branch(tx: Callable[[], Any], passes: int) -> None:
    """A mean scales the table of sums in each step: its negative, that by a number, and both added."""
    with jax.enable_x64(True):
        plan = compare(stepping(tx()), tx(), LINE, IN_SBP, steps=7, hardware=DEAR)
    assert len(branches(plan)) == 1 and len(updates(plan)) == 1
    assert outside_of_branches(plan) == passes
    assert any("rows are added to a sum that is kept" in note for note in plan.notes)


@pytest.mark.filterwarnings("ignore:sbp. sbp.rows")
def test_a_sum_in_a_branch_is_not_copied() -> None:
    """XLA takes the branch in place: a barrier says that a sum begins anew behind the step that reads it."""
    tx = optax.MultiSteps(sbp.rows(rowwise_adagrad(0.1)), 3)
    args = np.zeros((400, 6), np.float32), tx.init(jnp.zeros((400, 6))), np.ones((6, 2), np.float32)
    program = sbp.compile(stepping(tx), LINE, in_sbp=IN_SBP, donate_argnums=(0, 1))
    text = program.lower(*args, batch(0)).compile().as_text()
    assert "f32[50,6]" in text and not [
        line for line in text.splitlines() if "f32[50,6]" in line and " copy(" in line
    ]


def left_out(tx: Any, grad: Any, state: Any, table: Any) -> Any:
    """As a loss scale does: the new values are taken if all gradients are finite."""
    finite = jnp.isfinite(grad).all()
    added, new = tx.update(grad, state, table)
    kept = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
    return jax.tree.map(kept, (optax.apply_updates(table, added), new), (table, state))


def by_factor(tx: Any, grad: Any, state: Any, table: Any) -> Any:
    """A factor of zero takes the step back, and the flag says where it is not taken."""
    skips = grad.sum() > 1e6
    added, new = tx.update(grad, state, table)
    return table + (1 - skips) * added, jax.tree.map(lambda n, o: jnp.where(skips, o, n), new, state)


def in_halves(tx: Any, grad: Any, state: Any, table: Any) -> Any:
    """A flag chooses between a whole step and half of one."""
    added, new = tx.update(grad, state, table)
    return table + jnp.where(grad.sum() > 0, added, 0.5 * added), new


def state_alone(tx: Any, grad: Any, state: Any, table: Any) -> Any:
    """The table is changed in any case."""
    added, new = tx.update(grad, state, table)
    return table + added, jax.tree.map(lambda n, o: jnp.where(grad.sum() > 0, n, o), new, state)


def with_others(tx: Any, grad: Any, state: Any, table: Any) -> Any:
    """What is not taken goes to other rows than were there."""
    added, new = tx.update(grad, state, table)
    return jnp.where(grad.sum() > 0, table + added, 2 * table), new


def taking(choice: Taken) -> Callable[[Any], Callable[..., Any]]:
    """A step with a choice behind it."""

    def made(tx: Any) -> Callable[..., Any]:
        def step(table: Any, state: Any, weight: Any, ids: Any) -> Any:
            table, state = choice(tx, trained(table, weight, ids), state, table)
            return table, state, weight, jnp.zeros(())

        return step

    return made


@pytest.mark.some(1)
@pytest.mark.parametrize("choice", [left_out, by_factor])
def test_steps_on_rows_are_taken_back_by_their_gradient(choice: Taken) -> None:
    plan = compare(taking(choice)(adam()), adam(), LINE, IN_SBP, steps=2, hardware=DEAR)
    assert len(updates(plan)) == 1 and table_sized(plan) == 0 and not branches(plan)


def test_steps_that_are_not_finite_are_left_out() -> None:
    """The step, its state and its count stay; the next one is taken."""
    tx, program = adam(), sbp.compile(taking(left_out)(adam()), LINE, in_sbp=IN_SBP)
    plain, rng = jax.jit(taking(left_out)(adam())), np.random.default_rng(0)
    table, weight = rng.normal(size=(400, 6)).astype(np.float32), rng.normal(size=(6, 2)).astype(np.float32)
    one = many = table, jax.tree.map(np.asarray, tx.init(table)), weight
    for ids in (batch(0), np.zeros((16, 3), np.int32), batch(1)):
        *one, _ = plain(*one, ids)
        *many, _ = program(*many, ids)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.some(1)
@pytest.mark.parametrize("choice", [in_halves, state_alone, with_others])
def test_other_choices_stay(choice: Taken) -> None:
    compare(taking(choice)(adam()), adam(), LINE, IN_SBP, steps=2)


def test_products_with_zero_stay_where_numbers_may_not_be_finite() -> None:
    plan = compare(taking(by_factor)(adam()), adam(), LINE, IN_SBP, steps=1, strict_nonfinite=True)
    assert not branches(plan) and not updates(plan)


@pytest.mark.filterwarnings("ignore:sbp. sbp.rows")
def test_two_tables_of_one_flag() -> None:
    """Each has a branch of its own."""
    tx = multi_steps()

    def step(table: Any, state: Any, ids: Any) -> Any:
        slope = jax.grad(lambda t: sum(jnp.square(sums(x, ids) - 1).mean() for x in t.values()))(table)
        added, state = tx.update(slope, state, table)
        return optax.apply_updates(table, added), state

    rng = np.random.default_rng(0)
    table = {k: rng.normal(size=(400, 6)).astype(np.float32) for k in "ab"}
    one = many = table, jax.tree.map(np.asarray, tx.init(table))
    program, plain = sbp.compile(step, LINE, in_sbp=([S(0)], sbp.AUTO, [S(0)])), jax.jit(step)
    assert len(branches(program.plan(*many, batch(0)))) == 2
    for seed in range(4):
        one, many = plain(*one, batch(seed)), program(*many, batch(seed))
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
