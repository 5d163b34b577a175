"""`sbp.rows(tx, dense="error")`: who wants to train rows alone is told of every step that cannot."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp import B, S
from sbp.errors import ArgumentError
from tests.errors.messages import Messages, check_message, kinds
from tests.passes.rows.test_tables import (
    by_count,
    by_position,
    decayed,
    halved_after,
    make_step,
    start,
    without_the_last,
)

LINE = sbp.placement("cpu", shape=(8,))
IDS = np.zeros((16, 3), np.int32)
FIX = (
    "a table whose gradient is of lookups alone, and a step that is just added to it; or "
    'dense="note", which says so in the plan'
)


def of(update: Any) -> Any:
    return optax.GradientTransformation(lambda p: (), update)


def clipped() -> Any:
    return optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))


def in_parts(tx: Any) -> Callable[..., Any]:
    """Gradients of parts of the batch are added up, those of the last parts most."""

    def step(table: Any, state: Any, weight: Any, ids: Any) -> Any:
        def loss(table: Any, ids: Any) -> Any:
            return jnp.square(table[ids].sum(1) @ weight).mean()

        def add(total: Any, ids: Any) -> Any:
            return 0.5 * total + jax.grad(loss)(table, ids), None

        grad, _ = jax.lax.scan(add, jnp.zeros_like(table), ids.reshape(2, -1, ids.shape[-1]))
        added, state = tx.update(grad, state, table)
        return table + added, state, weight, jnp.zeros(())

    return step


def by_zero(tx: Any) -> Callable[..., Any]:
    """Gradients are divided by zero."""

    def step(table: Any, state: Any, weight: Any, ids: Any) -> Any:
        grad = jax.grad(lambda t: jnp.square(t[ids].sum(1) @ weight).mean())(table)
        added, state = tx.update(grad / 0.0, state, table)
        return table + added, state, weight, jnp.zeros(())

    return step


CASES: dict[str, tuple[Any, Callable[..., Any]]] = {
    "norm": (clipped(), make_step),
    "position": (of(by_position), make_step),
    "count": (of(by_count), make_step),
    "rescaled": (optax.sgd(0.1), by_zero),
    "last": (of(without_the_last), make_step),
    "decay": (optax.sgd(0.1), lambda tx: make_step(tx, decayed)),
    "halved": (optax.sgd(0.1), halved_after),
    "in parts": (optax.sgd(0.1), in_parts),
}


def plan_of(name: str, **how: Any) -> Any:
    inner, make = CASES[name]
    tx = sbp.rows(inner, **how)
    program = sbp.compile(make(tx), LINE, in_sbp=([S(0)], sbp.AUTO, [B], [S(0)]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return program.plan(*start(tx), IDS)


@pytest.mark.parametrize("name", CASES)
def test_whatever_the_note_says_the_error_says(name: str) -> None:
    """For every reason that a step has for the whole table; the table is named, and so is the line."""
    (note,) = [n for n in plan_of(name, dense="note").notes if n.startswith("sbp.rows at ")]
    where, size, reason = re.split(
        ": the whole table is updated, | with its state in each step, since ", note
    )
    assert size == "9.60 kB"
    with pytest.raises(ArgumentError) as caught:
        plan_of(name, dense="error")
    (problem,) = caught.value.problems
    assert (problem.where, problem.why) == (where, reason)
    assert problem.got == "table: float32[400, 6], updated whole"
    assert ("test_rows_messages" if name in ("in parts", "rescaled") else "test_tables") in where


def test_a_warning_may_be_an_error() -> None:
    """Where the user's filters say so it is raised as it is, and points at the user's line."""
    inner, make = CASES["norm"]
    program = sbp.compile(make(sbp.rows(inner)), LINE, in_sbp=([S(0)], sbp.AUTO, [B], [S(0)]))
    args = *start(sbp.rows(inner)), IDS
    with pytest.raises(UserWarning, match=r"sbp: sbp\.rows at .*whole table is updated, 9\.60 kB"):
        program.plan(*args)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program.plan(*args)
    assert [(x.category, x.filename) for x in caught] == [(UserWarning, __file__)]


def test_a_step_on_rows_alone_is_none() -> None:
    tx = sbp.rows(optax.adagrad(0.1), dense="error")
    program = sbp.compile(make_step(tx), LINE, in_sbp=([S(0)], sbp.AUTO, [B], [S(0)]))
    notes = program.plan(*start(tx), IDS).notes
    assert any("only the rows that were looked up are updated" in n for n in notes)


def test_every_table_that_goes_dense_is_named_at_once() -> None:
    tx = sbp.rows(clipped(), dense="error")

    def step(tables: Any, state: Any, ids: Any) -> Any:
        grads = jax.grad(lambda t: sum(jnp.square(x[ids]).mean() for x in t.values()))(tables)
        added, state = tx.update(grads, state, tables)
        return optax.apply_updates(tables, added), state

    tables = {name: np.ones((64, 4), np.float32) for name in ("films", "users")}
    program = sbp.compile(step, LINE, in_sbp=([S(0)], sbp.AUTO, [S(0)]))
    with pytest.raises(ArgumentError) as caught:
        program(tables, tx.init(tables), np.zeros(16, np.int32))
    assert ["films" in p.got or "users" in p.got for p in caught.value.problems] == [True, True]


def test_in_a_pipeline() -> None:
    """Each micro-batch gives rows; a penalty on the table gives all of them."""
    whole = sbp.placement("cpu", shape=(2, 2), axes=("stage", "data"))
    first, last = whole.split("stage")
    tx = sbp.rows(optax.sgd(0.1), dense="error")

    def step(table: Any, state: Any, ids: Any, penalty: bool) -> Any:
        def loss(table: Any, ids: Any) -> Any:
            with sbp.on(first):
                x = table[ids]
            with sbp.on(last):
                return jnp.square(x).mean() + (jnp.square(table).sum() if penalty else 0.0)

        grad = sbp.microbatch(jax.grad(loss), 2, batch_args=1)(table, ids)
        added, state = tx.update(grad, state, table)
        return table + added, state

    table = np.ones((64, 4), np.float32)
    program = sbp.compile(step, whole, static_argnums=3)
    args = table, tx.init(table), np.zeros(16, np.int32)
    assert any("only the rows that were looked up" in note for note in program.plan(*args, False).notes)
    assert kinds(lambda: program.plan(*args, True))[0][0] == "argument"


MESSAGES: Messages = {
    "a step on the whole table": (
        lambda: plan_of("halved", dense="error"),
        ArgumentError,
        "sbp.rows at {line}",
        "table: float32[400, 6], updated whole",
        'a step on rows that were looked up, for sbp.rows(..., dense="error")',
        "its result is not just added to the table",
        FIX,
    ),
    "another word": (
        lambda: sbp.rows(optax.sgd(0.1), dense="warn"),
        ArgumentError,
        "sbp.rows(tx, dense=...)",
        "'warn'",
        "'note' or 'error'",
        "it says what to do if a step needs the whole table",
        'dense="error" to be told of it',
    ),
    "no word": (
        lambda: sbp.rows(optax.sgd(0.1), dense=True),  # type: ignore[arg-type]
        ArgumentError,
        "sbp.rows(tx, dense=...)",
        "True",
        "'note' or 'error'",
        "it says what to do if a step needs the whole table",
        'dense="error" to be told of it',
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str) -> None:
    call, error, *texts = MESSAGES[name]
    check_message(call, error, *texts)
