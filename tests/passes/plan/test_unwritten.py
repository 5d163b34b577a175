"""What keeps a value for its later uses that is never in memory as it is made."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sbp
from sbp.passes.plan.recompute import RecomputingModel
from sbp.passes.plan.unwritten import NOWHERE, Later
from sbp.passes.program.trace import trace
from tests.passes.plan.test_optimal import problem

PLACE = sbp.placement("cpu", shape=(4,))


def loss(ws: Any, x: Any) -> Any:
    for w, u in ws:
        x = x + (jnp.tanh(x @ w) * 0.5 + 1.0) @ u
    return (x**2).mean()


def model() -> RecomputingModel:
    x, w, u = (jax.ShapeDtypeStruct(s, jnp.float32) for s in [(512, 64), (64, 256), (256, 64)])
    made = RecomputingModel(*problem(trace(jax.grad(loss), ([(w, u)] * 3, x), {}).graph, PLACE), 1e6)
    made.build()
    return made


MODEL = model()
UNWRITTEN = [x for v, x in MODEL.later.items() if v not in MODEL.lives]


def tables(a: int, b: int) -> list[np.ndarray]:
    """What choices of two variables cost together, rows of the first."""
    found = [t.dense() for i, j, t in MODEL.edges if (i, j) == (a, b)]
    return found + [t.dense().T for i, j, t in MODEL.edges if (i, j) == (b, a)]


def operands(x: Later) -> list[Later]:
    return [MODEL.later[v] for v in x.made.inputs if isinstance(v, int) and v in MODEL.later]


def test_there_are_two_ways_to_keep_what_is_not_written() -> None:
    assert UNWRITTEN
    for x in UNWRITTEN:
        lies = MODEL.states[x.variable]
        assert lies[: x.kept // 2] == lies[x.kept // 2 : x.kept]


def test_what_is_computed_later_wants_what_it_is_made_of_kept() -> None:
    chained = [(x, y) for x in UNWRITTEN for y in operands(x)]
    assert chained
    for x, y in chained:
        table = np.sum(tables(y.variable, x.variable), axis=0)
        computed = slice(x.kept // 2, x.kept)
        assert np.isinf(table[y.kept :, computed]).all()
        assert np.isfinite(table[: y.kept, computed]).any()
        # Boxed it lies there itself, and what runs again reads it late.
        assert np.isfinite(np.delete(table, np.arange(x.kept), axis=1)).any()


def test_what_is_boxed_and_kept_has_bytes_until_its_later_uses() -> None:
    boxed = [x for x in UNWRITTEN if x.value in MODEL.boxed]
    assert boxed
    for x in boxed:
        (load,) = [y for y in MODEL.loads if y.node == x.variable and (y.start, y.end) == (x.since, x.start)]
        half = x.kept // 2
        assert (load.bytes[:half] > 0.0).all() and not load.bytes[half:].any()
        (table,) = tables(x.variable, MODEL.boxed[x.value])
        # One way where the share is boxed, the other where it is not.
        assert np.isinf(table[:half, half:]).all() and np.isinf(table[half : x.kept, :half]).all()
        assert np.isfinite(table[x.kept :]).all()


def test_what_is_never_boxed_is_not_kept_so() -> None:
    for x in UNWRITTEN:
        if x.value not in MODEL.boxed:
            assert np.isinf(MODEL.unary[x.variable][: x.kept // 2]).all()
    assert NOWHERE is None
