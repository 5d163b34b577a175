"""The cheapest assignments with variables held, against every assignment there is."""

import itertools
import math

import numpy as np
import pytest

from sbp.passes.plan.effort import Effort
from sbp.passes.plan.marginals import cheapest_held
from sbp.passes.plan.network import CostNetwork


def random_network(seed: int, nodes: int = 7) -> CostNetwork:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 4, nodes)
    unary = tuple(rng.random(n).round(2) for n in sizes)
    edges = []
    for i, j in itertools.combinations(range(nodes), 2):
        if rng.random() < 0.5:
            table = rng.random((sizes[i], sizes[j])).round(2)
            if rng.random() < 0.4:  # one state follows from the other
                table[:] = np.inf
                table[np.arange(sizes[i]), rng.integers(0, sizes[j], sizes[i])] = 0.0
            edges.append((i, j, table))
    return CostNetwork(unary, tuple(edges))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("held", [(0,), (2, 5), (1, 3, 4)])
def test_against_every_assignment(seed: int, held: tuple[int, ...]) -> None:
    network = random_network(seed)
    sizes = [x.size for x in network.unary]
    alternatives = [
        dict(zip(held, s, strict=True)) for s in itertools.product(*(range(sizes[x]) for x in held))
    ]
    best = [math.inf] * len(alternatives)
    for states in itertools.product(*map(range, sizes)):
        k = alternatives.index({x: states[x] for x in held})
        best[k] = min(best[k], network.cost(states))
    possible = sorted(x for x in best if x < math.inf)
    if not possible:
        return
    for wanted in (2, 100):
        found = cheapest_held(network, alternatives, wanted, Effort().at_most(60.0))
        assert [s.cost for _, s in found.solutions] == pytest.approx(possible[:wanted])
        assert all(s.cost == pytest.approx(best[i]) and s.gap == 0.0 for i, s in found.solutions)
        assert all({x: s.states[x] for x in held} == alternatives[i] for i, s in found.solutions)
        assert found.unknown == 0 and found.slower >= len(possible[wanted:])
        assert found.slower + found.impossible == len(best) - len(found.solutions)


def test_nothing_is_asked() -> None:
    assert cheapest_held(random_network(0), [], 4, Effort()).solutions == ()


def test_without_time_the_first_is_still_found() -> None:
    network = random_network(3)
    alternatives = [{0: k} for k in range(network.unary[0].size)]
    found = cheapest_held(network, alternatives, 2, Effort().at_most(0.0))
    assert len(found.solutions) + found.unknown + found.impossible + found.slower == len(alternatives)
