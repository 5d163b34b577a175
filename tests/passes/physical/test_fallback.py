"""Where nothing is found that fits and runs ops again: plans in which no op does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.passes.physical.fit import FittedSignatures, LimitedProblem, SmallestPeak
from sbp.passes.plan.cheapest import choose
from sbp.passes.plan.model import ChosenSignatures
from sbp.passes.program.trace import trace
from tests.passes.plan.test_optimal import problem

PLACE = sbp.placement("cpu", shape=(2,))


def loss(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


W, X = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((16, 64), jnp.float32)
GIVEN = problem(trace(jax.grad(loss), ([W] * 3, X), {}).graph, PLACE)
FASTEST = choose(*GIVEN, None)


@dataclass(frozen=True)
class NothingRunsAgain(LimitedProblem):
    """A search that finds nothing in which ops run again, and says so of a peak.

    Arguments:
      found_bytes: that peak, and its bound.
    """

    found_bytes: tuple[float, float] = (1e12, 3.0)

    def fit(self, fastest: ChosenSignatures) -> FittedSignatures:
        if not self.recomputes:
            return super().fit(fastest)
        peak, bound = self.found_bytes
        return FittedSignatures(fastest, smallest=SmallestPeak(self.looked_at(fastest).physical, peak, bound))


def needed() -> float:
    return LimitedProblem(*GIVEN, (), 1e12).peak_bytes(FASTEST)


def test_what_fits_without_ops_that_run_again_is_taken() -> None:
    tried = NothingRunsAgain(*GIVEN, (), 0.85 * needed(), 10.0)
    found = tried.fitted(FASTEST)
    assert found.smallest is None and not found.assignment.recomputed
    assert tried.fits(found.assignment)
    # A bound of plans in which no op runs again is none of all plans: that of any size is what holds.
    assert found.assignment.bound == FASTEST.bound <= found.assignment.seconds


def test_the_smallest_peak_is_that_of_both_searches() -> None:
    limit = 0.001 * needed()
    plain = replace(NothingRunsAgain(*GIVEN, (), limit, 6.0), recomputes=False).fit(FASTEST)
    assert plain.smallest is not None
    for peak in (1e12, 0.5 * plain.smallest.bytes):
        found = NothingRunsAgain(*GIVEN, (), limit, 6.0, found_bytes=(peak, 3.0)).fitted(FASTEST)
        assert found.smallest is not None
        assert found.smallest.bytes == pytest.approx(min(peak, plain.smallest.bytes), rel=0.1)
        # No plan is below what the search with ops that run again has proven.
        assert found.smallest.bound_bytes == 3.0


def test_there_is_no_second_search_where_no_op_may_run_again() -> None:
    plain = replace(NothingRunsAgain(*GIVEN, (), 0.001 * needed(), 4.0), recomputes=False)
    assert plain.fitted(FASTEST).smallest is not None
