"""Parts of one plan in another, against the whole costs of random networks."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from sbp.passes.plan.network import CostNetwork
from sbp.passes.search.explore import Crossover, with_part

STATES = 3


def network(seed: int, nodes: int = 12) -> CostNetwork:
    """One of random costs, with edges of a node to itself and several between two."""
    random = np.random.default_rng(seed)
    ends = random.integers(0, nodes, (nodes, 2)).tolist()
    edges = tuple((i, j, random.random((STATES, STATES))) for i, j in ends)
    return CostNetwork(tuple(random.random(STATES) for _ in range(nodes)), edges)


def assignments(seed: int, count: int, nodes: int = 12) -> list[tuple[int, ...]]:
    """Of random states."""
    return [tuple(x) for x in np.random.default_rng(seed).integers(0, STATES, (count, nodes)).tolist()]


@pytest.mark.parametrize("seed", range(8))
def test_parts_are_the_connected_nodes_that_differ(seed: int) -> None:
    net, (one, other) = network(seed), assignments(seed, 2)
    graph = nx.Graph([(i, j) for i, j, _ in net.edges])
    graph.add_nodes_from(range(len(one)))
    differ = [k for k, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    expected = {tuple(sorted(part)) for part in nx.connected_components(graph.subgraph(differ))}
    shares = np.ones(len(net.edges))
    gains = Crossover(net).gains(one, other, net.unary, shares)
    assert {tuple(n for n, _ in part) for part in gains} == expected
    assert sum(gains.values()) == pytest.approx(net.cost(other) - net.cost(one))
    assert all(state == other[n] for part in gains for n, state in part)


@pytest.mark.parametrize("seed", range(8))
def test_parts_that_cost_less_the_cheapest_first(seed: int) -> None:
    """By the shares of the edges, each part by itself."""
    net, (best, *others) = network(seed), assignments(seed, 6)
    shares = np.random.default_rng(seed).random(len(net.edges))
    counted = CostNetwork(
        net.unary, tuple((i, j, x * table) for x, (i, j, table) in zip(shares, net.edges, strict=True))
    )
    crossover = Crossover(net)
    parts = crossover.cheaper(best, others, net.unary, shares)
    costs = [counted.cost(with_part(best, part)) for part in parts]
    assert parts and costs == sorted(costs) and costs[-1] < counted.cost(best)
    every = {part for x in others for part in crossover.gains(best, x, net.unary, shares)}
    assert {part for part in every if counted.cost(with_part(best, part)) < counted.cost(best)} == set(parts)


def test_what_is_forbidden_is_no_part() -> None:
    """A part is next to what stays in the best, which may not go with it."""
    table = np.array([[0.0, 9.0], [np.inf, 0.0]])
    net = CostNetwork((np.array([1.0, 0.0]), np.zeros(2)), ((0, 1, table),))
    assert not Crossover(net).cheaper((0, 0), [(1, 0)], net.unary, np.ones(1))
