"""Where a search under a limit begins."""

import numpy as np
import pytest

from sbp.passes.plan.budget import Budget
from sbp.passes.plan.cheapest import choose
from sbp.passes.plan.priced import priced_starts
from sbp.passes.plan.recompute import RecomputingModel
from tests.passes.plan.test_recompute import LIMIT, given_of


def test_starts_end_with_the_cheapest_that_keeps_the_limit() -> None:
    given = given_of()
    model = RecomputingModel(*given, LIMIT)
    network = model.build()
    fastest = choose(*given, None)
    free = priced_starts(model, network, Budget(tuple(model.loads), 1e12), fastest, 20.0).states
    assert len(free) == 1 and network.cost(free[0]) == pytest.approx(fastest.seconds, rel=1e-6)
    limit = 0.6 * Budget(tuple(model.loads), 1e12).peak_bytes(free[0])
    budget = Budget(tuple(model.loads), limit)
    found = priced_starts(model, network, budget, fastest, 20.0)
    starts = found.states
    assert found.free == free[0] and found.price > 0.0
    peaks, costs = [budget.peak_bytes(s) for s in starts], [network.cost(s) for s in starts]
    fits = np.array(peaks) <= limit
    assert fits[-1] and costs[-1] == min(np.array(costs)[fits]) >= fastest.seconds * (1 - 1e-9)
    # Ops are as in the fastest plan.
    chosen = model.chosen(starts[-1], costs[-1], 0.0)
    assert all(chosen.strategies[i] is s for i, s in fastest.strategies.items())
