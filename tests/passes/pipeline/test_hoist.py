"""Casts of weights leave the loop over micro-batches, and nothing else does."""

from typing import Any

import jax
import jax.numpy as jnp

import sbp
from sbp.passes.pipeline.hoist import hoist_casts
from sbp.passes.pipeline.where import loop_of
from sbp.passes.program.graph import Graph
from sbp.passes.program.trace import trace

W, X = jnp.ones((4, 4)), jnp.ones((8, 4))


def traced(fn: Any) -> Graph:
    return trace(lambda w, x: sbp.microbatch(fn, 2, batch_args=1, reduce="sum")(w, x), [W, X], {}).graph


def inside(graph: Graph) -> list[str]:
    loop = loop_of(graph)
    assert loop is not None
    return [n.op for n in loop.bodies[0].nodes]


def test_a_cast_of_a_weight_runs_once() -> None:
    graph = traced(lambda w, x: jnp.sum(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)))
    hoisted = hoist_casts(graph)
    assert inside(graph).count("convert_element_type") - inside(hoisted).count("convert_element_type") == 1
    loop = loop_of(hoisted)
    assert loop is not None
    before = [n for n in hoisted.nodes[: loop.id] if n.op == "convert_element_type"]
    assert [hoisted.values[n.outputs[0]].dtype for n in before] == [jnp.bfloat16]


def test_casts_of_casts_too_and_nothing_else() -> None:
    graph = traced(lambda w, x: jnp.sum(x @ w.astype(jnp.bfloat16).astype(jnp.float32).T))
    assert inside(graph).count("convert_element_type") == 2
    assert "convert_element_type" not in inside(hoist_casts(graph)) and "transpose" in inside(
        hoist_casts(graph)
    )
    plain = traced(lambda w, x: jnp.sum(x @ w))
    assert hoist_casts(plain) is plain


def test_stages_with_casts_give_the_same_numbers() -> None:
    place = sbp.placement("cpu", shape=(2,))
    first, second = place.split(0)

    def loss(w: Any, x: Any) -> Any:
        with sbp.on(first):
            x = x.astype(jnp.bfloat16) @ w["a"].astype(jnp.bfloat16)
        with sbp.on(second):
            return jnp.mean((x @ w["b"].astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    def step(w: Any, x: Any) -> Any:
        value, grads = sbp.microbatch(jax.value_and_grad(loss), 2, batch_args=1)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    w = {k: jax.random.normal(jax.random.key(i), (4, 4)) for i, k in enumerate("ab")}
    report = sbp.verify(sbp.compile(step, place, options=sbp.Options(check=True)), w, X)
    assert report.largest < 2e-2


def scanned(w: Any, x: Any) -> Any:
    """A loss whose layers cast slices of their stack, and a bias that all of them have."""

    def layer(x: Any, one: Any) -> Any:
        return x @ one.astype(jnp.bfloat16) + w["bias"].astype(jnp.bfloat16), None

    return jnp.sum(jax.lax.scan(layer, x.astype(jnp.bfloat16), w["stack"])[0].astype(jnp.float32))


def test_a_scan_takes_slices_of_a_stack_that_was_cast_once() -> None:
    w = {"bias": jnp.ones(4), "stack": jnp.ones((3, 4, 4))}

    def gradients(w: Any, x: Any) -> Any:
        return sbp.microbatch(jax.value_and_grad(scanned), 2, batch_args=1)(w, x)

    graph = trace(gradients, [w, X], {}).graph
    hoisted = hoist_casts(graph)
    loop = loop_of(hoisted)
    assert loop is not None
    before = [
        hoisted.values[n.outputs[0]] for n in hoisted.nodes[: loop.id] if n.op == "convert_element_type"
    ]
    # Forward and backward slice one and the same stack.
    assert sorted((v.shape, str(v.dtype)) for v in before) == [((3, 4, 4), "bfloat16"), ((4,), "bfloat16")]
    for scan in (n for n in loop.bodies[0].nodes if n.op == "scan"):
        sliced = [hoisted.values[v] for v in scan.bodies[0].inputs]
        assert not any(v.dtype == jnp.float32 and v.shape == (4, 4) for v in sliced)
    assert len(hoisted.nodes) == len(graph.nodes) + 2


def test_slices_are_not_cast_to_wider_types_as_a_stack() -> None:
    w = {"bias": jnp.ones(4), "stack": jnp.ones((3, 4, 4), jnp.float8_e4m3fn)}
    graph = trace(lambda w, x: sbp.microbatch(scanned, 2, batch_args=1, reduce="sum")(w, x), [w, X], {}).graph
    hoisted = hoist_casts(graph)
    loop = loop_of(hoisted)
    assert loop is not None
    (scan,) = (n for n in loop.bodies[0].nodes if n.op == "scan")
    assert [n.op for n in scan.bodies[0].nodes].count("convert_element_type") == 1
