"""Prices of bytes: where a search begins with them, where they stand, how they go on under other loads."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sbp.passes.plan.budget import Budget, Load, flat_budget
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.flat_network import flat_network
from sbp.passes.plan.network import CostNetwork, Indices
from sbp.passes.plan.prices import Prices
from sbp.passes.plan.reduce import reduce_network
from tests.passes.plan.brute import brute_force_within
from tests.passes.plan.budgets import feasible_problems


def test_a_price_stands_at_the_time_that_is_short() -> None:
    """Times with the same loads that depend on a choice count as one; the price belongs to that of them with
    the least room, which loads of another search tell from the others."""
    free = Load(0, 0, 9, np.array([4.0, 1.0]))
    fixed = (Load(-1, 2, 4, np.array([1.0])), Load(-1, 5, 7, np.array([3.0])))
    network = CostNetwork((np.array([0.0, 2.0]),), ())
    flat = flat_network(network)
    few = flat_budget(flat, (free, *fixed), 6.0)
    assert (few.times.tolist(), few.tightest.tolist(), few.room.tolist()) == ([2], [5], [3.0])
    prices = Prices(flat, few, 0.0, Effort())
    prices.charge(np.array([2.0]))
    prices.best = prices.at
    assert prices.best_prices().times.tolist() == [5]
    late = flat_budget(flat, (free, *fixed, Load(0, 5, 7, np.array([1.0, 0.0]))), 6.0)
    other = Prices(flat, late, 0.0, Effort())
    other.begin_at(prices.best_prices())
    assert other.at[late.times.tolist().index(5)] == 2.0 and other.at.sum() == 2.0


@pytest.mark.parametrize("more", [-1.0, 0.0, 3.0])
def test_prices_go_on_with_other_loads(more: float) -> None:
    """The bound is true under them, and costs have the bytes of these and no others."""
    raised = 0
    for network, budget in feasible_problems(0.6, 60):
        reduction = reduce_network(network, loads=budget.loads)
        flat = flat_network(reduction.kernel, 1e3)
        early = [x for x in reduction.loads if x.start <= 3]
        prices = Prices(flat, flat_budget(flat, early, budget.limit), reduction.constant, Effort())
        for _ in range(20):
            prices.step(math.inf)
        total, loads = prices.at.sum(), flat_budget(flat, reduction.loads, budget.limit + more)
        raised += bool(total)
        prices.to_budget(loads, more)
        assert prices.at.sum() == pytest.approx(total)
        best = brute_force_within(network, Budget(budget.loads, budget.limit + more))
        for _ in range(20):
            assert not best.fits or reduction.constant + prices.lower <= best.cost * (1 + 1e-9)
            prices.step(math.inf)
        prices.charge(np.zeros(loads.room.size))
        fresh = Prices(flat, loads, reduction.constant, Effort())
        states = np.zeros(flat.turn.size, dtype=np.int64)
        assert _moved_cost(prices, states) == pytest.approx(_moved_cost(fresh, states))
    assert raised > 20


def _moved_cost(prices: Prices, states: Indices) -> float:
    """What states cost with the costs where sweeps have moved them."""
    flat, dual = prices.flat, prices.dual
    total = sum(float(dual.theta[flat.offsets[node] + s]) for node, s in enumerate(states))
    for node, s in enumerate(states):
        for entry in range(flat.first[node], flat.turn[node]):
            other, size = flat.other[entry], flat.offsets[node + 1] - flat.offsets[node]
            total += float(dual.flat.pool[flat.table[entry] + states[other] * size + s])
            total += float(dual.messages[flat.message[entry] + s])
            total += float(dual.messages[flat.message[flat.twin[entry]] + states[other]])
    return total
