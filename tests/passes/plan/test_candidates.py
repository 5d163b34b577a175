"""The order of the strategies of an op: of those that cost the same the first is taken."""

from typing import Any

import jax
import jax.numpy as jnp

from sbp.passes.plan.candidates import enumerate_candidates
from sbp.passes.program.trace import trace
from sbp.placement import placement

PLACE = placement("cpu", shape=(2, 2))


def order(fn: Any, op: str) -> list[int]:
    """Of each strategy of an op, how many results are still to be reduced."""
    graph = trace(fn, (jax.ShapeDtypeStruct((8, 8), jnp.float32),) * 2, {}).graph
    found = enumerate_candidates(graph, PLACE, {})
    (node,) = (node for node in graph.walk() if node.op == op)
    return [s.partial_results for s in found.strategies[node.id]]


def test_strategies_that_reduce_first_come_first() -> None:
    for op, fn in (("reduce_sum", lambda x, y: (x @ y).sum(0)), ("neg", lambda x, y: -(x @ y))):
        partials = order(fn, op)
        assert set(partials) == {0, 1} and partials == sorted(partials)


def test_an_op_that_only_moves_elements_keeps_its_order() -> None:
    """To reduce before a transpose wins nothing over reducing after it."""
    partials = order(lambda x, y: (x @ y).T, "transpose")
    assert set(partials) == {0, 1} and partials != sorted(partials)
