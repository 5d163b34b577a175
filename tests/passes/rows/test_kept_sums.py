"""Sums that a program keeps: rows are added to a table, whatever else the sum is made of."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp import S

PLACE = sbp.placement("cpu", shape=(4,))
ROWS, WIDTH = 64, 4


def linear(rng: np.random.Generator, depth: int) -> Callable[[Any, Any], Any]:
    """A random function of a gradient and a table that is linear in them, with numbers of its own."""
    number = float(rng.integers(1, 9)) / 4
    if depth == 0:
        leaves = (lambda g, t: g, lambda g, t: t, lambda g, t: number)
        return leaves[rng.choice(3, p=(0.4, 0.25, 0.35))]
    first, second = linear(rng, depth - 1), linear(rng, depth - 1)
    made = (
        lambda g, t: first(g, t) + second(g, t),
        lambda g, t: first(g, t) - second(g, t),
        lambda g, t: -first(g, t),
        lambda g, t: first(g, t) * number,
        lambda g, t: first(g, t) / number,
    )
    return made[rng.choice(5, p=(0.5, 0.2, 0.1, 0.1, 0.1))]


@pytest.mark.some(3)
@pytest.mark.usefixtures("x64")
@pytest.mark.filterwarnings("ignore:sbp. sbp.rows")
@pytest.mark.parametrize("seed", range(24))
def test_any_linear_sum_has_the_numbers_of_one_device(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = linear(rng, 3), linear(rng, 2)
    lazy = sbp.rows(optax.sgd(0.1))

    def step(table: Any, kept: Any, ids: Any) -> Any:
        grad = jax.grad(lambda t: jnp.square(t[ids]).sum())(table)
        total = first(grad, kept) + (grad + second(grad, kept)) + 0.5 * kept
        added, _ = lazy.update(total, lazy.init(table), table)
        return table + added, 0.5 * total

    args = rng.normal(size=(ROWS, WIDTH)), rng.normal(size=(ROWS, WIDTH)), rng.integers(0, ROWS, (8,))
    program = sbp.compile(step, PLACE, in_sbp=([S(0)], [S(0)], [S(0)]))
    for got, wanted in zip(program(*args), jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)
    assert any("rows are added to a sum that is kept" in note for note in program.plan(*args).notes)
