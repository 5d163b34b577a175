"""The planner's solver, without a limit, against every combination of states."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from sbp.passes.plan import constants, tables
from sbp.passes.plan.eliminate import plan_elimination
from sbp.passes.plan.flat_network import flat_network
from sbp.passes.plan.network import CostNetwork, Infeasible, Solution, Table
from sbp.passes.plan.reduce import reduce_network
from sbp.passes.plan.solve import solve
from sbp.passes.plan.sweeps import Dual
from tests.passes.plan.brute import brute_force

KINDS = ("real", "integer ties", "integer ties and forbidden", "bijections")


def random_network(seed: int) -> CostNetwork:
    """Up to 7 nodes of up to 4 states; parallel edges, self loops and unconnected parts occur."""
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    nodes = int(rng.integers(1, 8))
    sizes = rng.integers(1, 5, nodes)

    def table(*shape: int) -> Table:
        if kind == "real":
            return rng.normal(size=shape)
        costs = rng.integers(-3, 4, shape).astype(float)
        if kind == "integer ties and forbidden":
            costs[rng.random(shape) < 0.25] = np.inf
        if kind == "bijections" and len(shape) == 2 and shape[0] == shape[1] and rng.random() < 0.5:
            costs[rng.permutation(shape[0])[:, None] != np.arange(shape[0])] = np.inf
        return costs

    unary = tuple(table(size) for size in sizes)
    edges = []
    for _ in range(int(rng.integers(0, 3 * nodes + 1))):
        i, j = (int(node) for node in rng.integers(nodes, size=2))
        edges.append((i, j, table(sizes[i], sizes[j])))
    return CostNetwork(unary, tuple(edges))


def dense_network(seed: int) -> CostNetwork:
    """Four to seven nodes, most pairs joined by strong edges: what no reduction removes."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 6, int(rng.integers(4, 8)))
    edges = []
    for i, j in itertools.combinations(range(len(sizes)), 2):
        if rng.random() < 0.8:
            shape = sizes[i], sizes[j]
            costs = rng.normal(size=shape) if seed % 3 else rng.integers(-4, 5, shape).astype(float)
            if seed % 3 == 1:
                costs[rng.random(shape) < 0.15] = np.inf
                costs[0, 0] = 2.0  # so that one assignment is legal
            edges.append((i, j, costs))
    return CostNetwork(tuple(0.1 * rng.normal(size=size) for size in sizes), tuple(edges))


def optimum(network: CostNetwork) -> float:
    try:
        return brute_force(network).cost
    except Infeasible:
        return math.inf


def grid(side: int, states: int, seed: int) -> CostNetwork:
    rng = np.random.default_rng(seed)
    at = {place: node for node, place in enumerate(itertools.product(range(side), repeat=2))}
    edges = [
        (at[r, c], at[r + dr, c + dc], rng.normal(size=(states, states)))
        for r, c in at
        for dr, dc in ((0, 1), (1, 0))
        if (r + dr, c + dc) in at
    ]
    return CostNetwork(tuple(rng.normal(size=states) for _ in at), tuple(edges))


def eliminated(network: CostNetwork) -> float:
    plan = plan_elimination(network, max_cells=1e8)
    assert plan is not None
    return network.cost(plan.run())


def search_only(monkeypatch: pytest.MonkeyPatch, cells: float = 0.0) -> None:
    """Make the solver search where it would eliminate at once, or compare all combinations."""
    monkeypatch.setattr(constants, "COMPARED_CELLS", 0)
    monkeypatch.setattr(constants, "ELIMINATED_CELLS", cells)


@pytest.mark.parametrize("start", range(0, 1600, 200))
def test_solve_is_exact(start: int) -> None:
    for seed in range(start, start + 200):
        network = random_network(seed)
        best = optimum(network)
        if math.isinf(best):
            with pytest.raises(Infeasible):
                solve(network)
            continue
        answer = solve(network)
        assert answer.cost == network.cost(answer.states) == pytest.approx(best, abs=1e-9), seed
        assert answer.gap == 0.0
        assert answer.bound <= best + 1e-9


@pytest.mark.parametrize("start", range(0, 600, 200))
def test_solve_is_exact_where_nothing_reduces(start: int) -> None:
    kernels = 0
    for seed in range(start, start + 200):
        network = dense_network(seed)
        answer = solve(network)
        assert answer.cost == pytest.approx(optimum(network), abs=1e-9), seed
        assert answer.gap == 0.0, seed
        kernels += len(reduce_network(network).nodes) > 3
    assert kernels > 120


