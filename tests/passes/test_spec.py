"""The contracts between passes notice what they are there for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sbp.hardware.catalogue import hardware_for
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.paths import Boxings
from sbp.passes.physical.insert import insert_boxing
from sbp.passes.physical.program import Box
from sbp.passes.plan.candidates import Candidates, enumerate_candidates
from sbp.passes.plan.model import Boundary, ChosenSignatures
from sbp.passes.program.graph import Graph
from sbp.passes.program.trace import trace
from sbp.passes.spec import SpecError, check_assignment, check_candidates, check_graph, check_physical
from sbp.placement import placement
from sbp.signature import B, S
from tests.passes.plan.cheapest import choose

GRID = placement("cpu", shape=(2, 2))
BOXINGS = Boxings(Network(GRID, hardware_for("cpu")))
GRAPH = trace(lambda x, w: (x @ w).sum(0) * 2, [np.ones((8, 4)), np.ones((4, 8))], {}).graph
SPLIT, WHOLE = (S(0), B), (B, B)


@pytest.fixture(scope="module")
def planned() -> tuple[Candidates, ChosenSignatures]:
    candidates = enumerate_candidates(GRAPH, GRID, {})
    asked = Boundary((SPLIT, WHOLE), (WHOLE,), (None,))
    return candidates, choose(candidates, asked, BOXINGS)


def test_a_sound_program_passes(planned: tuple[Candidates, ChosenSignatures]) -> None:
    candidates, assignment = planned
    check_graph(GRAPH)
    check_candidates(candidates)
    check_assignment(candidates, assignment, BOXINGS)
    check_physical(insert_boxing(candidates, assignment, BOXINGS))


def swapped(graph: Graph) -> Graph:
    first, second, *rest = graph.nodes
    return replace(graph, nodes=(replace(second, id=0), replace(first, id=1), *rest))


BROKEN: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "order": (swapped, "before it is made"),
    "ids of values": (lambda g: replace(g, values=g.values[1:]), "stands at position 0 with id 1"),
    "ids of nodes": (
        lambda g: replace(g, nodes=(replace(g.nodes[0], id=7), *g.nodes[1:])),
        "stands at position 0",
    ),
    "twice": (lambda g: replace(g, nodes=(*g.nodes, replace(g.nodes[-1], id=len(g.nodes)))), "a second time"),
    "never": (lambda g: replace(g, nodes=g.nodes[:-1]), "is never made"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_graph_is_noticed(name: str) -> None:
    breaking, why = BROKEN[name]
    with pytest.raises(SpecError, match=why):
        check_graph(breaking(GRAPH))


def test_a_missing_strategy_and_a_foreign_one_are_noticed(
    planned: tuple[Candidates, ChosenSignatures],
) -> None:
    candidates, assignment = planned
    node = GRAPH.nodes[0]
    with pytest.raises(SpecError, match="has no strategy"):
        check_candidates(replace(candidates, strategies={**candidates.strategies, node.id: ()}))
    bad: Any = replace(candidates.strategies[node.id][0], results=((S(5), B),))
    with pytest.raises(SpecError, match="does not fit"):
        check_candidates(replace(candidates, strategies={**candidates.strategies, node.id: (bad,)}))
    foreign: Any = {**assignment.strategies, node.id: bad}
    with pytest.raises(SpecError, match="not its own"):
        check_assignment(candidates, replace(assignment, strategies=foreign), BOXINGS)


def test_a_missing_move_is_noticed(planned: tuple[Candidates, ChosenSignatures]) -> None:
    physical = insert_boxing(*planned, BOXINGS)
    without = replace(physical, steps=tuple(s for s in physical.steps if not isinstance(s, Box)))
    assert len(without.steps) < len(physical.steps)
    with pytest.raises(SpecError, match=r"which nobody made|is not there as"):
        check_physical(without)
