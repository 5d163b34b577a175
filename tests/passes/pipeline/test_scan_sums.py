"""Sums over micro-batches of what a scan stacks are added up inside of the scan."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sbp
from sbp.passes.pipeline.op_placement import loop_of
from sbp.passes.pipeline.sums import add_inside
from sbp.passes.program.graph import Graph, Node
from sbp.passes.program.trace import trace
from tests.passes.pipeline.scanned import arguments, loss, step_of


def read(fn: Any, *args: Any) -> Graph:
    return trace(fn, args, {}).graph


def body_of(graph: Graph) -> list[Node]:
    loop = loop_of(graph)
    assert loop is not None
    return list(loop.bodies[0].nodes)


def stacked(graph: Graph) -> int:
    """How many sums of stacks there are in the loop's body."""
    adds = (n for n in body_of(graph) if n.op in ("add", "add_any"))
    return sum(len(graph.values[n.outputs[0]].shape) == 3 for n in adds)


def test_a_scan_adds_gradients_of_its_layers_to_the_sums() -> None:
    before = read(step_of(), *arguments())
    after = add_inside(before)
    assert stacked(before) == 2 and stacked(after) == 0
    scans = {n.params["reverse"]: n for n in body_of(after) if n.op == "scan"}
    forward, backward = (
        [sum(x.op in ("add", "add_any") for x in s.bodies[0].nodes) for s in (scans[r], old)]
        for r, old in (
            (r, next(n for n in body_of(before) if n.op == "scan" and n.params["reverse"] is r))
            for r in (False, True)
        )
    )
    assert forward[0] == forward[1] and backward[0] == backward[1] + 2
    assert {v for n in body_of(after) for v in n.outputs} <= {v for n in body_of(before) for v in n.outputs}


def test_what_is_read_otherwise_is_added_outside() -> None:
    """The norm of each micro-batch's gradients wants them before they are added up."""

    def gradients(params: Any, x: Any) -> Any:
        grads = jax.grad(loss)(params, x)
        return grads, sum(jnp.sum(g * g) for g in jax.tree.leaves(grads))

    params, _, x = arguments()
    graph = read(lambda p, x: sbp.microbatch(gradients, 2, batch_args=1)(p, x), params, x)
    assert add_inside(graph) is graph


def test_a_program_without_scans_is_left_alone() -> None:
    def gradients(w: Any, x: Any) -> Any:
        return sbp.microbatch(jax.grad(lambda w, x: jnp.sum((x @ w) ** 2)), 2, batch_args=1)(w, x)

    graph = read(gradients, jnp.ones((4, 4)), jnp.ones((8, 4)))
    assert add_inside(graph) is graph


def test_a_scan_that_adds_to_its_operand_gives_what_one_device_gives() -> None:
    """Such a stack is changed in place: in both directions, with other results beside it."""

    def fn(total: Any, x: Any, reverse: bool) -> Any:
        def trip(c: Any, at: Any) -> Any:
            a, b = at
            c = jnp.tanh(c + b)
            return c, (c * 2, a + c, b + c)

        c, (twice, total, beside) = jax.lax.scan(trip, x[0], (total, x), reverse=reverse)
        return c, twice, total, beside

    on = sbp.placement("cpu", shape=(2,))
    total = jax.random.normal(jax.random.key(0), (5, 4))
    x = jax.random.normal(jax.random.key(1), (5, 4))
    for reverse in (False, True):

        def step(total: Any, x: Any, reverse: bool = reverse) -> Any:
            return fn(total, x, reverse)

        found = sbp.compile(step, on, in_sbp=([sbp.S(1)], [sbp.S(1)]))(total, x)
        for one, other in zip(found, jax.jit(step)(total, x), strict=True):
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-6)
