"""Tracing: the graph computes what the function does, calls are gone, and each op knows its line."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sbp.compat import core
from sbp.passes.program.graph import Const, Graph
from sbp.passes.program.trace import TracedProgram, trace
from sbp.passes.spec import check_graph

X = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)


def evaluate(graph: Graph, *args: Any) -> list[Any]:
    """The graph, op by op, on one device."""
    env: dict[int, Any] = dict(zip(graph.inputs, [*args, *graph.consts], strict=True))

    def read(x: Any) -> Any:
        return np.asarray(x.value, x.dtype) if isinstance(x, Const) else env[x]

    for node in graph.nodes:
        ins = [read(x) for x in node.inputs]
        outs = ins[:1] if node.barrier >= 0 else core.bind(node.primitive, ins, dict(node.params))
        env.update(zip(node.outputs, outs, strict=True))
    return [read(x) for x in graph.outputs]


def ops(traced: TracedProgram) -> list[str]:
    return [n.op for n in traced.graph.walk()]


@jax.custom_jvp
def squared(x: Any) -> Any:
    return x * x


squared.defjvp(lambda primals, tangents: (squared(primals[0]), 3 * primals[0] * tangents[0]))


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return x * 2


doubled.defvjp(lambda x: (doubled(x), x), lambda x, g: (g * x,))

FUNCTIONS = {
    "nested jit": jax.jit(lambda x: jax.jit(jnp.sin)(x) @ x),
    "custom_jvp": lambda x: (squared(x), jax.grad(lambda y: squared(y).sum())(x)),
    "custom_vjp": lambda x: (doubled(x), jax.grad(lambda y: doubled(y).sum())(x)),
    "checkpoint": jax.value_and_grad(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y @ y)))(x).sum()),
    "scan": lambda x: lax.scan(lambda c, r: (jnp.sin(c) + r, c @ c), jnp.zeros(4), x),
    "cond": lambda x: lax.cond(x[0, 0] > 0, lambda y: y * 2, lambda y: y, x),
    "while": lambda x: lax.while_loop(lambda c: (c * c).sum() < 99, lambda c: c * 2, x),
    "relu": lambda x: jax.nn.relu(x) + jax.nn.gelu(x),
    "closed-over": lambda x: x @ X + jnp.asarray(X).T,
    "vmap": jax.vmap(lambda row: row / row.sum()),
    "passed through": lambda x: (x, x, 2.0, None, {"y": x}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_graph_computes_what_the_function_does(name: str) -> None:
    fn: Any = FUNCTIONS[name]
    traced = trace(fn, [X], {})
    check_graph(traced.graph)
    expected = fn(X)
    assert jax.tree.structure(expected) == traced.out_tree
    got = evaluate(traced.graph, X)
    for a, b in zip(got, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_calls_are_inlined() -> None:
    names = ("nested jit", "custom_jvp", "custom_vjp", "relu")
    found = {op for name in names for op in ops(trace(FUNCTIONS[name], [X], {}))}
    assert not found & {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "closed_call"}


def test_a_branch_that_is_known_is_inlined() -> None:
    traced = trace(lambda x: lax.cond(jnp.array(True), jnp.negative, jnp.sin, x), [X], {})
    assert ops(traced) == ["neg"]


def test_a_checkpoint_stays_one_barrier_before_its_recomputation() -> None:
    traced = trace(FUNCTIONS["checkpoint"], [X], {})
    held = [n for n in traced.graph.nodes if n.barrier >= 0]
    assert held and len({n.barrier for n in held}) == 1
    # The forward has the product and two sines; the recomputation has the product and the inner sine again.
    assert (ops(traced).count("dot_general"), ops(traced).count("sin")) == (4, 3)


def scaled(x: Any, *, by: Any) -> Any:
    wide = x * by
    return jnp.sin(wide)


def test_each_op_knows_its_line_and_scope() -> None:
    def outer(x: Any) -> Any:
        with jax.named_scope("layer"):
            return jax.grad(lambda y: scaled(y, by=2.0).sum())(x)

    traced = trace(outer, [X], {})
    first = scaled.__code__.co_firstlineno
    lines = {n.op: n.source for n in traced.graph.nodes}
    assert str(lines["cos"]) == f"test_trace.py:{first + 2}"
    assert str(lines["mul"]) == f"test_trace.py:{first + 1}"
    assert all("layer" in n.source.scope for n in traced.graph.nodes)
    assert any("transpose(" in n.source.scope for n in traced.graph.nodes)


def test_leaves_are_called_as_the_function_calls_them() -> None:
    def step(params: Any, state: Any, flag: Any, *rest: Any, scale: Any) -> Any:
        return {"out": params["w"] * scale, "aux": [state[0]]}

    call = [{"w": X, "b": None}, (X, X), True, X]
    traced = trace(step, call, {"scale": 2.0}, [2])
    assert traced.in_paths == ("params['w']", "state[0]", "state[1]", "rest", "scale")
    assert traced.out_paths == ("result['aux'][0]", "result['out']")


def test_a_closed_over_array_is_one_input_however_often_it_is_used() -> None:
    table = jnp.asarray(X)
    traced = trace(lambda x: x @ table + jax.jit(lambda y: y + table)(x), [X], {})
    assert len(traced.graph.consts) == 1
    assert len(traced.graph.inputs) == 2


def test_unused_ops_are_dropped_and_sources_are_copied_for_each_user() -> None:
    def f(x: Any) -> Any:
        jnp.sin(x)
        zeros = jnp.zeros((4, 4))
        return x + zeros, x * zeros

    traced = trace(f, [X], {})
    assert "sin" not in ops(traced)
    assert ops(traced).count("broadcast_in_dim") == 2
