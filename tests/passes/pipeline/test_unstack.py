"""A scan over layers cut into parts: the same program, in which every stack of layers lies in parts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import sbp
from sbp.passes import spec
from sbp.passes.pipeline.op_placement import loop_of
from sbp.passes.pipeline.stacks import stacks_of
from sbp.passes.pipeline.unstack import LeafPart, layers_of, unstack
from sbp.passes.program.trace import trace
from tests.passes.pipeline.scanned import LAYERS, arguments, step_of


def test_weights_sums_and_state_of_the_layers_are_stacks() -> None:
    traced = trace(step_of(), arguments(), {})
    found = stacks_of(traced.graph)
    assert found is not None and found.layers == LAYERS and len(found.scans) == 2
    stacked = {p for p, v in zip(traced.in_paths, traced.graph.inputs, strict=True) if v in found.values}
    assert stacked == {f"{of}['layers']['{name}']" for of in ("params", "speed") for name in ("up", "down")}
    results = [p for p, v in zip(traced.out_paths, traced.graph.outputs, strict=True) if v in found.values]
    assert len(results) == 4


def test_every_stack_becomes_a_part_for_each_stage() -> None:
    traced = trace(step_of(), arguments(), {})
    cut = unstack(traced, (1, 3))
    graph = cut.traced.graph
    spec.check_graph(graph)
    assert cut.ins[2:4] == (LeafPart(2, 0, 1), LeafPart(2, 1, 4))
    assert "params['layers']['down'][1:4]" in cut.traced.in_paths
    loop = loop_of(graph)
    assert loop is not None
    scans = [n for n in loop.bodies[0].nodes if n.op == "scan"]
    assert [(n.params["length"], n.params["reverse"]) for n in scans] == [
        (1, False),
        (3, False),
        (3, True),
        (1, True),
    ]
    # Nothing is put together or sliced: the optimizer works on parts, and the norm adds up summands of each.
    assert not {n.op for n in graph.walk()} & {"slice", "concatenate"}
    assert {v.shape[0] for v in graph.values if v.shape[1:] == (8, 16) and graph.uses(v.id)} == {1, 3}


def test_what_takes_a_stack_whole_gets_it_whole() -> None:
    """The order of layers is turned round: no rule splits that."""

    def step(params: Any, speed: Any, x: Any) -> Any:
        params, speed, value = step_of()(params, speed, x)
        return params, speed, value, jnp.flip(params["layers"]["up"], 0)

    cut = unstack(trace(step, arguments(), {}), (2, 2))
    spec.check_graph(cut.traced.graph)
    assert [n.op for n in cut.traced.graph.nodes].count("concatenate") == 1
    assert cut.outs[-1] == LeafPart(9)


def test_what_is_made_whole_is_sliced() -> None:
    """Weights that are computed from a table are no stacks at rest."""

    def step(table: Any, x: Any) -> Any:
        def loss(table: Any, x: Any) -> Any:
            y, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, table)
            return jnp.mean(y)

        return sbp.microbatch(jax.value_and_grad(loss), 2, batch_args=1)(table.reshape(4, 8, 8), x)

    cut = unstack(trace(step, (jnp.ones((32, 8)), jnp.ones((4, 8))), {}), (2, 2))
    spec.check_graph(cut.traced.graph)
    assert cut.ins == (LeafPart(0), LeafPart(1))
    assert [n.op for n in cut.traced.graph.nodes].count("slice") == 2


def test_programs_without_layers_in_a_scan() -> None:
    def plain(w: Any, x: Any) -> Any:
        return sbp.microbatch(jax.grad(lambda w, x: jnp.sum(x @ w)), 2, batch_args=1)(w, x)

    def recurrent(w: Any, x: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            h, _ = lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), x[0], x)
            return jnp.sum(h)

        return sbp.microbatch(jax.grad(loss), 2, batch_args=1)(w, x)

    w, x = np.ones((8, 8), np.float32), np.ones((4, 8), np.float32)
    assert layers_of(trace(plain, (w, x), {}).graph) is None
    assert layers_of(trace(recurrent, (w, np.ones((4, 6, 8), np.float32)), {}).graph) is None
    assert layers_of(trace(jnp.dot, (x, w), {}).graph) is None
