"""The shortest step within a limit on memory, against every assignment of tiny programs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbp.hardware.catalogue import Hardware
from sbp.passes.physical.exposure import Clock, Exposure
from sbp.passes.physical.fit import LimitedProblem, LimitedStart
from sbp.passes.physical.hidden_limited import _least_peak, _LimitedLooks, shortest_within
from sbp.passes.physical.merged import merge_ops
from sbp.passes.plan.budget import Budget
from sbp.passes.plan.cheapest import choose
from sbp.passes.plan.every import all_costs
from sbp.passes.plan.model import ChosenSignatures, Model
from sbp.passes.plan.network import CostNetwork
from sbp.passes.plan.recompute import RecomputingModel
from sbp.passes.plan.solve import solve
from sbp.passes.program.trace import trace
from sbp.placement import placement
from tests.passes.physical.test_hidden import HARDWARE, SLOW, beside, chain, problem, sent_twice, two_products
from tests.passes.plan.test_optimal import problem as plain_problem

WITHIN = 1.1
"""Of the shortest step of all assignments that fit. What a plan hides that is unlike all that were looked at
is not known: 9 % for `chain` and SLOW."""
Limited = tuple[LimitedProblem, LimitedStart, ChosenSignatures, Model, CostNetwork]


def limited(fn: Callable[..., Any], hardware: Hardware, part: float) -> Limited:
    """The problem under a limit, so far from the least peak to that of the cheapest plan; and where its
    search begins."""
    plain, _, _ = problem(fn, hardware)
    candidates = replace(plain.c, **vars(merge_ops(plain.graph)))
    model = Model(candidates, plain.boundary, plain.boxings)
    network, base = model.build(), choose(candidates, plain.boundary, plain.boxings, None)
    free = LimitedProblem(candidates, plain.boundary, plain.boxings, (), np.inf)
    states, costs = all_costs(network)
    finite = np.flatnonzero(costs < 4 * base.seconds)
    sample = np.random.default_rng(0).permutation(finite)[:200]
    peaks = [free.peak_bytes(model.chosen(states[:, k].tolist(), 0.0, 0.0)) for k in sample]
    least, most = min(peaks), free.peak_bytes(base)
    asked = replace(free, limit_bytes=least + part * (most - least))
    found = asked.keep_limit(base)
    assert found.smallest is None
    return asked, found.start or asked.start(), found.assignment, model, network


def shortest_that_fits(given: Limited, found_seconds: float) -> float:
    """The shortest step of every assignment that keeps the limit."""
    asked, _, _, model, network = given
    states, total = all_costs(network)
    clock, best = Clock(model.c, model.boxings), found_seconds
    for k in np.flatnonzero(total <= 2.0 * found_seconds):
        assignment = model.chosen(states[:, k].tolist(), 0.0, 0.0)
        seconds = clock.times(assignment).step_seconds
        if seconds < best and asked.fits(assignment):
            best = seconds
    return best


@pytest.mark.some(1)
@pytest.mark.parametrize("fn", [beside, chain])
@pytest.mark.parametrize("hardware", [HARDWARE, SLOW])
def test_step_is_near_the_shortest_that_fits(fn: Callable[..., Any], hardware: Hardware) -> None:
    given = limited(fn, hardware, 0.5)
    asked, start, cheapest, model, _ = given
    found = shortest_within(asked, start, cheapest)
    clock = Clock(model.c, model.boxings)
    assert asked.fits(found.assignment)
    assert clock.times(found.assignment).step_seconds == found.step_seconds
    assert found.step_seconds <= clock.times(cheapest).step_seconds
    assert found.step_seconds <= WITHIN * shortest_that_fits(given, found.step_seconds)


def test_what_the_cheapest_takes_is_told() -> None:
    """A plan that is taken for its step says what the cheapest takes; and all parallelisms were looked at."""
    asked, start, cheapest, model, _ = limited(sent_twice, SLOW, 4.0)
    found = shortest_within(asked, start, cheapest)
    clock = Clock(model.c, model.boxings)
    assert found.step_seconds < 0.98 * clock.times(cheapest).step_seconds
    assert found.assignment.cheapest_seconds == clock.times(cheapest).seconds
    assert found.assignment.bound == cheapest.bound
    assert "data" in found.looked and not found.left


def test_nothing_changes_on_cpus_and_without_time() -> None:
    asked, start, cheapest, _, _ = limited(two_products, SLOW, 1.0)
    assert shortest_within(asked, start, cheapest, 0.0).assignment is cheapest
    asked, start, cheapest, _, _ = limited(two_products, replace(SLOW, platform="cpu"), 1.0)
    assert shortest_within(asked, start, cheapest).assignment is cheapest


def test_a_parallelism_without_room_costs_more_where_it_is_left() -> None:
    """Instead of being thrown away: what it excludes is allowed, at a price."""
    asked, start, cheapest, _, _ = limited(chain, SLOW, 0.5)
    looks = _LimitedLooks(asked, start, cheapest, 10.0)
    unary = list(start.network.unary)
    variable = start.model.inputs[1]
    only = np.full(unary[variable].size, np.inf)
    only[0] = unary[variable][0]
    unary[variable] = only
    narrowed = tuple(unary)
    assert looks.roomy(narrowed, looks.best) is narrowed
    looks.counted_bytes = 0.0
    roomy = looks.roomy(narrowed, looks.best)
    assert roomy[variable][0] == only[0] and np.isfinite(roomy[variable]).any()
    given = start.network.unary[variable]
    assert (roomy[variable][1:] >= given[1:]).all() and (roomy[variable][1:] > given[1:]).any()


def test_least_peak_is_below_all() -> None:
    _, start, _, _, _ = limited(chain, HARDWARE, 0.5)
    least = _least_peak(start.network.unary, start.loads)
    budget, rng = Budget(start.loads, np.inf), np.random.default_rng(1)
    for _ in range(50):
        states = [int(rng.integers(theta.size)) for theta in start.network.unary]
        assert budget.peak_bytes(states) >= least * (1 - 1e-9)


def test_values_for_later_uses_have_the_phase_of_these() -> None:
    """They are beyond the program's own values; every group of moves has a share."""

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = x + jax.nn.softmax(x @ w)
        return (x**2).mean()

    ws, x = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3, jax.ShapeDtypeStruct((256, 64), jnp.float32)
    place = placement("cpu", shape=(4,))
    given = plain_problem(trace(jax.grad(loss), (ws, x), {}).graph, place)
    model = RecomputingModel(*given, 1e5)
    network = model.build()
    later = {v for v in model.edge_values if v >= len(given[0].graph.values)}
    exposure = Exposure(model, network)
    assert later and {exposure.phases[v] for v in later} <= {"forward", "backward", ""}
    clock, states = Clock(model.c, model.boxings), solve(network).states
    times = clock.times(model.chosen(states, 0.0, 0.0))
    assert max(times.sent, default=0) < len(model.c.graph.values)
    assert set(exposure.shares(times)) >= set(exposure.groups)
