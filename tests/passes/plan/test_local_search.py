"""What several assignments come to together, under a limit on what lives at once."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sbp.passes.plan import constants
from sbp.passes.plan.budget import Budget, Load
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.local_search import Known, cheapest_states, joint_network
from sbp.passes.plan.network import CostNetwork
from sbp.passes.plan.solve import Solver

LAYERS, WIDTH = 20, 5
KEEPS, SAVES = 0, 1
"""What all nodes of a layer do: hold memory, or take time."""


def layers() -> tuple[CostNetwork, tuple[Load, ...]]:
    """Layers whose nodes all choose alike, and which cost a little more beside one that chooses otherwise. A
    third state is never worth it."""
    alike = np.where(np.eye(3, dtype=bool), 0.0, np.inf)
    beside = np.where(np.eye(3, dtype=bool), 0.0, 0.01)
    edges = [
        (k * WIDTH + i, k * WIDTH + j, alike) for k in range(LAYERS) for i in range(WIDTH) for j in range(i)
    ]
    edges += [(k * WIDTH, (k + 1) * WIDTH, beside) for k in range(LAYERS - 1)]
    unary = tuple(np.array([1.0, 2.0, 9.0]) for _ in range(LAYERS * WIDTH))
    sizes = np.array([2.0, 1.0, 1.0])
    return CostNetwork(unary, tuple(edges)), tuple(Load(k, 0, 9, sizes) for k in range(LAYERS * WIDTH))


def test_some_layers_are_as_in_one_and_some_as_in_the_other() -> None:
    network, loads = layers()
    limit = (2.0 * 13 + 1.0 * 7) * WIDTH
    search = Solver(network, Budget(loads, limit))
    for state in (KEEPS, SAVES):
        search.start_from([state] * (LAYERS * WIDTH))
    assert search.cost + search.reduction.constant <= 2.0 * LAYERS * WIDTH
    search._combine()
    # Seven layers save.
    assert search.cost + search.reduction.constant <= (13 + 2.0 * 7) * WIDTH * 1.001
    assert search.states is not None
    assert (search.reduction.expand(search.states.tolist()).count(SAVES)) == 7 * WIDTH


def test_what_was_together_is_not_brought_together_again(monkeypatch: pytest.MonkeyPatch) -> None:
    network, loads = layers()
    search = Solver(network, Budget(loads, 1.5 * LAYERS * WIDTH))
    for state in (KEEPS, SAVES):
        search.start_from([state] * (LAYERS * WIDTH))
    looked: list[int] = []
    monkeypatch.setattr(search, "_best_among", lambda known, among: looked.append(len(among)))
    search._combine()
    search._combine()
    assert looked == [3]  # one more, that fits near the first
    # Under another limit it is another thing.
    search.known.forget()
    search._combine()
    assert looked == [3, 3]


def test_a_limit_on_time_leaves_out_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    network, loads = layers()
    search = Solver(network, Budget(loads, 1.5 * LAYERS * WIDTH), Effort().at_most(10.0))
    for state in (KEEPS, SAVES):
        search.start_from([state] * (LAYERS * WIDTH))
    looked: list[int] = []
    monkeypatch.setattr(search, "_best_among", lambda known, among: looked.append(len(among)))
    search.combined_seconds = 9.0
    search._combine()
    assert not looked
    search.combined_seconds = 0.01
    search._combine()
    assert looked


def test_what_is_impossible_together_is_left() -> None:
    rng, first = np.random.default_rng(0), np.zeros((4, 4))
    first[0, 0] = math.inf
    edges = tuple((i, j, rng.random((4, 4)) + first) for i in range(6) for j in range(i + 1, 6))
    network = CostNetwork(tuple(rng.random(4) for _ in range(6)), edges)
    loads = tuple(Load(k, 0, 1, np.array([0.0, 1.0, 2.0, 3.0])) for k in range(6))
    search = Solver(network, Budget(loads, 9.0))
    assert search.flat.turn.size == 6
    alone = [np.zeros(search.flat.turn.size, dtype=np.int64)]
    search._best_among(alone, alone)
    assert search.states is None and search.cost == math.inf


def test_those_that_cost_least_are_taken_none_like_another() -> None:
    known, rng = Known(), np.random.default_rng(0)
    far = [rng.integers(0, 9, 1000) for _ in range(constants.TOGETHER + 4)]
    like = far[0].copy()
    like[: int(constants.APART * like.size)] += 1
    for states in (*far, like, far[3]):
        known.add(states)
    assert len(known.states) == constants.TOGETHER + 5
    values = [float(k) for k in range(constants.TOGETHER + 4)] + [0.5]
    among = known.closest(values, 100.0, 0.0, far[5])
    assert among[0] is far[5] and len(among) == constants.TOGETHER
    assert all(
        (a == b).all() for a, b in zip(among[1:], [*far[:5], *far[6 : constants.TOGETHER]], strict=True)
    )
    # Nothing new: nothing to do.
    assert known.closest([float(k) for k in range(len(known.states))], 100.0, 0.0, far[5]) == []
    # What is worth so much more than the best is forgotten.
    known.closest([float(k) for k in range(len(known.states))], 4.0, 3.0, far[5])
    assert len(known.states) == 6


def test_the_bound_has_risen_by_a_part_of_the_gap() -> None:
    known = Known()
    assert not known.has_risen(math.inf, 1.0)
    assert known.has_risen(10.0, 5.0)
    assert not known.has_risen(10.0, 6.0)
    assert known.has_risen(10.0, 6.5)


def test_states_that_no_assignment_has_are_there_if_they_cost_little() -> None:
    first, second, third = cheapest_states([np.array([2.0, 0.0, 1.0]), np.array([0.0, 1.0])], 3)
    assert (first.tolist(), second.tolist(), third.tolist()) == ([1, 0], [2, 1], [0, 1])
    network = CostNetwork((np.arange(3.0), np.arange(2.0)), ((0, 1, np.arange(6.0).reshape(3, 2)),))
    found = joint_network(network, (Load(0, 0, 1, np.array([4.0, 5.0, 6.0])),), (first, second))
    assert found.network.unary[0].tolist() == [1.0, 2.0]
    assert found.network.edges[0][2].tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert found.loads[0].bytes.tolist() == [5.0, 6.0]
    assert found.to_whole(found.to_joint(second)).tolist() == second.tolist()
