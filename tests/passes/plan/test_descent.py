"""Descents: near a known assignment, by parts of tables, within a budget."""

from __future__ import annotations

import numpy as np
import pytest

from sbp.passes.plan.budget import Budget, Load
from sbp.passes.plan.descent import Descent
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.folding import numbers_of
from sbp.passes.plan.network import CostNetwork, Table
from sbp.passes.plan.solve import solve

EQUAL = np.array([[0.0, 4.0], [4.0, 0.0]])
LINE = CostNetwork((np.array([2.0, 0.0]),) * 3, ((0, 1, EQUAL), (1, 2, EQUAL)))


def ring(seed: int, nodes: int = 8, states: int = 4) -> CostNetwork:
    """Random costs on a ring with chords; some pairs are forbidden."""
    rng = np.random.default_rng(seed)
    pairs = [(i, (i + d) % nodes) for i in range(nodes) for d in (1, 3)]
    tables = [
        np.where(rng.random((states, states)) < 0.1, np.inf, rng.random((states, states))) for _ in pairs
    ]
    unary = tuple(rng.random(states) for _ in range(nodes))
    return CostNetwork(unary, tuple((i, j, t) for (i, j), t in zip(pairs, tables, strict=True)))


def descent_of(
    network: CostNetwork, budget: Budget | None = None, charged: tuple[Table, ...] | None = None
) -> tuple[Descent, int]:
    """A descent, and how many kinds of edges it has."""
    kinds = numbers_of([table for _, _, table in network.edges])
    return Descent(network, kinds, budget, charged), int(kinds.max()) + 1


def test_all_nodes_of_a_forest_change_together() -> None:
    """None of them alone would."""
    descent, kinds = descent_of(LINE)
    assert descent.run(LINE.unary, np.ones(kinds), (0, 0, 0), 1.0, Effort()) == (1, 1, 1)


def test_tables_count_in_part_and_states_cost_what_is_said() -> None:
    unary = (np.array([0.0, 2.0]), *LINE.unary[1:])
    descent, kinds = descent_of(LINE)
    for part, expected in ((0.1, (0, 1, 1)), (1.0, (1, 1, 1))):
        assert descent.run(unary, np.full(kinds, part), (1, 1, 1), 1.0, Effort()) == expected


@pytest.mark.parametrize("seed", range(12))
def test_it_ends_near_the_optimum_and_never_where_it_is_forbidden(seed: int) -> None:
    """From the optimum of other costs; what is forbidden stays so, however little tables count."""
    network = ring(seed)
    start = solve(network).states
    rng = np.random.default_rng(seed)
    other = tuple(x + 0.3 * rng.random(x.size) for x in network.unary)
    changed = CostNetwork(other, network.edges)
    descent, kinds = descent_of(network)
    found = descent.run(other, np.ones(kinds), start, network.cost(start), Effort())
    assert changed.cost(found) <= changed.cost(start)
    assert changed.cost(found) <= 1.1 * solve(changed).cost
    little = descent.run(other, np.zeros(kinds), start, network.cost(start), Effort())
    assert np.isfinite(network.cost(little))


def test_equal_parts_choose_alike() -> None:
    """Many of them are one; what they cost is added up."""
    n = 40
    table = np.array([[0.0, 1.0], [1.0, 0.0]])
    network = CostNetwork((np.array([0.1, 0.0]),) * n, tuple((i, i + 1, table) for i in range(n - 1)))
    descent, kinds = descent_of(network)
    assert descent.flat.turn.size < n
    assert descent.run(network.unary, np.ones(kinds), (0,) * n, 1.0, Effort()) == (1,) * n


def test_a_budget_is_kept_first() -> None:
    """What needs too much changes although it costs more; prices say what is tried."""
    sizes = np.array([1.0, 4.0])
    budget = Budget(tuple(Load(k, 0, 1, sizes) for k in range(3)), 5.0)
    charged = tuple(theta + sizes for theta in LINE.unary)
    for start in ((1, 1, 1), (0, 1, 0)):
        descent, kinds = descent_of(LINE, budget, charged)
        assert descent.run(LINE.unary, np.ones(kinds), start, 1.0, Effort()) == (0, 0, 0)
    roomy, kinds = descent_of(LINE, Budget(budget.loads, 12.0), charged)
    assert roomy.run(LINE.unary, np.ones(kinds), (0, 0, 0), 1.0, Effort()) == (1, 1, 1)
    # A run may have a limit of its own.
    assert descent.run(LINE.unary, np.ones(kinds), (0, 0, 0), 1.0, Effort(), 12.0) == (1, 1, 1)
    assert roomy.run(LINE.unary, np.ones(kinds), (1, 1, 1), 1.0, Effort(), 5.0) == (0, 0, 0)


def test_its_work_is_counted() -> None:
    descent, kinds = descent_of(LINE)
    effort = Effort()
    descent.run(LINE.unary, np.ones(kinds), (0, 0, 0), 1.0, effort)
    assert effort.count.seconds > 0.0
