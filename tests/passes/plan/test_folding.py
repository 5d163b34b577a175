"""Equal parts of a network as one: what it stands for, and where sweeps over the whole begin."""

import numpy as np
import pytest

from sbp.passes.plan import constants
from sbp.passes.plan.bounds import Narrowing, solve_indexed
from sbp.passes.plan.folding import FoldedNetwork, fold, fold_if_alike
from sbp.passes.plan.network import CostNetwork, IndexedNetwork, IndexedTable
from sbp.passes.plan.solve import solve

LAYERS = 14


def layers(seed: int, joined: bool = False) -> IndexedNetwork:
    """Equal layers of three nodes one after the other, and an end that differs.

    Arguments:
      joined: whether nodes of one class are joined to each other too.
    """
    rng = np.random.default_rng(seed)
    tables = [
        IndexedTable(rng.random((4, 4)), rng.integers(0, 4, 4), rng.integers(0, 4, 4), 1.0 + k)
        for k in range(5)
    ]
    costs = [rng.random(4) for _ in range(3)]
    edges = list[tuple[int, int, IndexedTable]]()
    for a in range(0, 3 * LAYERS, 3):
        edges += [(a, a + 1, tables[0]), (a + 2, a + 1, tables[1]), (a, a + 2, tables[4])]
        if a:
            edges.append((a - 1, a, tables[2]))
        if a and joined:
            edges.append((a - 3, a, tables[3]))
    unary = [*costs] * (LAYERS - 1) + [costs[0], costs[1], rng.random(4)]
    return IndexedNetwork(tuple(unary), tuple(edges), np.arange(3 * LAYERS))


def parts_of(network: IndexedNetwork) -> FoldedNetwork[IndexedNetwork]:
    found = fold_if_alike(network)
    assert found.network is not network
    return found


@pytest.mark.parametrize("seed", range(8))
def test_an_answer_of_equal_parts_is_one_of_the_whole_at_the_same_cost(seed: int) -> None:
    network = layers(seed)
    alike = parts_of(network)
    assert len(alike.network.unary) < 30 and (alike.edges >= 0).all()
    states = np.random.default_rng(seed).integers(0, 4, len(alike.network.unary)).tolist()
    assert network.cost(alike.expand(states)) == pytest.approx(alike.network.cost(states))
    assert network.cost(alike.expand(states)) == network.dense().cost(alike.expand(states))


def test_few_equal_parts_are_not_brought_together() -> None:
    rng = np.random.default_rng(0)
    table = IndexedTable(rng.random((3, 3)), np.arange(3), np.arange(3))
    unary = tuple(rng.random(3) for _ in range(9))
    network = IndexedNetwork(unary, ((0, 1, table),), np.arange(9))
    assert fold_if_alike(network).network is network


@pytest.mark.parametrize("joined", [False, True])
def test_sweeps_begin_where_equal_parts_have_come_to(joined: bool) -> None:
    """What begins there has a true bound of the whole, and of each of its states."""
    for seed in range(20):
        network = layers(seed, joined)
        alike = parts_of(network)
        assert (alike.edges < 0).any() == joined
        reached, begun = (Narrowing(x, np.float64) for x in (alike.network, network))
        reached.converge()
        begun.begin_at(alike, reached)
        begun.sweep()
        begun.sweep()
        best = solve(network.dense())
        assert best.gap == 0.0 and begun.bound <= best.cost * (1 + 1e-12)
        kept = begun.states_below(best.cost * (1 + 1e-9))
        assert all(state in own for state, own in zip(best.states, kept, strict=True))


@pytest.mark.parametrize("joined", [False, True])
def test_the_answer_is_as_good_as_of_the_whole(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DENSE_CELLS", 0)
    monkeypatch.setattr(constants, "WRITTEN_CELLS", 300)
    for seed in range(20):
        network = layers(seed, joined)
        found, best = solve_indexed(network), solve(network.dense())
        assert found.gap == 0.0 and found.cost == pytest.approx(best.cost, rel=1e-9)
        assert network.dense().cost(found.states) == pytest.approx(found.cost, rel=1e-9)


def test_where_too_many_states_may_be_better_equal_parts_choose_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("DENSE_CELLS", "WRITTEN_CELLS", "RESULT_CELLS"):
        monkeypatch.setattr(constants, name, 0)
    for seed in range(5):
        network = layers(seed)
        found, best = solve_indexed(network), solve(network.dense()).cost
        assert found.cost == pytest.approx(network.cost(found.states)) and found.bound <= best * (1 + 1e-12)
        assert found.cost <= 1.5 * best


def test_equal_parts_that_must_choose_otherwise_are_planned_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a class joined through one node cannot be alike, the whole has an answer all the same."""
    monkeypatch.setattr(constants, "DENSE_CELLS", 0)
    differ = IndexedTable(np.array([[np.inf, 0.0], [0.0, np.inf]]), np.arange(2), np.arange(2))
    ring = tuple((k, (k + 1) % 6, differ) for k in range(6))
    network = IndexedNetwork((np.zeros(2),) * 6, ring, np.arange(6))
    assert solve_indexed(network).cost == 0.0


def rings(n: int, width: int = 3, states: int = 4) -> CostNetwork:
    """A stack of equal rings, each bound to the next."""
    rng = np.random.default_rng(0)
    unary = [rng.random(states) for _ in range(width)]
    inside = [rng.random((states, states)) for _ in range(width)]
    across = rng.random((states, states))
    edges = [
        (k * width + i, k * width + (i + 1) % width, inside[i]) for k in range(n) for i in range(width)
    ] + [(k * width, (k + 1) * width, across) for k in range(n - 1)]
    return CostNetwork(tuple(unary[i] for _ in range(n) for i in range(width)), tuple(edges))


@pytest.mark.parametrize("n", [2, 5, 20])
def test_costs_are_those_of_the_whole(n: int) -> None:
    """What a folded solution is said to cost, it costs, and no less than the optimum."""
    network = rings(n)
    folded = fold(network, hops=2)
    states = solve(folded.network).states
    assert network.cost(folded.expand(states)) == pytest.approx(folded.network.cost(states), rel=1e-12)
    assert folded.network.cost(states) >= solve(network).cost - 1e-12


def test_layers_are_one_and_ends_apart() -> None:
    """The size does not grow with the number of layers."""
    assert len(fold(rings(20), 2).network.unary) == len(fold(rings(40), 2).network.unary) < 30
    classes = fold(rings(20), 2).classes
    assert classes[30] == classes[27] != classes[0]


def test_equal_costs_are_alike_whatever_the_object() -> None:
    """Tables go by what they hold."""
    table = np.eye(2)
    edges = tuple((i, i + 1, table.copy()) for i in range(7))
    network = CostNetwork(tuple(np.zeros(2) for _ in range(8)), edges)
    assert len(fold(network, hops=1).network.unary) == 3
