"""Effects: refs made inside a function are values of its graph; what is not known is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

import sbp
from sbp import S
from sbp.errors import AnnotationError
from sbp.passes.program.trace import trace
from tests.passes.program.test_trace import evaluate

LINE = sbp.placement("cpu", shape=(8,))
X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
OUTER = jax.new_ref(jnp.zeros(4))


def swap(x: Any) -> Any:
    r = jax.new_ref(jnp.zeros(4))
    r[...] = r[...] + x.sum(0)
    r[1:3] = x[0, 1:3]
    r[2] += 3.0
    return r[...]


def frozen(x: Any) -> Any:
    r = jax.new_ref(jnp.zeros(4))
    r[1:3] = x[0, 1:3]
    return jax.freeze(r)


def gathered(x: Any) -> Any:
    """Rows by an array of positions."""
    r = jax.new_ref(x)
    r[jnp.array([3, 1])] = 2 * x[:2]
    return r[...]


def fori(x: Any) -> Any:
    r = jax.new_ref(jnp.zeros(4))

    def body(i: Any, carry: Any) -> Any:
        r[...] += x[i]
        return carry

    lax.fori_loop(0, 16, body, 0)
    return r[...]


def while_true(x: Any) -> Any:
    r = jax.new_ref(x[0])

    def body(n: Any) -> Any:
        r[...] = r[...] * 1.5 + n
        return n + 1

    return lax.while_loop(lambda n: n < 5, body, 0), r[...]


def scanned(x: Any) -> Any:
    r = jax.new_ref(jnp.zeros(4))

    def body(carry: Any, row: Any) -> Any:
        r[...] += row
        return carry, r[0]

    return lax.scan(body, 0, x)[1], r[...]


def inside_scan(x: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        r = jax.new_ref(row)
        r[0] = carry
        return carry + 1, r[...]

    return lax.scan(body, 0.0, x)


def branch(x: Any) -> Any:
    r = jax.new_ref(jnp.zeros(4))

    def write() -> None:
        r[...] = x[0]

    lax.cond(x[0, 0] > -9, write, lambda: None)
    return r[...]


def call(x: Any) -> Any:
    r = jax.new_ref(jnp.zeros(4))

    @jax.jit
    def write(r: Any, y: Any) -> None:
        r[...] = y

    write(r, x.sum(0))
    return r[...]


def rows(x: Any) -> Any:
    def one(row: Any) -> Any:
        r = jax.new_ref(row)
        r[0] = row[1] * 2
        return r[...]

    return jax.vmap(one)(x)


def gradient(x: Any) -> Any:
    def loss(w: Any) -> Any:
        r = jax.new_ref(jnp.zeros(4))
        r[...] = (x @ w).sum(0)
        return jnp.sum(r[...] ** 2)

    return jax.grad(loss)(jnp.ones((4, 4)))


def checkpointed(x: Any) -> Any:
    def total(w: Any) -> Any:
        r = jax.new_ref(jnp.zeros(4))
        r[...] = jnp.sin(x @ w).sum(0)
        return jnp.sum(r[...] ** 2)

    return jax.checkpoint(total)(jnp.ones((4, 4)))


def through_custom_vjp(x: Any) -> Any:
    @jax.custom_vjp
    def double(x: Any) -> Any:
        return 2 * x

    def forward(x: Any) -> Any:
        r = jax.new_ref(x)
        r[0] = 3 * r[0]
        return 2 * r[...], x

    def backward(x: Any, ct: Any) -> Any:
        r = jax.new_ref(ct)
        r[0] = 3 * r[0]
        return (2 * r[...],)

    double.defvjp(forward, backward)
    return jax.grad(lambda x: (double(x) ** 2).sum())(x)


def accumulated(x: Any) -> Any:
    """A gradient that is added to a ref."""
    total = jax.new_ref(jnp.ones((4, 4)))
    _, vjp = jax.vjp(lambda w: (x @ w).sum(), jnp.eye(4))
    vjp.with_refs(total)(jnp.ones(()))
    return total[...]


def mapped(x: Any) -> Any:
    def double(x: Any) -> Any:
        r = jax.new_ref(x)
        r[...] = 2 * r[...]
        return r[...]

    rows = jax.sharding.PartitionSpec("x")
    return jax.shard_map(double, mesh=LINE.mesh, in_specs=rows, out_specs=rows, check_vma=False)(x)


REFS = (swap, frozen, gathered, fori, while_true, scanned, inside_scan, branch, call, rows, gradient)
REFS = (*REFS, checkpointed, through_custom_vjp, accumulated, mapped)
OF_REFS = {"new_ref", "empty_ref", "get", "swap", "addupdate", "freeze", "free_ref"}


@pytest.mark.parametrize("fn", REFS, ids=lambda f: f.__name__)
def test_refs_made_inside_are_values(fn: Any) -> None:
    """No op of a ref is left, and the graph computes what the function does."""
    graph = trace(fn, (X,), {}).graph
    assert OF_REFS.isdisjoint(n.op for n in graph.walk())
    expected = jax.tree.leaves(jax.jit(fn)(X))
    for a, b in zip(evaluate(graph, X), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fn", (swap, scanned, gradient), ids=lambda f: f.__name__)
def test_refs_run_split(fn: Any) -> None:
    program = sbp.compile(fn, LINE, in_sbp=([S(0)],))
    for a, b in zip(jax.tree.leaves(program(X)), jax.tree.leaves(jax.jit(fn)(X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert not [note for note in program.plan(X).notes if "no rule" in note]


def test_ops_of_a_function_with_refs_keep_their_lines() -> None:
    found = {n.op: n.source for n in trace(swap, (X,), {}).graph.nodes}
    first = swap.__code__.co_firstlineno
    assert str(found["reduce_sum"]) == f"test_effects.py:{first + 2}"
    assert str(found["dynamic_update_slice"]) == f"test_effects.py:{first + 4}"


def read_outer(x: Any) -> Any:
    return x + OUTER[...]


def write_outer(x: Any) -> Any:
    OUTER[...] = x[0]
    return x


def outer_in_a_loop(x: Any) -> Any:
    return lax.scan(lambda carry, row: (carry + OUTER[...], None), x[0], x)[0]


def check_unhandled(x: Any) -> Any:
    checkify.check(x.sum() > 0, "negative")
    return x


@pytest.mark.parametrize("fn", (read_outer, write_outer, outer_in_a_loop), ids=lambda f: f.__name__)
def test_refs_of_others_are_refused_with_their_line(fn: Any) -> None:
    with pytest.raises(AnnotationError) as caught:
        trace(fn, (X,), {})
    (problem,) = caught.value.problems
    assert problem.got == "a ref that was made outside the function"
    assert f"test_effects.py:{fn.__code__.co_firstlineno + 1}" in problem.where


def test_a_handled_check_is_a_result() -> None:
    def checked(x: Any) -> Any:
        return checkify.checkify(lambda x: check_unhandled(x) * 2)(x)[1]

    np.testing.assert_array_equal(evaluate(trace(checked, (X,), {}).graph, X)[0], 2 * X)
