"""Bounds that hold of every plan, whatever runs beside what."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import sbp
from sbp.passes.physical.exposure import Clock
from sbp.passes.plan import constants
from sbp.passes.plan.bounds import Narrowing, least_kernel_seconds, least_seconds, solve_indexed
from sbp.passes.plan.flat_network import all_costs
from sbp.passes.plan.network import IndexedNetwork, IndexedTable, Infeasible
from sbp.passes.spec import SpecError, check_plan
from tests.passes.plan.brute import brute_force
from tests.passes.search.test_explore import HARDWARE, SLOW, beside, chain, problem, sent_twice, summed


@pytest.mark.parametrize("fn", [beside, chain, summed, sent_twice])
@pytest.mark.parametrize("hardware", [HARDWARE, SLOW])
def test_no_plan_has_a_shorter_step(fn: object, hardware: object) -> None:
    """Of every assignment whose ops take little, the step takes at least what is proven of all."""
    model, network, _ = problem(fn, hardware)  # type: ignore[arg-type]
    bound = least_kernel_seconds(model.c, model.boxings)
    assert 0.0 < bound <= least_seconds(model.c, model.boxings)
    states, costs = all_costs(network)
    clock = Clock(model.c, model.boxings)
    for k in np.argsort(costs, kind="stable")[:60]:
        assignment = model.chosen_signatures(states[:, k].tolist(), 0.0, 0.0)
        assert clock.times(assignment).step_seconds >= bound * (1 - 1e-9)


def plan_of_chain(kind: str) -> sbp.Plan:
    """Two products, planned for a kind of device."""
    x = np.ones((256, 256), np.float32)
    placement = sbp.placement(kind, shape=(2, 4))
    return sbp.compile(lambda x, w: (x.T @ w).T @ x, placement).plan(x, x)


def test_the_gap_of_a_step_is_said_where_something_overlaps() -> None:
    """On CPUs one thing comes after the other: the bound on that time is the bound on the step."""
    gpu, cpu = plan_of_chain("h100"), plan_of_chain("cpu")
    assert 0.0 < gpu.step_bound <= gpu.step_seconds
    assert gpu.step_gap == pytest.approx(1 - gpu.step_bound / gpu.step_seconds)
    assert cpu.step_bound == cpu.bound and cpu.step_gap == cpu.cheapest_gap
    hidden = replace(gpu, step_seconds=0.9 * gpu.seconds, step_bound=0.45 * gpu.seconds)
    assert "its step is at most 50 % from the shortest" in str(hidden)
    assert "from the shortest" not in str(cpu)


def test_a_step_below_its_bound_is_a_fault() -> None:
    plan = plan_of_chain("h100")
    with pytest.raises(SpecError, match="no step is shorter"):
        check_plan(replace(plan, step_bound=2 * plan.step_seconds))


SEEDS = range(40)


def random_indexed(seed: int, forbidden: float = 0.0) -> IndexedNetwork:
    """Four to seven nodes, tables picked out of two cores."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 5, int(rng.integers(4, 8)))
    cores = [rng.random((4, 4)) for _ in range(2)]
    for core in cores:
        core[rng.random(core.shape) < forbidden] = np.inf
    edges = []
    for i in range(len(sizes)):
        for j in range(i + 1, len(sizes)):
            if j == i + 1 or rng.random() < 0.4:
                low, high = (i, j) if rng.random() < 0.5 else (j, i)
                rows, columns = (rng.integers(0, 4, sizes[end]) for end in (low, high))
                edges.append((low, high, IndexedTable(cores[len(edges) % 2], rows, columns, 2.0)))
    unary = tuple(rng.random(size) for size in sizes)
    return IndexedNetwork(unary, tuple(edges), rng.permutation(len(sizes)))


def least_with_each_state(network: IndexedNetwork) -> list[list[float]]:
    dense = network.dense()
    found = []
    for node, theta in enumerate(dense.unary):
        fixed = []
        for state in range(theta.size):
            only = np.where(np.arange(theta.size) == state, theta, np.inf)
            unary = (*dense.unary[:node], only, *dense.unary[node + 1 :])
            fixed.append(brute_force(type(dense)(unary, dense.edges)).cost)
        found.append(fixed)
    return found


@pytest.mark.full
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bounds_of_states_hold(dtype: type) -> None:
    for seed in SEEDS:
        network = random_indexed(seed)
        narrowing = Narrowing(network, dtype)
        for _ in range(6):
            narrowing.sweep()
        best = brute_force(network.dense()).cost
        assert narrowing.bound <= best * (1 + 1e-12), seed
        bounds = np.split(narrowing.at_least, narrowing.wide.offsets[1:-1])
        for node, costs in enumerate(least_with_each_state(network)):
            at = int(np.flatnonzero(network.order == node)[0])
            assert (bounds[at] <= np.array(costs) * (1 + 1e-12)).all(), seed


@pytest.mark.parametrize("forbidden", [0.0, 0.15])
def test_narrowed_is_as_good_as_whole(forbidden: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DENSE_CELLS", 0)
    monkeypatch.setattr(constants, "WRITTEN_CELLS", 30)
    for seed in SEEDS:
        network = random_indexed(seed, forbidden)
        try:
            best = brute_force(network.dense()).cost
        except Infeasible:
            with pytest.raises(Infeasible):
                solve_indexed(network)
            continue
        found = solve_indexed(network)
        assert found.gap == 0.0, seed
        assert found.cost == pytest.approx(best, rel=1e-9), seed
        assert network.dense().cost(found.states) == pytest.approx(best, rel=1e-9), seed


def test_written_down_on_some_states() -> None:
    network = random_indexed(3)
    kept = [np.array([0, theta.size - 1]) for theta in network.unary]
    whole, part = network.dense(), network.dense(kept)
    for (i, j, table), (_, _, small) in zip(whole.edges, part.edges, strict=True):
        assert (small == table[np.ix_(kept[i], kept[j])]).all()
    assert network.kept_cells(kept) == 4 * len(network.edges)
