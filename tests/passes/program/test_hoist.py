"""Casts of weights leave the loop over micro-batches, and nothing else does."""

import math
from typing import Any

import jax
import jax.numpy as jnp

import sbp
from sbp.passes import spec
from sbp.passes.pipeline.op_placement import loop_of
from sbp.passes.program.graph import Graph
from sbp.passes.program.hoist import hoist_casts, hoist_narrowing
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


def layered(w: Any, x: Any) -> Any:
    """Layers in a scan, each computed twice, in fewer bits than their weights have."""

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return jnp.tanh(x @ w["a"].astype(x.dtype)) @ w["b"].astype(x.dtype), None

    x = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x.astype(jnp.bfloat16), w)[0]
    return jnp.mean(x.astype(jnp.float32) ** 2)


STACKS = {k: 0.3 * jax.random.normal(jax.random.key(i), (3, 4, 4)) for i, k in enumerate("ab")}


def layered_step(w: Any, x: Any) -> Any:
    value, grads = sbp.microbatch(jax.value_and_grad(layered), 2, batch_args=1)(w, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


def test_slices_that_layers_cast_are_cast_before_the_loop() -> None:
    """Once for the scan and its transpose; neither reads the wider stack any more."""
    graph = trace(layered_step, [STACKS, jnp.ones((16, 4))], {}).graph
    hoisted = hoist_narrowing(graph, math.inf)
    spec.check_graph(hoisted)
    stacks = [v for v in hoisted.inputs if hoisted.values[v].shape == (3, 4, 4)]
    loop = loop_of(hoisted)
    assert loop is not None and len(stacks) == 2
    casts = [n for n in hoisted.nodes[: loop.id] if n.op == "convert_element_type"]
    assert [n.inputs for n in casts] == [(v,) for v in stacks]
    assert {v for n in casts for v in n.outputs} <= {*loop.inputs} and not {*stacks} & {*loop.inputs}
    scans = [n for n in loop.bodies[0].nodes if n.op == "scan"]
    assert len(scans) == 2
    for scan in scans:
        shapes = [hoisted.operand(x) for x in scan.inputs]
        assert sum(x.shape == (3, 4, 4) and x.dtype == jnp.bfloat16 for x in shapes) == 2
        assert not any(x.shape == (3, 4, 4) and x.dtype == jnp.float32 for x in shapes)


def test_without_room_all_stays() -> None:
    graph = trace(layered_step, [STACKS, X], {}).graph
    made = 2 * 2 * 3 * 4 * 4
    assert hoist_narrowing(graph, made - 1) is graph and hoist_narrowing(graph, made) is not graph


def test_what_is_widened_or_changed_by_the_loop_stays() -> None:
    graph = traced(lambda w, x: jnp.sum(x @ w.astype(jnp.bfloat16).astype(jnp.float32)))
    loop, found = loop_of(hoist_narrowing(graph, math.inf)), inside(hoist_narrowing(graph, math.inf))
    assert loop is not None and found.count("convert_element_type") == 1
    batch = traced(lambda w, x: jnp.sum(x.astype(jnp.bfloat16) @ w))
    assert hoist_narrowing(batch, math.inf) is batch


def test_plans_cast_once_and_compute_the_same() -> None:
    program = sbp.compile(layered_step, sbp.placement("cpu", shape=(2,)), options=sbp.Options(check=True))
    plan = program.plan(STACKS, X)
    casts = [n for n in plan.physical.graph.nodes if n.op == "convert_element_type"]
    assert sum(len(plan.physical.graph.operand(n.inputs[0]).shape) == 3 for n in casts) == 2
    assert sbp.verify(program, STACKS, X).largest < 2e-2


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
    hoisted = hoist_narrowing(hoist_casts(graph), math.inf)
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
    hoisted = hoist_narrowing(hoist_casts(graph), math.inf)
    loop = loop_of(hoisted)
    assert loop is not None
    (scan,) = (n for n in loop.bodies[0].nodes if n.op == "scan")
    assert [n.op for n in scan.bodies[0].nodes].count("convert_element_type") == 1
