"""Loops under `vmap` whose rows end one by one: one loop that runs while any row does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.ode import odeint

import sbp
from sbp import B, S
from sbp.passes.program.trace import trace

LINE = sbp.placement("cpu", shape=(8,))
GRID = sbp.placement("cpu", shape=(2, 4))
X = np.arange(16, dtype=np.float32)
KEYS = jax.random.split(jax.random.key(0), 16)


def grow(row: Any) -> Any:
    """Grows until its first element is large: rows need different numbers of trips."""
    return lax.while_loop(lambda c: c[0] < 50, lambda c: c * 1.5 + 1, row)


def until(x: Any) -> Any:
    return jax.vmap(lambda r: lax.while_loop(lambda c: c < 50, lambda c: c * 1.5 + 1, r))(x)


def twice(x: Any) -> Any:
    """Two row dims, and carried values of another rank."""

    def one(r: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 50, lambda c: (c[0] * 1.5 + 1, c[1] + 1), (r, jnp.zeros(3)))

    return jax.vmap(jax.vmap(one))(x.reshape(8, 2))


def keys(x: Any) -> Any:
    """A typed key is carried, and selected by rows."""

    def one(key: Any, r: Any) -> Any:
        def trip(c: Any) -> Any:
            return jax.random.split(c[0])[0], c[1] * 1.5 + 1

        return jax.random.uniform(lax.while_loop(lambda c: c[1] < 50, trip, (key, r))[0])

    return jax.vmap(one)(KEYS, x)


def trips(x: Any) -> Any:
    return jax.vmap(lambda n, r: lax.fori_loop(0, n.astype(int), lambda i, c: c * 1.1 + i, r))(x, x)


def poisson(x: Any) -> Any:
    return jax.vmap(lambda k, rate: jax.random.poisson(k, rate, (3,)))(KEYS, x)


def binomial(x: Any) -> Any:
    return jax.vmap(lambda k, n: jax.random.binomial(k, n, 0.3, (3,)))(KEYS, 10 * (x + 1))


def conjugate(x: Any) -> Any:
    a = jnp.eye(4) * 2 + 0.1
    solve = jax.scipy.sparse.linalg.cg
    return jax.vmap(lambda b: solve(lambda v: a @ v * (1 + b[0] ** 2), b)[0])(x.reshape(4, 4))


def decay(x: Any) -> Any:
    times = jnp.linspace(0, 1, 3)
    return jax.vmap(lambda y: odeint(lambda y, t: -y * jnp.abs(y), y, times))(x)


def inside(x: Any) -> Any:
    return lax.scan(lambda c, _: (until(c) - 45, None), x, None, length=3)[0]


def mapped(x: Any) -> Any:
    """Devices of a `shard_map` are rows too: each leaves its loop by itself."""

    def shard(x: Any) -> Any:
        return lax.while_loop(lambda c: c.sum() < 50, lambda c: c * 1.5 + 1, x)

    rows = jax.sharding.PartitionSpec("x")
    return jax.shard_map(shard, mesh=LINE.mesh, in_specs=rows, out_specs=rows, check_vma=False)(x)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "fn",
    (until, twice, keys, trips, poisson, binomial, conjugate, decay, inside, mapped),
    ids=lambda f: f.__name__,
)
def test_rows_that_end_one_by_one(fn: Any) -> None:
    program = sbp.compile(fn, LINE, in_sbp=([S(0)],))
    expected = jax.jit(fn)(X)
    for a, b in zip(jax.tree.leaves(program(X)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "on", "signature"), [(64, LINE, [S(0)]), (61, LINE, [S(0)]), (61, GRID, [S(0), S(0)])]
)
def test_split_rows_leave_the_loop_together(rows: int, on: Any, signature: Any) -> None:
    """Every device runs as long as any row of all devices; what is sent is one number per trip."""
    x = np.abs(np.random.default_rng(0).normal(size=(rows, 20000))).astype(np.float32)
    x[0] = -1.99  # only the first device has it: it runs longest

    def loop(x: Any) -> Any:
        out = jax.vmap(grow)(sbp.annotate(x, signature))
        return sbp.annotate(out, signature)

    program = sbp.compile(loop, on)
    inner = [c for c in program.plan(x).collectives if c.kind == "all_reduce"]
    assert [c.shape for c in inner] == [()]
    np.testing.assert_array_equal(program(x), jax.jit(jax.vmap(grow))(x))


def test_a_loop_of_rows_keeps_its_lines_and_no_rows() -> None:
    line = until.__code__.co_firstlineno + 1
    (loop,) = trace(until, (X,), {}).graph.nodes
    assert loop.op == "while"
    assert {str(n.source) for body in loop.bodies for n in body.nodes} == {f"test_rows_of_loops.py:{line}"}
    program = sbp.compile(jax.vmap(grow), LINE, in_sbp=([B],))
    assert program(np.zeros((0, 3), np.float32)).shape == (0, 3)
