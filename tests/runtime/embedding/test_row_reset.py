"""Rows of new keys begin anew in the compiled step, and nothing else does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp import B, S
from sbp.errors import EmbeddingError
from sbp.runtime.embedding.eviction import LeastRecentlyUsed
from sbp.runtime.embedding.row_reset import reset_rows, row_reset
from sbp.runtime.embedding.vocabulary import Vocabulary
from tests.errors.messages import check_message
from tests.runtime.embedding.test_table_state import LINE, three

KEY = jax.random.key(4)
TX = sbp.rows(optax.adam(0.1))


def flat(params: Any) -> Any:
    return {n: x.reshape(-1, x.shape[-1]) for n, x in params.items()}


@pytest.mark.parametrize("layout", ["rows", "whole"])
def test_rows_of_new_keys_begin_anew(layout: str) -> None:
    c, words = three(layout), Vocabulary(7, LeastRecentlyUsed(), name="b")
    params = c.init(jax.random.key(0))
    state = jax.tree.map(lambda x: jnp.full(x.shape, 5, x.dtype), TX.init(flat(params)))
    words.lookup([10, 20, 30, 40, 50, 60, 70])
    found = words.lookup([80, 90])
    run = jax.jit(lambda p, s, change: reset_rows(c, p, s, TX, change, KEY))
    change = row_reset(c, {"b": found}, 6)
    after, kept = run(params, state, change)
    old, new = c.unstack(params), c.unstack(after)
    others = np.delete(np.arange(7), found.new_rows)
    np.testing.assert_array_equal(new["a"], old["a"])
    np.testing.assert_array_equal(new["b"][others], old["b"][others])
    assert (new["b"][found.new_rows] != old["b"][found.new_rows]).all()
    moments = c.unstack({n: s[0].mu for n, s in kept.items()})
    assert not moments["b"][found.new_rows].any() and (moments["b"][others] == 5).all()
    assert (moments["a"] == 5).all() and all(s[0].count == 5 for s in kept.values())
    # Of the same key a row begins alike, wherever it is.
    other = Vocabulary(7, name="b").lookup([1, 90])
    again, _ = run(params, state, row_reset(c, {"b": other}, 6))
    rows = (int(words.find([90])[0]), int(other.rows[1]))
    np.testing.assert_array_equal(new["b"][rows[0]], c.unstack(again)["b"][rows[1]])


def test_a_compiled_step_resets_in_place_and_trains_by_rows() -> None:
    """On eight devices as on one: a row that is reset and looked up in one step, in rows."""
    c = three("rows")

    def step(params: Any, state: Any, change: Any, ids: Any) -> Any:
        params, state = reset_rows(c, params, state, TX, change, KEY)
        loss, grads = jax.value_and_grad(lambda p: sum(jnp.sum(x**2) for x in c(p, ids).values()))(params)
        added, state = TX.update(grads, state, params)
        return optax.apply_updates(params, added), state, loss

    params = c.init(jax.random.key(0))
    state = TX.init(params)
    words = Vocabulary(40, name="a")
    first, ids = words.lookup(np.arange(16)), {n: np.zeros(16, np.int32) for n in "bc"}
    args = params, state, row_reset(c, {"a": first}, 16), {"a": first.rows, **ids}
    wanted = jax.jit(step)(*args)
    lies = c.in_sbp(LINE), c.in_sbp(LINE, like=state), [B], [S(0)]
    program = sbp.compile(step, LINE, in_sbp=lies)
    plan = program.plan(*args)
    assert any("only the rows that were looked up" in note for note in plan.notes)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), program(*args), wanted)


def test_a_state_of_another_optimizer() -> None:
    c = three("rows")
    (stack,) = c.stacks
    params = c.init(jax.random.key(0))
    change = row_reset(c, {"a": Vocabulary(40, name="a").lookup([3])}, 8)
    check_message(
        lambda: reset_rows(c, params, TX.init(params), sbp.rows(optax.sgd(0.1)), change, KEY),
        EmbeddingError,
        "reset_rows(...)",
        f"a state with [{stack!r}][0].mu",
        "no array by row",
        "rows begin as the optimizer begins",
        "the optimizer that has made the state",
    )


def test_more_rows_than_a_step_takes() -> None:
    c = three("rows")
    (stack,) = c.stacks
    check_message(
        lambda: row_reset(c, {"a": Vocabulary(40, name="a").lookup(np.arange(9))}, 8),
        EmbeddingError,
        "row_reset(...)",
        f"9 in stack {stack!r} rows that are new",
        "at most 8",
        "a step is compiled for so many",
        "row_reset(..., size) of the ids in a batch",
    )
