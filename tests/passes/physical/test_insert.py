"""Insertion: where a value is boxed again, and what that waits for."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import sbp
from sbp import S
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.paths import Boxings
from sbp.passes.physical.insert import insert_boxing
from sbp.passes.physical.merged import merge_ops
from sbp.passes.physical.program import Border, Box
from sbp.passes.plan.candidates import enumerate_candidates
from sbp.passes.plan.clusters import Cluster
from sbp.passes.plan.pins import boundary
from sbp.passes.program.trace import trace
from tests.passes.plan.cheapest import choose
from tests.passes.plan.test_optimal import HARDWARE

PLACE = sbp.placement("cpu", shape=(4,))
ROWS, WIDTH, LAYERS = 4096, 64, 3


def through(x: Any, ws: Any) -> Any:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]


def twice(ws: Any, x: Any) -> Any:
    """Two loops over the same weights: rows are dearer to send than these."""
    return through(jnp.cos(through(x, ws)), ws)


def test_what_is_boxed_again_for_a_loop_waits_for_what_the_loop_is_wanted_with() -> None:
    """Else XLA sends it once, since both are equal, and keeps it from one loop to the other."""
    shapes = (LAYERS, WIDTH, WIDTH), (ROWS, WIDTH)
    graph = trace(twice, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes], {}).graph
    candidates = replace(enumerate_candidates(graph, PLACE, {}), **vars(merge_ops(graph)))
    asked = boundary(graph, [(S(1),), (S(0),)], [(S(0),)], [None], PLACE)
    boxings = Boxings(Network(PLACE, HARDWARE))
    chosen = choose(candidates, asked, boxings)
    loops = [node for node in graph.nodes if node.bodies]
    weights, _ = graph.inputs

    def sent(clusters: tuple[Cluster, ...]) -> list[Box]:
        known = replace(chosen, shares=chosen.shares | {weights: (S(1),)}, clusters={weights: clusters})
        steps = insert_boxing(candidates, known, boxings).steps
        assert [s.node for s in steps if isinstance(s, Border)] == loops
        return [s for s in steps if isinstance(s, Box) and s.value == weights]

    (once,) = sent(())
    assert once.move.kind == "all_gather" and once.after is None
    first, second = sent(tuple(Cluster(frozenset([node.id]), None) for node in loops))
    assert (first.move, first.after) == (second.move, None)
    (cos,) = (node for node in graph.nodes if node.op == "cos")
    assert second.after is not None and second.after[0] == cos.outputs[0]
