"""Few states of every node, and sweeps from node to neighbour, on random networks."""

import itertools
import math

import numpy as np
import pytest

from sbp.passes.plan import solve as solver
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.network import CostNetwork
from sbp.passes.plan.solve import solve
from sbp.passes.plan.stalled import breadth_first, few_states, patient_bound, reordered


def ladder(rungs: int, states: int, seed: int) -> CostNetwork:
    """Two lines, one forwards and one back, with an edge between the ops of each layer."""
    rng = np.random.default_rng(seed)
    n = 2 * rungs
    pairs = [(i, i + 1) for i in range(n - 1)] + [(i, n - 1 - i) for i in range(rungs - 1)]
    unary = tuple(rng.integers(0, 30, states).astype(float) for _ in range(n))
    return CostNetwork(
        unary, tuple((i, j, rng.integers(0, 30, (states, states)).astype(float)) for i, j in pairs)
    )


def cheapest(network: CostNetwork) -> float:
    every = itertools.product(*(range(theta.size) for theta in network.unary))
    return min(network.cost(states) for states in every)


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_is_never_above_the_cheapest(seed: int) -> None:
    network = ladder(4, 3, seed)
    best = cheapest(network)
    offered = list[float]()
    bound = patient_bound(
        network, 1e3, lambda: best, 0.0, Effort(), lambda x: offered.append(network.cost(x.tolist()))
    )
    assert bound <= best + 1e-9 and min(offered) >= best
    assert bound >= 0.8 * best


def test_it_ends_near_the_cost_or_with_its_time() -> None:
    network, looks = ladder(4, 3, 0), list[int]()

    def offer(x: object) -> None:
        looks.append(1)

    patient_bound(network, 1e3, lambda: 0.0, 0.0, Effort(), offer)
    assert len(looks) == 1
    patient_bound(network, 1e3, lambda: 1e9, 0.0, Effort().at_most(0.0), offer)
    assert len(looks) == 2


def test_another_order_is_the_same_problem() -> None:
    network = ladder(4, 3, 1)
    order = breadth_first(network)
    assert sorted(order) == list(range(8)) and order[:3] == [0, 1, 7]
    other = reordered(network, order)
    for states in itertools.islice(itertools.product(range(3), repeat=8), 0, None, 97):
        assert other.cost([states[node] for node in order]) == network.cost(states)


def test_the_state_now_is_always_kept() -> None:
    bounds = [np.array([5.0, 1.0, 2.0, 3.0])]
    assert few_states(bounds, [0], 3)[0].tolist() == [0, 1, 2]
    assert few_states(bounds, [1], 3)[0].tolist() == [1, 2, 3]
    assert few_states(bounds, [1], 9)[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("proves", [True, False])
def test_stalled_searches_look_at_few_states(proves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be eliminated at once, and few states can."""
    network = ladder(40, 12, 7)
    exact = solve(network)
    assert exact.cost == exact.bound
    monkeypatch.setattr(solver, "_DIRECT_CELLS", 1e3)
    monkeypatch.setattr(solver, "_FINAL_CELLS", 1e3)
    found = solve(network, proves=proves)
    assert found.bound <= exact.cost <= found.cost <= 1.02 * exact.cost
    assert math.isfinite(found.bound)
