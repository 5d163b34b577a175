"""Parts of a batch that count for nothing: whatever stands in them, nothing of it is in the results."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import B, S

PARTS = 4
W = {"a": jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), np.float32)}
W["b"] = W["a"][::-1] * 0.5
X = jnp.asarray(np.random.default_rng(1).normal(size=(8, 4)), np.float32)
# Part 1 has the rows 1 and 5: nothing of it counts, so its loss is 0 / 0.
COUNTS = jnp.asarray([1, 0, 1, 1, 1, 0, 0, 1], np.float32)
STAGES = sbp.placement("cpu", shape=(2, 2), axes=("stage", "data"))
FIRST, LAST = STAGES.split("stage")


def mean_loss(w: Any, x: Any, counts: Any) -> Any:
    """A mean over what counts, in a part as in a batch; both layers use the first weight."""
    with sbp.on(FIRST):
        x = jnp.tanh(x @ w["a"])
    with sbp.on(LAST):
        x = jnp.tanh(x @ w["b"]) @ w["a"]
        return jnp.sum(jnp.square(x).sum(1) * counts) / jnp.sum(counts)


def count(w: Any, x: Any, counts: Any) -> Any:
    return jnp.sum(counts)


def in_parts(fn: Callable[..., Any]) -> Callable[..., Any]:
    return sbp.microbatch(fn, PARTS, batch_args=(1, 2), reduce=count)


def wanted(w: Any, x: Any, counts: Any) -> Any:
    """Without the rows that do not count."""
    there = np.asarray(counts) > 0
    return jax.value_and_grad(mean_loss)(w, x[there], counts[there])


def assert_close(found: Any, right: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, right)


ORDERS: dict[str, Callable[..., Any]] = {
    "gradients of parts": lambda loss: in_parts(jax.value_and_grad(loss)),
    "the gradient of all parts": lambda loss: jax.value_and_grad(in_parts(loss)),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("name", ORDERS)
def test_a_part_of_weight_zero_is_left_out(name: str, bad: float) -> None:
    x = X.at[jnp.asarray([1, 5])].add(bad)
    assert not np.isfinite(mean_loss(W, x[1::PARTS], COUNTS[1::PARTS]))
    assert_close(jax.jit(ORDERS[name](mean_loss))(W, x, COUNTS), wanted(W, X, COUNTS))


def test_a_part_of_weight_zero_has_no_derivatives() -> None:
    """Neither by its rows nor by its weight, forward or backward; the others have theirs."""
    loss = in_parts(lambda w, x, counts: jnp.sum(x @ w["a"]) / jnp.sum(counts))
    x = X.at[5].set(jnp.nan)
    by_rows, by_counts = jax.grad(loss, (1, 2))(W, x, COUNTS)
    assert np.isfinite(by_rows).all() and np.isfinite(by_counts).all()
    assert not by_rows[jnp.asarray([1, 5])].any() and by_rows[jnp.asarray([0, 2, 3])].all()
    along = jax.jvp(lambda x: loss(W, x, COUNTS), (x,), (jnp.ones_like(x),))
    assert np.isfinite(along).all()
    assert along[1] == pytest.approx(float(by_rows.sum()), rel=1e-5)


def test_without_a_part_of_weight_zero_nothing_is_other() -> None:
    """Negative weights, whole ones, and results of several types."""

    def both(w: Any, x: Any, counts: Any) -> Any:
        return jnp.sum(x @ w["a"]), x.astype(jnp.float16).sum(), jnp.sum(x > 0)

    weights = np.asarray([2, -1, 3, 4])
    run = sbp.microbatch(both, PARTS, batch_args=(1, 2), reduce=lambda w, x, c: c.sum().astype(int))
    found = run(W, X, jnp.asarray(np.repeat(weights[None], 2, 0).reshape(-1) / 2))
    each = [both(W, X[i::PARTS], None) for i in range(PARTS)]
    right = [sum(k * float(r[j]) for k, r in zip(weights, each, strict=True)) / 8 for j in range(3)]
    np.testing.assert_allclose([float(x) for x in found], right, rtol=2e-3)


@pytest.mark.parametrize("name", ORDERS)
def test_a_part_of_weight_zero_on_many_devices(name: str) -> None:
    """A batch that is split over devices."""

    def plain(w: Any, x: Any, counts: Any) -> Any:
        x = jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) @ w["a"]
        return jnp.sum(jnp.square(x).sum(1) * counts) / jnp.sum(counts)

    program = sbp.compile(ORDERS[name](plain), sbp.placement("cpu", shape=(2,)), in_sbp=([B], [S(0)], [S(0)]))
    x = X.at[5].set(jnp.nan)
    assert_close(program(W, x, COUNTS), wanted(W, X, COUNTS))


def test_a_part_of_weight_zero_in_a_pipeline() -> None:
    """The weight of both stages has a sum on each, in which the part is left out as well."""
    program = sbp.compile(ORDERS["gradients of parts"](mean_loss), STAGES, in_sbp=([B], [S(0)], [S(0)]))
    x = X.at[5].set(jnp.nan)
    assert_close(program(W, x, COUNTS), wanted(W, X, COUNTS))
    sends = program.plan(W, x, COUNTS).sends
    assert [c.count for c in sends if c.shape == (4, 4)] == [1]
