"""Values and gradients under random signatures equal those of one device."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conformance.gradient_samples import SAMPLES, Sample
from tests.conformance.random_code import GRIDS, ODD, signature
from tests.conformance.random_programs import distance, execute, needs_finite
from tests.rules.special import unlike


def scalar(one: Sample) -> Any:
    """A number made of everything that the function returns: each element has a cotangent of its own."""

    def loss(*args: Any) -> Any:
        out = jax.tree.leaves(one.fn(*args))
        return sum(jnp.sum(jnp.sin(jnp.real(x) + 2 * jnp.imag(x))) for x in out)

    return loss


def check(one: Sample) -> None:
    """One sample under signatures that its name chooses."""
    choose = random.Random(f"{one.name}.0").choice
    grid = choose(GRIDS)
    args = one.args
    wrt = tuple(i for i, x in enumerate(args) if x.dtype != np.int32)
    fn = jax.value_and_grad(scalar(one), wrt)
    in_sbp = tuple(signature(choose, x.ndim, np.ndim(grid)) if choose((0, 1, 1)) else None for x in args)
    done = execute(fn, args, grid, in_sbp, None, splitting=choose((True, True, False)))
    for i, (got, want) in enumerate(zip(done.got, done.want, strict=True)):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        size = float(np.abs(np.asarray(want)).max(initial=1.0))
        off = distance(got, want)
        where = f"grid {grid}, in_sbp {in_sbp}: result {i}"
        assert off <= one.close * size, f"{where}: off by {off}\n{got}\nnot\n{want}"


def odd_args(one: Sample) -> list[Any]:
    """Its arguments, of which some numbers are infinite, NaN or -0.0 instead."""
    rng = np.random.default_rng(7)
    drawn = ((x, rng.random(np.shape(x)), rng.choice(np.array(ODD), np.shape(x))) for x in one.args)
    return [x if x.dtype == np.int32 else np.where(at < 0.08, v, x).astype(x.dtype) for x, at, v in drawn]


def check_odd(one: Sample) -> None:
    """NaN, infinities and values as on one device; by default, where the plan has no op that may differ."""
    choose = random.Random(f"{one.name}.0").choice
    grid, args = choose(GRIDS), odd_args(one)
    fn = jax.value_and_grad(scalar(one), tuple(i for i, x in enumerate(args) if x.dtype != np.int32))
    in_sbp = tuple(signature(choose, x.ndim, np.ndim(grid)) if choose((0, 1, 1)) else None for x in args)
    splitting = choose((True, True, False))
    for strict in (True, False):
        done = execute(fn, args, grid, in_sbp, None, splitting, strict)
        for got, want in zip(done.got, map(np.asarray, done.want), strict=True):
            size = float(np.max(np.abs(want), initial=1.0, where=np.isfinite(want)))
            wrong = unlike(np.asarray(got), want, one.close * size, signs=False)
            admitted = not strict and needs_finite(done.physical)
            assert not wrong or admitted, f"grid {grid}, in_sbp {in_sbp}, strict {strict}: {wrong}"


QUICK = 5
"""Every so many of the samples is quick; the others are slow."""

CASES = [
    pytest.param(one, id=one.name, marks=[pytest.mark.slow] if i % QUICK else [])
    for i, one in enumerate(SAMPLES)
]


@pytest.mark.some(2)
@pytest.mark.parametrize("one", CASES)
def test_gradients_equal_one_device(one: Sample) -> None:
    check(one)


@pytest.mark.some(1)
@pytest.mark.parametrize("one", CASES)
def test_gradients_of_odd_values(one: Sample) -> None:
    check_odd(one)
