"""Ops that compute the same as one before them: what is merged, and what stays apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp import B, S
from sbp.passes.program.duplicates import without_duplicates
from sbp.passes.program.trace import trace

LINE = sbp.placement("cpu", shape=(4,))
X = np.arange(32, dtype=np.float32).reshape(8, 4)


def ops(fn: Callable[..., Any], *args: Any) -> Counter[str]:
    """How often each op is left, in bodies too."""
    graph = without_duplicates(trace(fn, args, {}).graph)
    return Counter(node.op for node in graph.walk())


def test_equal_ops_are_one() -> None:
    assert ops(lambda x: jnp.sin(x + 1) * jnp.sin(x + 1), X) == {"add": 1, "sin": 1, "mul": 1}


def test_what_differs_in_a_parameter_or_a_scalar_stays() -> None:
    assert ops(lambda x: jnp.sum(x, 0)[:2] * jnp.sum(x, 1)[:2], X)["reduce_sum"] == 2
    assert ops(lambda x: lax.max(x, np.float32(0.0)) * lax.max(x, np.float32(-0.0)), X)["max"] == 2


def test_results_stay_apart() -> None:
    """Each may leave in another way; so may what is computed from scalars alone."""
    assert ops(lambda x: (x + 1, x + 1), X)["add"] == 2
    assert ops(lambda x: (x + jnp.arange(4.0), x * jnp.arange(4.0)), X)["iota"] == 2


def test_bodies_are_looked_at_by_themselves() -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, r: (c + jnp.sin(r) * jnp.sin(r), None), jnp.sin(x[0]), x)[0]

    assert ops(f, X)["sin"] == 2


def test_checkpointed_ops_are_computed_again() -> None:
    """Their barrier makes other values of what they read: of the three sines one is the backward pass's."""
    both = jax.value_and_grad(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum()))
    assert ops(both, X)["sin"] == 3


def test_what_speaks_does_so_as_often_as_written() -> None:
    def f(x: Any) -> Any:
        for _ in range(2):
            jax.debug.print("{}", x[0, 0])
        return x * 2

    found = ops(f, X)
    assert found["debug_callback"] + found["debug_print"] == 2


def test_equal_values_may_be_annotated_differently() -> None:
    def f(x: Any) -> Any:
        return sbp.annotate(x * 2, [S(0)]).sum(0), sbp.annotate(x * 2, [S(1)]).sum(1)

    got = sbp.compile(f, LINE, in_sbp=[S(0)])(X)
    np.testing.assert_allclose(got[0], (X * 2).sum(0))
    np.testing.assert_allclose(got[1], (X * 2).sum(1))


def twice(x: Any, w: Any) -> Any:
    """A forward pass that is written twice, as for a loss and for an accuracy."""

    def logits() -> Any:
        return jnp.tanh(x @ w[0]) @ w[1]

    return jnp.square(logits()).mean(), logits().argmax(-1)


@pytest.mark.parametrize("placed", ["compiled", "planned"])
def test_what_is_written_twice_is_sent_and_counted_once(placed: str) -> None:
    w = [np.ones((4, 16), np.float32), np.ones((16, 4), np.float32)]
    program = sbp.compile(twice, LINE, in_sbp=([B], [[S(1)], [S(0)]]), out_sbp=([B], [B]))
    if placed == "planned":
        (row,) = program.plan(X, w).collectives
        assert (row.kind, row.count) == ("all_reduce", 1)
    else:
        want = twice(X, w)
        for a, b in zip(program(X, w), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
