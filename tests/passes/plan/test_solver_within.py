"""The cheapest assignment under a budget against every combination of states."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from sbp.passes.plan import constants, forests, sweeps
from sbp.passes.plan.budget import Budget, FlatBudget, Load, flat_budget
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.flat_network import flat_network
from sbp.passes.plan.network import CostNetwork, Infeasible
from sbp.passes.plan.reduce import reduce_network
from sbp.passes.plan.solve import Solver, solve_within
from tests.passes.plan.brute import brute_force, brute_force_within
from tests.passes.plan.budgets import feasible_problems, problem


@pytest.mark.parametrize("tightness", [0.4, 0.7, 1.0])
def test_few_combinations_are_solved_exactly(tightness: float) -> None:
    for network, budget in feasible_problems(tightness, 150):
        best, found = brute_force_within(network, budget), solve_within(network, budget)
        assert found.fits == best.fits
        assert found.peak_bytes == budget.peak_bytes(found.states)
        if best.fits:
            assert found.cost == pytest.approx(best.cost, abs=1e-9)
            assert found.gap == 0.0 and found.bound <= best.cost + 1e-9
        else:
            assert found.peak_bytes == found.least_peak_bytes == best.peak_bytes
            assert found.bound == math.inf


def test_nodes_of_one_state_are_no_dims() -> None:
    """What is all but decided has thousands of them, and an array 64 dims at most."""
    decided = (np.zeros(1),) * 1_600
    table = np.array([[0.0, 3.0, 3.0], [3.0, 0.0, 3.0]])
    network = CostNetwork((*decided, np.array([2.0, 1.0]), *decided, np.zeros(3)), ((1_600, 3_201, table),))
    budget = Budget((Load(1_600, 0, 1, np.array([1.0, 5.0])),), 4.0)
    found = solve_within(network, budget)
    assert (found.cost, found.peak_bytes, found.states[1_600], found.states[3_201]) == (2.0, 1.0, 0, 0)
    assert brute_force(network).cost == 1.0
    assert brute_force_within(network, budget).cost == 2.0


@pytest.mark.some(1)
@pytest.mark.parametrize("tightness", [0.4, 0.7, 1.0])
def test_search_against_enumeration(tightness: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "COMPARED_CELLS", 0)
    monkeypatch.setattr(constants, "STALLED_ROUNDS", 3)
    problems = feasible_problems(tightness, 60)
    found_best = closed = 0
    for network, budget in problems:
        best, found = brute_force_within(network, budget), solve_within(network, budget)
        assert found.cost == network.cost(found.states)
        assert found.peak_bytes == budget.peak_bytes(found.states)
        if best.fits:
            assert found.bound <= best.cost + 1e-9
            assert not found.fits or found.cost >= best.cost - 1e-9
            found_best += found.fits and found.cost <= best.cost + 1e-9
            closed += found.gap == 0.0
        else:
            assert not found.fits
            assert found.least_peak_bytes <= best.peak_bytes + 1e-9 <= found.peak_bytes + 2e-9
            found_best += found.peak_bytes <= best.peak_bytes + 1e-9
    assert found_best >= 0.9 * len(problems)
    assert closed > 0


def test_states_that_cost_too_much_go_and_bounds_hold_under_another_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "COMPARED_CELLS", 0)
    monkeypatch.setattr(constants, "STALLED_ROUNDS", 1)
    alone = 0
    for network, budget in feasible_problems(0.7, 40):
        search = Solver(network, budget)
        search.run()
        alone += search.rest_bound > -math.inf
        for part in (1.2, 0.9):
            other = Budget(budget.loads, part * budget.limit)
            best, found = brute_force_within(network, other), search.go_on(other.limit, Effort())
            assert not best.fits or found.bound <= best.cost + 1e-9
            assert not found.fits or found.cost >= best.cost - 1e-9
    assert alone > 2


def test_a_loose_budget_changes_nothing() -> None:
    for network, budget in feasible_problems(1.0, 60):
        loose = Budget(budget.loads, 1e6)
        found = solve_within(network, loose)
        assert found.fits
        assert found.cost == pytest.approx(brute_force(network).cost, abs=1e-9)


def test_the_same_problem_gives_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "COMPARED_CELLS", 0)
    monkeypatch.setattr(constants, "STALLED_ROUNDS", 2)
    for network, budget in feasible_problems(0.6, 10):
        assert solve_within(network, budget) == solve_within(network, budget)


def test_a_limit_that_nothing_keeps_is_proven() -> None:
    two = CostNetwork((np.zeros(2), np.zeros(2)), ((0, 1, np.array([[np.inf, 0.0], [0.0, np.inf]])),))
    loads = tuple(Load(node, 0, 3, np.array([1.0, 4.0])) for node in (0, 1))
    found = solve_within(two, Budget(loads, 4.0))
    assert (found.fits, found.peak_bytes, found.bound, found.gap) == (False, 5.0, math.inf, math.inf)
    assert 4.0 < found.least_peak_bytes <= 5.0
    assert solve_within(two, Budget(loads, 5.0)).gap == 0.0


def test_progress_is_told_and_time_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "COMPARED_CELLS", 0)
    network, budget = feasible_problems(0.6, 12)[-1]
    monkeypatch.setattr(constants, "STALLED_ROUNDS", 1)
    solve_within(network, budget)  # compiles what is not compiled yet
    told: list[tuple[float, float]] = []
    found = solve_within(
        network, budget, effort=Effort().at_most(0.3), progress=lambda *now: told.append(now)
    )
    assert found.states and told
    assert all(bound <= cost + 1e-9 for cost, bound in told)
    assert all(before <= after for (_, _, before), (_, _, after) in itertools.pairwise(told))


def test_infeasible_networks_are_refused() -> None:
    with pytest.raises(Infeasible):
        solve_within(CostNetwork((np.full(2, np.inf),), ()), Budget((), 1.0))


def test_malformed_budgets_are_refused() -> None:
    for size in (-1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="load 0 of node 2"):
            Budget((Load(2, 0, 1, np.array([1.0, size])),), 3.0)


def flat_of(network: CostNetwork, budget: Budget) -> FlatBudget:
    return flat_budget(flat_network(network), budget.loads, budget.limit)


def test_the_times_left_have_the_peak() -> None:
    rng = np.random.default_rng(0)
    for seed in range(200):
        network, budget = problem(seed, 0.7)
        network = CostNetwork(network.unary, ())
        fixed = tuple(Load(-1, t, t + 3, np.array([2.0])) for t in range(0, 9, 4))
        budget = Budget((*budget.loads, *fixed), budget.limit)
        flat = flat_of(network, budget)
        for _ in range(5):
            states = np.array([rng.integers(theta.size) for theta in network.unary])
            over = (forests.use_of(flat, states) - flat.room).max(initial=-budget.limit)
            assert budget.limit + over == pytest.approx(budget.peak_bytes(states.tolist()))


def test_reduction_keeps_the_optimum_under_a_budget() -> None:
    for network, budget in feasible_problems(0.7, 150):
        best = brute_force_within(network, budget)
        if not best.fits:
            continue
        reduction = reduce_network(network, loads=budget.loads)
        rest = CostNetwork((*reduction.kernel.unary, np.zeros(1)), reduction.kernel.edges)
        last = len(reduction.nodes)
        loads = [
            Load(load.node if load.node >= 0 else last, load.start, load.end, load.bytes)
            for load in reduction.loads
        ]
        kernel = brute_force_within(rest, Budget(tuple(loads), budget.limit))
        assert reduction.constant + kernel.cost == pytest.approx(best.cost, abs=1e-9)
        states = reduction.expand(kernel.states[:last])
        assert network.cost(states) == pytest.approx(best.cost, abs=1e-9)
        assert budget.peak_bytes(states) == pytest.approx(kernel.peak_bytes)


def test_forests_are_chosen_exactly_and_counted_right() -> None:
    for seed in range(80):
        network, budget = problem(seed, 0.7)
        tables = {(min(i, j), max(i, j)): (i, j, np.minimum(t, 50.0)) for i, j, t in network.edges if i != j}
        network, pairs = CostNetwork(network.unary, tuple(tables.values())), set(tables)
        loads = budget.loads
        flat = flat_network(network)
        flat_loads = flat_budget(flat, loads, 5.0)
        work = forests.workplace(flat, flat_loads, seed)
        rng = np.random.default_rng(seed)
        states = np.array([rng.integers(theta.size) for theta in network.unary])
        for _ in range(10):
            before, use = states.copy(), forests.use_of(flat_loads, states)
            taken = forests.grow(flat, work, 4, np.arange(states.size), 2, 1)
            chosen = set(work.order[:taken].tolist())
            inside = sum(1 for i, j in pairs if i in chosen and j in chosen)
            assert len(chosen) == taken and inside <= taken - 1  # no cycle
            forests.choose_on(flat, flat.theta, work, taken, states)
            others = tuple(
                theta if node in chosen else np.where(np.arange(theta.size) == before[node], theta, np.inf)
                for node, theta in enumerate(network.unary)
            )
            assert network.cost(states.tolist()) == pytest.approx(
                brute_force(CostNetwork(others, network.edges)).cost
            )
            change = forests.cost_change(flat, work, taken, states)
            cost = sweeps.total_cost(flat, states) - sweeps.total_cost(flat, before)
            assert change == pytest.approx(cost, abs=1e-9)
            now = forests.use_of(flat_loads, states)
            over = [np.maximum(u - flat_loads.room, 0.0).sum() for u in (now, use)]
            found = forests.excess_change(flat_loads, work, taken, states, use)
            assert found == pytest.approx(over[0] - over[1], abs=1e-9)
            accepted = bool(rng.integers(2))
            forests.settle_change(flat_loads, work, taken, states, use, accepted)
            np.testing.assert_allclose(use, forests.use_of(flat_loads, states), atol=1e-9)
            assert accepted or (states == before).all()
            assert not work.change.any()


def test_moves_begin_where_there_is_too_much() -> None:
    """At nodes of which something is there then; at any, where there is too much nowhere."""
    network = CostNetwork((np.zeros(2),) * 4, ())
    loads = [Load(0, 0, 2, np.ones(2)), Load(1, 1, 4, np.ones(2)), Load(2, 3, 6, np.ones(2))]
    loads += [Load(3, 4, 6, np.ones(2)), Load(3, 0, 2, np.ones(2))]
    flat = flat_network(network)
    for limit, among in ((2.5, [0, 1, 3]), (9.0, [0, 1, 2, 3])):
        budget = flat_budget(flat, loads, limit)
        use = forests.use_of(budget, np.zeros(4, np.int64))
        assert forests.nodes_over(budget, use, 4).tolist() == among


def test_a_search_begins_where_it_is_told_to() -> None:
    network, budget = problem(5, 0.9)
    best = brute_force_within(network, budget)
    search = Solver(network, budget)
    search.start_from(best.states)
    assert search.reduction.constant + search.cost == pytest.approx(best.cost) or not best.fits
    found = search.run()
    assert found.cost == pytest.approx(best.cost) and found.bound <= best.cost * (1 + 1e-9)


def test_what_is_taken_at_some_times_leaves_less_room_then() -> None:
    """Nodes that hold memory one after the other: only the last has to save it."""
    network = CostNetwork((np.array([0.0, 2.0]), np.array([0.0, 3.0]), np.array([0.0, 5.0])), ())
    sizes = np.array([4.0, 1.0])
    loads = (Load(0, 0, 2, sizes), Load(1, 10, 11, sizes), Load(1, 20, 21, sizes), Load(2, 30, 32, sizes))
    search = Solver(network, Budget(loads, 5.0))
    assert search.run().states == (0, 0, 0)
    found = search.go_on(5.0, Effort(), (Load(-1, 31, 32, np.array([3.0])),))
    assert found.states[0] == 0 and found.states[2] == 1 and found.cost == found.bound
    assert found.peak_bytes <= 5.0 < search.budget.peak_bytes((0, 0, 0)) == 7.0
    assert search.budget.peak_bytes((0, 0, 0), 0, 30) == 4.0


def test_what_nodes_have_beside_that_is_taken_too() -> None:
    network = CostNetwork((np.array([0.0, 2.0]), np.array([0.0, 3.0]), np.array([0.0, 5.0])), ())
    sizes = np.array([4.0, 1.0])
    loads = (Load(0, 0, 2, sizes), Load(1, 10, 11, sizes), Load(2, 20, 21, sizes))
    search = Solver(network, Budget(loads, 5.0))
    assert search.run().states == (0, 0, 0)
    # At a time that nothing was known of; both together are too large there.
    found = search.go_on(5.0, Effort(), (Load(0, 30, 32, sizes), Load(1, 31, 33, sizes)))
    assert found.states == (1, 0, 0) and found.fits and found.cost == found.bound
    assert search.budget.peak_bytes((0, 0, 0)) == 8.0
    # More room, and all is as it was.
    assert search.go_on(8.0, Effort()).states == (0, 0, 0)


def test_what_was_taken_of_one_plan_is_in_no_bound_of_all() -> None:
    network = CostNetwork((np.array([0.0, 2.0]), np.array([0.0, 3.0])), ())
    search = Solver(network, Budget(tuple(Load(k, 0, 2, np.array([4.0, 1.0])) for k in range(2)), 5.0))
    assert search.smallest(Effort(), 1.0).least_peak_bytes == pytest.approx(2.0)
    search.go_on(5.0, Effort(), (Load(-1, 0, 2, np.array([3.0])),))
    least = search.smallest(Effort(), 1.0)
    assert (least.peak_bytes, least.least_peak_bytes) == (5.0, pytest.approx(2.0))


def test_where_it_began_is_known_under_another_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without time to search, what it was told of is better than nothing that fits."""
    monkeypatch.setattr(constants, "COMPARED_CELLS", 0)
    network = CostNetwork(tuple(np.array([0.0, 2.0 + k]) for k in range(6)), ())
    loads = tuple(Load(k, 0, 1, np.array([4.0, 1.0])) for k in range(6))
    search = Solver(network, Budget(loads, 24.0))
    search.start_from((1, 1, 1, 1, 0, 0))
    assert search.run().states == (0,) * 6
    found = search.go_on(12.0, Effort().at_most(0.0))
    assert found.fits and found.cost <= network.cost((1, 1, 1, 1, 0, 0))


def test_what_is_not_legal_does_not_fit() -> None:
    """Without any time a search may have nothing but states between which there is no way."""
    rng, nodes, states = np.random.default_rng(0), 60, 5
    hidden, edges = rng.integers(0, states, nodes), []
    for _ in range(240):
        i, j = sorted(rng.choice(nodes, 2, replace=False).tolist())
        table = np.where(rng.random((states, states)) < 0.45, np.inf, rng.random((states, states)))
        table[hidden[i], hidden[j]] = 1.0
        edges.append((i, j, table))
    network = CostNetwork(tuple(rng.random(states) for _ in range(nodes)), tuple(edges))
    loads = tuple(Load(i, 0, 1, np.ones(states)) for i in range(nodes))
    found = solve_within(network, Budget(loads, nodes), effort=Effort().at_most(0.0))
    assert found.peak_bytes <= found.limit and np.isinf(found.cost)
    assert not found.fits and found.gap == np.inf