@pytest.mark.some(1)
@pytest.mark.parametrize("cells", [0.0, 60.0])
def test_bound_holds_when_little_can_be_eliminated(cells: float, monkeypatch: pytest.MonkeyPatch) -> None:
    search_only(monkeypatch, cells)
    gaps = 0
    for network in [*map(dense_network, range(300)), *map(random_network, range(500))]:
        best = optimum(network)
        try:
            answer = solve(network)
        except Infeasible:
            assert math.isinf(best)
            continue
        assert answer.bound <= best + 1e-9
        assert answer.cost >= best - 1e-9
        assert answer.gap > 0.0 or answer.cost == pytest.approx(best, abs=1e-9)
        gaps += answer.gap > 0.0
    assert 50 < gaps < 300  # the relaxation is not exact on all of them, and says so


def test_sweeps_only_raise_a_bound_that_holds() -> None:
    for seed in range(150):
        kernel = dense_network(seed)
        best = optimum(kernel)
        dual = Dual(flat_network(kernel, 100.0))
        bounds = [dual.lower_bound()]
        for forward in (True, False) * 4:
            swept = dual.sweep(forward)
            bounds.append(dual.lower_bound())
            assert swept == pytest.approx(bounds[-1], abs=1e-8)
        assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(bounds))
        assert bounds[-1] <= best + 1e-9


def test_states_cost_at_least_what_fixing_believes() -> None:
    for seed in range(20):
        network = dense_network(seed)
        dual = Dual(flat_network(network, 100.0))
        dual.sweep(True)
        dual.sweep(False)
        base = dual.lower_bound()
        excess = np.zeros(dual.flat.theta.size)
        dual.sweep(True, excess)
        dual.sweep(False, excess)
        for node, more in enumerate(dual.flat.split(excess)):
            for state, extra in enumerate(more):
                theta = np.where(np.arange(more.size) == state, network.unary[node], np.inf)
                fixed = CostNetwork((*network.unary[:node], theta, *network.unary[node + 1 :]), network.edges)
                assert base + extra <= optimum(fixed) + 1e-9


def test_reduction_keeps_the_optimum() -> None:
    reduced = 0
    for seed in range(600):
        network = random_network(seed)
        best = optimum(network)
        try:
            reduction = reduce_network(network)
        except Infeasible:
            assert math.isinf(best)
            continue
        assert reduction.constant + optimum(reduction.kernel) == pytest.approx(best, abs=1e-9), seed
        if not math.isinf(best):
            states = reduction.expand(brute_force(reduction.kernel).states if reduction.nodes else ())
            assert network.cost(states) == pytest.approx(best, abs=1e-9), seed
        reduced += len(reduction.nodes) < len(network.unary)
    assert reduced > 400


