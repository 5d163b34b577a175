"""Views that undo each other: random chains send what the simplified chain sends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import B, S
from sbp.passes.program.duplicates import without_inverse_views
from sbp.passes.program.trace import trace

LINE = sbp.placement("cpu", shape=(8,))
X = np.random.default_rng(0).normal(size=(32, 8, 6)).astype(np.float32)
Views = Callable[[Any], Any]


def undone(rng: np.random.Generator, shape: tuple[int, ...], depth: int) -> Views:
    """A function that gives its argument back, by views inside of views."""
    if not depth:
        return lambda x: x
    kind = rng.integers(3)
    if kind == 0:
        order = rng.permutation(len(shape)).tolist()
        inner = undone(rng, tuple(shape[d] for d in order), depth - 1)
        return lambda x: inner(x.transpose(order)).transpose(np.argsort(order).tolist())
    if kind == 1:
        at = int(rng.integers(len(shape)))
        parts = [d for d in (2, 4) if shape[at] % d == 0]
        if parts and rng.random() < 0.5:
            n = int(rng.choice(parts))
            other = (*shape[:at], n, shape[at] // n, *shape[at + 1 :])
        else:
            at = min(at, len(shape) - 2)
            other = (
                (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]) if len(shape) > 1 else (*shape, 1)
            )
        inner = undone(rng, other, depth - 1)
        return lambda x: inner(x.reshape(other)).reshape(shape)
    d = int(rng.integers(len(shape)))
    cut = int(rng.integers(0, shape[d] + 1))
    inner = undone(rng, shape, depth - 1)
    return lambda x: inner(jnp.concatenate(jnp.split(x, [cut], axis=d), axis=d))


def used(views: Views) -> Callable[[Any], Any]:
    """A program that reads what comes of them."""
    return lambda x: (jnp.tanh(views(x)) * 2).sum(0)


def check(seed: int) -> None:
    """One of them."""
    rng = np.random.default_rng(seed)
    views = undone(rng, X.shape, int(rng.integers(1, 5)))
    lies = [S(int(rng.integers(3)))]
    program, plain = (sbp.compile(used(v), LINE, in_sbp=(lies,), out_sbp=[B]) for v in (views, lambda x: x))
    assert program.plan(X).wire_bytes <= plain.plan(X).wire_bytes
    graph = without_inverse_views(trace(used(views), (X,), {}).graph)
    assert len(graph.nodes) == len(trace(used(lambda x: x), (X,), {}).graph.nodes)


@pytest.mark.parametrize("begin", range(0, 500, 5))
@pytest.mark.some(1)
def test_what_is_undone_sends_nothing(begin: int) -> None:
    for seed in range(begin, begin + 5):
        check(seed)


def test_every_kth_row_is_a_micro_batch() -> None:
    """What is merged with another dim and taken out again is split as before: only gradients travel."""
    n, k, d = 64, 4, 16

    def step(w: Any, x: Any) -> Any:
        parts = x.reshape(n // k, k, d).swapaxes(0, 1).reshape(n, d).reshape(k, n // k, d)
        gradient = jax.grad(lambda w, x: jnp.square(jnp.tanh(x @ w)).mean())
        return jax.lax.scan(lambda g, x: (g + gradient(w, x), None), jnp.zeros_like(w), parts)[0]

    w, x = np.ones((d, d), np.float32), np.ones((n, d), np.float32)
    program = sbp.compile(step, LINE, in_sbp=([B], [S(0)]), out_sbp=[B])
    assert [c.kind for c in program.plan(w, x).collectives] == ["all_reduce"]
    np.testing.assert_allclose(program(w, x), step(w, x), rtol=1e-5)


@pytest.mark.parametrize(
    "kept",
    [
        lambda x: x.reshape(8, 32, 6).reshape(32, 48),
        lambda x: x.transpose(1, 0, 2).transpose(2, 0, 1),
        lambda x: jnp.concatenate([x[:8], x[9:], x[8:9]]),
        lambda x: jnp.concatenate([x[:8], x[8:31]]),
        lambda x: jnp.concatenate([x[::2], x[1::2]]),
        lambda x: x.transpose(1, 0, 2).reshape(32, 8, 6),
    ],
)
def test_what_is_another_tensor_stays(kept: Views) -> None:
    graph = trace(used(kept), (X,), {}).graph
    assert without_inverse_views(graph) is graph
    np.testing.assert_allclose(sbp.compile(used(kept), LINE, in_sbp=([S(0)],))(X), used(kept)(X), rtol=1e-5)


def test_a_result_stays_a_result() -> None:
    def fn(x: Any) -> Any:
        y = x.reshape(-1).reshape(x.shape)
        return y, y + 1

    got, _ = sbp.compile(fn, LINE, in_sbp=([S(0)],))(X)
    np.testing.assert_array_equal(got, X)
    assert math.prod(got.shape) == X.size
