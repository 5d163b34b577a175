"""Insertion: where a value is boxed again, and what that waits for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import sbp
from sbp import B, S
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.paths import Boxings
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.insert import insert_boxing
from sbp.passes.physical.kernel_merges import merge_ops
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


N = 4


def sent(fn: Any, *args: Any, in_sbp: Any, out_sbp: Any) -> list[tuple[str, str, float]]:
    """Kind, type and bytes of what a program sends."""
    program = sbp.compile(fn, sbp.placement("cpu", shape=(N,)), in_sbp=in_sbp, out_sbp=out_sbp)
    plan = program.plan(*args)
    assert plan.physical is not None
    takes = Evaluator(plan.physical, Network(plan.placement, plan.hardware))
    boxes: list[Box] = [box for box, _ in plan.physical.boxes() if takes.box_bytes(box) > 0]
    assert [takes.box_bytes(b) for b in boxes] == [c.wire_bytes for c in plan.collectives]
    return [(b.move.kind, str(plan.physical.sent_type(b)[1]), takes.box_bytes(b)) for b in boxes]


def test_what_was_widened_is_sent_as_it_was() -> None:
    def fn(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        return wide, wide

    x = np.ones((64, 64), np.float16)
    assert sent(fn, x, in_sbp=[S(0)], out_sbp=[[S(0)], [B]]) == [
        ("all_gather", "float16", (N - 1) * 16 * 64 * 2)
    ]


def test_a_sum_of_what_was_widened_is_added_up_wide() -> None:
    """Once added up it may hold more than the narrow type."""
    x = np.ones((64, 64), np.float16)
    ((kind, dtype, _),) = sent(lambda x: x.astype(jnp.float32).sum(0), x, in_sbp=[S(0)], out_sbp=[B])
    assert (kind, dtype) == ("all_reduce", "float32")


def test_the_loop_sends_what_was_widened_inside() -> None:
    """A body of a loop is told too."""

    def fn(x: Any, w: Any) -> Any:
        def body(c: Any, w: Any) -> Any:
            return jnp.tanh(c @ w.astype(jnp.float32)), None

        return lax.scan(body, x, w)[0]

    x, w = np.ones((64, 256), np.float32), np.ones((3, 256, 256), np.float16)
    found = sent(fn, x, w, in_sbp=[[S(0)], [S(1)]], out_sbp=[S(0)])
    assert {(kind, dtype) for kind, dtype, _ in found} == {("all_gather", "float16")}


def test_a_plan_without_conversions_is_told_nothing() -> None:
    x = np.ones((64, 64), np.float32)
    assert sent(lambda x: x * 2, x, in_sbp=[S(0)], out_sbp=[B]) == [
        ("all_gather", "float32", (N - 1) * 16 * 64 * 4)
    ]
