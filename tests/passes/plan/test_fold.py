"""Folding: equal parts of a network as one, at the same cost."""

from __future__ import annotations

import numpy as np
import pytest

from sbp.passes.plan.descent import fold
from sbp.passes.plan.network import CostNetwork
from sbp.passes.plan.solve import solve


def layers(n: int, width: int = 3, states: int = 4) -> CostNetwork:
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
    network = layers(n)
    folded = fold(network, hops=2)
    states = solve(folded.network).states
    assert network.cost(folded.expand(states)) == pytest.approx(folded.network.cost(states), rel=1e-12)
    assert folded.network.cost(states) >= solve(network).cost - 1e-12


def test_layers_are_one_and_ends_apart() -> None:
    """The size does not grow with the number of layers."""
    assert len(fold(layers(20), 2).network.unary) == len(fold(layers(40), 2).network.unary) < 30
    classes = fold(layers(20), 2).classes
    assert classes[30] == classes[27] != classes[0]


def test_equal_costs_are_alike_whatever_the_object() -> None:
    """Tables go by what they hold."""
    table = np.eye(2)
    edges = tuple((i, i + 1, table.copy()) for i in range(7))
    network = CostNetwork(tuple(np.zeros(2) for _ in range(8)), edges)
    assert len(fold(network, hops=1).network.unary) == 3
