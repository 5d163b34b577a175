"""What stands for other ops is seen through: the graph has those, and computes what the function does."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata

import sbp
from sbp import S
from sbp.compat import core
from sbp.passes.program.control import CONTROL
from sbp.passes.program.trace import trace
from sbp.rules import REGISTRY, register_rule
from tests.passes.program.test_trace import evaluate

LINE = sbp.placement("cpu", shape=(8,))
X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)
SPARSE = (np.abs(W) > 0.5) * W
BCOO, BCSR = sparse.BCOO.fromdense(SPARSE), sparse.BCSR.fromdense(SPARSE.T)
COO, CSR = sparse.COO.fromdense(SPARSE), sparse.CSR.fromdense(SPARSE)


@functools.partial(lax.composite, name="test.gelu")
def composite(x: Any, scale: float = 2.0) -> Any:
    return jnp.tanh(x) * scale


@custom_partitioning
def partitioned(x: Any) -> Any:
    return jnp.sin(x)


partitioned.def_partition(
    partition=lambda *_: None, infer_sharding_from_operands=lambda *_: None, sharding_rule="i j -> i j"
)


@jax.custom_batching.custom_vmap
def batched(x: Any) -> Any:
    return jnp.sin(x)


@batched.def_vmap
def _(size: int, is_batched: Any, x: Any) -> Any:
    return jnp.cos(x), is_batched[0]


def twice(x: Any) -> Any:
    return jax.custom_derivatives.linear_call(lambda r, x: 2 * x, lambda r, ct: 2 * ct, (), x)


def sparse_gradient(x: Any) -> Any:
    def loss(data: Any) -> Any:
        return ((x @ sparse.BCOO((data, BCOO.indices), shape=BCOO.shape)) ** 2).sum()

    return jax.grad(loss)(BCOO.data)


def over(op: Any) -> Any:
    """A collective over a row axis of `vmap`."""

    def rows(x: Any) -> Any:
        return jax.vmap(lambda r: op(r, "rows"), axis_name="rows")(x)

    return rows


SEEN_THROUGH = {
    "composite": composite,
    "custom_partitioning": partitioned,
    "custom_vmap": batched,
    "vmap of custom_vmap": jax.vmap(batched),
    "linear_call": twice,
    "bcoo": lambda x: x @ BCOO,
    "bcoo of a traced matrix": lambda x: sparse.BCOO.fromdense(x, nse=64) @ W,
    "bcoo gradient": sparse_gradient,
    "bcsr": lambda x: BCSR @ x.T,
    "coo": lambda x: COO @ x[:6, :2].T[:, :6].T,
    "csr": lambda x: CSR @ x[:6],
    "sparsify": lambda x: sparse.sparsify(lambda a, b: (2 * a) @ b)(x, BCOO),
    "psum": over(lambda r, i: r / lax.psum(r, i)),
    "pmax": over(lambda r, i: r - lax.pmax(r, i)),
    "pmin": over(lambda r, i: r - lax.pmin(r, i)),
    "all_gather": over(lambda r, i: lax.all_gather(r, i).sum(0) * lax.axis_index(i)),
    "ppermute": over(lambda r, i: lax.ppermute(r, i, [(k, (k + 1) % 16) for k in range(16)])),
    "all_to_all": over(lambda r, i: lax.all_to_all(jnp.outer(jnp.arange(16.0), r), i, 0, 0)),
    "psum_scatter": over(lambda r, i: lax.psum_scatter(jnp.outer(jnp.arange(16.0), r), i)),
    "metadata": lambda x: set_xla_metadata(2 * x, a="b"),
    "cholesky_update": lambda x: lax.linalg.cholesky_update(jnp.eye(4), x[0]),
    "reduce": lambda x: lax.reduce(
        (x, x), (x[0, 0], 2.0), lambda p, q: (p[0] + q[0], lax.max(q[1], p[1])), (0,)
    ),
    "reduce by no op": lambda x: lax.reduce(x, 0.0, jnp.hypot, (0,)),
    "no rows": lambda x: lax.dynamic_slice(x, (x[0, 0].astype(int), 0), (0, 4)),
    "symmetric_product": lambda x: lax.linalg.symmetric_product(x, jnp.zeros((16, 16), x.dtype)),
}


@pytest.mark.some(12)
@pytest.mark.parametrize("fn", SEEN_THROUGH.values(), ids=SEEN_THROUGH)
def test_it_is_seen_through(fn: Any) -> None:
    """Every op that is left has a rule or is a loop."""
    graph = trace(fn, (X,), {}).graph
    assert {n.op for n in graph.walk()} <= {*REGISTRY, *CONTROL}
    got, expected = jax.jit(functools.partial(evaluate, graph))(X), jax.tree.leaves(jax.jit(fn)(X))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_what_is_seen_through_has_the_line_of_its_call() -> None:
    def product(x: Any) -> Any:
        return x @ BCOO

    line = product.__code__.co_firstlineno + 1
    assert {str(n.source) for n in trace(product, (X,), {}).graph.nodes} == {f"test_expand.py:{line}"}


@pytest.mark.parametrize("name", ("bcoo", "psum", "composite", "custom_partitioning"))
def test_it_runs_split(name: str) -> None:
    """None of them gathers the rows."""
    program = sbp.compile(SEEN_THROUGH[name], LINE, in_sbp=([S(0)],))
    plan = program.plan(X)
    assert not plan.notes
    assert "all_gather" not in {c.kind for c in plan.collectives}
    np.testing.assert_allclose(program(X), jax.jit(SEEN_THROUGH[name])(X), rtol=1e-5, atol=1e-5)


def test_results_without_an_element_need_no_operand() -> None:
    graph = trace(SEEN_THROUGH["no rows"], (X,), {}).graph
    assert [n.op for n in graph.nodes if set(n.outputs) & set(graph.outputs)] == ["broadcast_in_dim"]


def test_a_reduction_from_where_it_starts_is_a_sum() -> None:
    def fn(x: Any) -> Any:
        return lax.reduce(x, np.float32(2), lambda a, b: b * a, (0,))

    large = jax.ShapeDtypeStruct((1 << 20, 4), np.float32)
    assert sbp.compile(fn, LINE, in_sbp=([S(0)],), out_sbp=[sbp.B]).plan(large).wire_bytes <= 2 * 16


def test_a_tile_of_split_rows_sends_nothing() -> None:
    """As a concatenation of the same does."""
    x, w = jax.ShapeDtypeStruct((4096, 1024), np.float32), jax.ShapeDtypeStruct((2048, 512), np.float32)
    for fn in (lambda x, w: jnp.tile(x, (1, 2)) @ w, lambda x, w: jnp.concatenate([x, x], 1) @ w):
        assert sbp.compile(fn, LINE, in_sbp=([S(0)], [sbp.B])).plan(x, w).wire_bytes == 0


def test_results_without_an_element_need_no_op() -> None:
    """So the rules of `mul`, `reshape` and `tile` have no samples of them."""
    none = np.ones((0, 4), np.float32)

    def fn(x: Any) -> Any:
        return x * x, x.reshape(4, 0), lax.tile(x, (2, 3))

    assert not {"mul", "reshape", "tile"} & {n.op for n in trace(fn, (none,), {}).graph.walk()}
    found = sbp.compile(fn, LINE, in_sbp=([S(0)],))(none)
    assert [x.shape for x in found] == [(0, 4), (4, 0), (0, 12)]


def test_memory_that_nobody_wrote_lies_in_any_way() -> None:
    def fill(x: Any) -> Any:
        return lax.empty((16, 4), x.dtype) * 0 + x

    assert "empty" not in {n.op for n in trace(fill, (X,), {}).graph.walk()}
    assert sbp.compile(fill, LINE, in_sbp=([S(0)],)).plan(X).wire_bytes == 0


def test_a_composite_can_be_registered_by_its_name() -> None:
    """Then it is one op, as a kernel is."""
    register_rule("composite[test.gelu]", "a b -> a b", body=lambda ctx, x: [composite(x)])
    try:
        (node,) = trace(composite, (X,), {}).graph.nodes
        assert node.op == "composite[test.gelu]"
        program = sbp.compile(composite, LINE, in_sbp=([S(0)],))
        assert program.plan(X).wire_bytes == 0
        np.testing.assert_allclose(program(X), composite(X), rtol=1e-6)
    finally:
        del REGISTRY["composite[test.gelu]"]


def test_a_primitive_of_a_library_is_seen_through_where_it_is_lowered_as_a_function() -> None:
    """As those of equinox are; one of a kernel stays, and its author says how it splits."""
    theirs = core.make_op("test_not_jax", lambda x: [jnp.sin(x)])
    graph = trace(lambda x: theirs.bind(x)[0], (X,), {}).graph
    assert [n.op for n in graph.nodes] == ["sin"]


def test_an_exported_program_runs_whole_and_says_so() -> None:
    exported = jax.export.export(jax.jit(jnp.sin))(jax.ShapeDtypeStruct(X.shape, X.dtype))
    program = sbp.compile(lambda x: exported.call(x), LINE, in_sbp=([S(0)],))
    assert [note for note in program.plan(X).notes if note.startswith("no rule for call_exported: gathered")]
    np.testing.assert_allclose(program(X), jnp.sin(X), rtol=1e-6)