@pytest.mark.parametrize("seed", range(20))
def test_trees_reduce_to_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    edges = tuple((int(rng.integers(node)), node, rng.normal(size=(3, 3))) for node in range(1, 12))
    network = CostNetwork(tuple(rng.normal(size=3) for _ in range(12)), edges)
    assert reduce_network(network).nodes == ()
    assert solve(network).cost == pytest.approx(brute_force(network).cost, abs=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_grids_by_search_agree_with_elimination(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    network = grid(6, 4, seed)
    best = eliminated(network)
    assert solve(network).cost == pytest.approx(best, abs=1e-9)
    search_only(monkeypatch)
    answer = solve(network)
    assert answer.bound <= best + 1e-9
    assert answer.cost >= best - 1e-9
    if answer.gap == 0.0:
        assert answer.cost == pytest.approx(best, abs=1e-9)


def test_nodes_without_a_choice_take_no_axis() -> None:
    rng = np.random.default_rng(0)
    leaves = 70
    edges = [(0, leaf, rng.normal(size=(3, 1))) for leaf in range(1, leaves)]
    edges += [(a, b, rng.normal(size=(1, 1))) for a in range(1, leaves) for b in range(a + 1, leaves)]
    network = CostNetwork((rng.normal(size=3), *(rng.normal(size=1) for _ in range(1, leaves))), tuple(edges))
    best = min(network.cost([state] + [0] * (leaves - 1)) for state in range(3))
    assert eliminated(network) == best


def test_elimination_declines_what_is_too_large() -> None:
    network = grid(6, 4, 0)
    plan = plan_elimination(network, max_cells=1e8)
    assert plan is not None
    assert plan_elimination(network, max_cells=plan.cells - 1) is None


def test_equal_tables_are_stored_once() -> None:
    store = tables.TableStore()
    first, again = np.eye(3), np.eye(3)
    assert store.put_shared(first) == store.put(again) == store.put_shared(again)
    assert store.put(np.eye(3).reshape(9)) != store.put(first)


def test_the_same_network_gives_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    search_only(monkeypatch)
    for network in map(dense_network, range(60)):
        assert solve(network) == solve(
            CostNetwork(tuple(theta.copy() for theta in network.unary), network.edges)
        )


def test_ties_take_the_lowest_state() -> None:
    nothing = CostNetwork((np.zeros(3), np.zeros(4), np.ones(2)), ((0, 1, np.zeros((3, 4))),))
    assert solve(nothing) == brute_force(nothing) == Solution((0, 0, 0), 1.0, 1.0)


def test_large_infinities_and_penalties_stay_exact() -> None:
    rng = np.random.default_rng(3)
    equal = np.where(np.eye(6) == 1, 0.0, np.inf)
    edges = [(node, (node + 1) % 40, equal) for node in range(40)]
    edges += [(node, (7 * node + 3) % 40, np.where(rng.random((6, 6)) < 0.1, 1e6, 0.0)) for node in range(40)]
    network = CostNetwork(tuple(rng.random(6) for _ in range(40)), tuple(edges))
    best = min(network.cost([state] * 40) for state in range(6))
    assert solve(network).cost == best


def test_infeasible_names_the_conflict() -> None:
    never = np.full((2, 2), np.inf)
    unary = tuple(np.zeros(2) for _ in range(4))
    with pytest.raises(Infeasible, match="edge between nodes 1 and 3") as caught:
        solve(CostNetwork(unary, ((0, 1, np.ones((2, 2))), (1, 3, never))))
    assert caught.value.nodes == (1, 3)
    with pytest.raises(Infeasible, match="state of node 2"):
        solve(CostNetwork((*unary[:2], np.full(2, np.inf)), ()))
    equal, other = np.where(np.eye(2) == 1, 0.0, np.inf), np.where(np.eye(2) == 1, np.inf, 0.0)
    with pytest.raises(ValueError, match="no assignment has a finite cost"):
        solve(CostNetwork(unary, ((0, 1, equal), (1, 2, equal), (0, 2, other))))


@pytest.mark.parametrize(
    ("unary", "edges", "message"),
    [
        ([[]], [], "node 0"),
        ([[0.0, math.nan]], [], "NaN"),
        ([[0.0, -math.inf]], [], "negative infinite"),
        ([[0.0], [0.0, 1.0]], [(0, 1, [[0.0], [1.0]])], r"must be \(1, 2\)"),
        ([[0.0]], [(0, 1, [[0.0]])], "leaves the 1 nodes"),
    ],
)
def test_malformed_networks_are_refused(
    unary: list[list[float]], edges: list[tuple[int, int, list[list[float]]]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CostNetwork(
            tuple(np.array(theta) for theta in unary), tuple((i, j, np.array(t)) for i, j, t in edges)
        )


def test_gap() -> None:
    assert Solution((), 2.0, 1.0).gap == 0.5
    assert Solution((), 2.0, 2.0 - 1e-10).gap == 0.0
    assert Solution((), -1.0, -2.0).gap == 1.0
    assert Solution((), math.inf, 1.0).gap == math.inf


def test_nothing_costs_nothing() -> None:
    assert solve(CostNetwork((), ())) == Solution((), 0.0, 0.0)


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    search_only(monkeypatch)
    heard = 0
    for seed in range(40):
        network, told = dense_network(seed), list[tuple[float, float]]()
        best = optimum(network)
        answer = solve(network, progress=lambda *now, told=told: told.append(now))
        for cost, bound in told:
            assert bound - 1e-9 <= best <= cost + 1e-9
        assert not told or told[-1][0] == pytest.approx(answer.cost) or told[-1][0] > answer.cost
        heard += bool(told)
    assert heard > 10
