"""Programs that XLA was reported to get wrong, as programs of our own, beside what `jit` gives here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import sbp
from sbp import B, S
from sbp.notation.resolve import to_partition_spec

RNG = np.random.default_rng(0)
X, W = RNG.normal(size=(16, 32)), RNG.normal(size=(32, 24))
TABLE, IDS, ROWS = RNG.normal(size=(40, 8)), RNG.integers(0, 40, (16, 4)), RNG.normal(size=(16, 4, 8))
LINE, GRID = sbp.placement("cpu", shape=(8,)), sbp.placement("cpu", shape=(2, 4), axes=("data", "model"))


def mixed(lies: Sequence[Any]) -> Callable[..., Any]:
    """xla#40034: a sum along an axis, or two, becomes split along one and a copy along the other."""

    def fn(x: Any, w: Any) -> Any:
        return jnp.tanh(sbp.annotate(x @ w, lies)) * 2

    return fn


def looked_up(table: Any, ids: Any, rows: Any) -> Any:
    """xla#42481: rows of the gradient of a lookup, sliced before they are added up."""
    gradient = jax.grad(lambda t: (jnp.tanh(t[ids]) * rows).sum())(table)
    return gradient[3:17] * 2, gradient


def accumulated(table: Any, ids: Any, rows: Any) -> Any:
    """xla#49143: rows that are added to a table in each trip of a loop."""
    steps = ids.reshape(4, 4, 4), rows.reshape(4, 4, 4, 8)
    added = jax.lax.scan(lambda t, x: (t.at[x[0]].add(x[1]), None), jnp.zeros_like(table), steps)[0]
    return table + added


SPLIT = {
    "8": (LINE, [([B], [S(0)], [S(0)]), ([S(0)], [S(0)], [S(0)]), ([S(1)], [B], [S(2)])]),
    "2x4": (
        GRID,
        [
            ([B, S(0)], [S(0), B], [S(0), B]),
            ([B, B], [S(0), S(0)], [S(0), S(0)]),
            ([S(0), S(1)], [S(0), B], [S(0), S(2)]),
        ],
    ),
}
CASES = [
    *((mixed(lies), (X, W), LINE, ([S(1)], [S(0)])) for lies in ([S(0)], [S(1)], [B])),
    *(
        (mixed(lies), (X, W), GRID, ([S(1), S(1)], [S(0), S(0)]))
        for lies in ([S(0), B], [B, S(1)], [S(1), S(0)], [B, B], [B, S(0)])
    ),
    *(
        (fn, (TABLE, IDS, ROWS), placement, signatures)
        for fn in (looked_up, accumulated)
        for placement, each in SPLIT.values()
        for signatures in each
    ),
]


@pytest.mark.some(4)
@pytest.mark.parametrize("case", CASES, ids=map(str, range(len(CASES))))
def test_it_is_what_one_device_gives(case: Any, x64: None) -> None:
    fn, args, placement, signatures = case
    wanted = jax.tree.leaves(fn(*args))
    program = sbp.compile(fn, placement, in_sbp=signatures)
    shardings = [
        NamedSharding(placement.mesh, to_partition_spec(nd, np.ndim(x), placement))
        for nd, x in zip(signatures, args, strict=True)
    ]
    by_jit = jax.jit(fn)(*map(jax.device_put, args, shardings))
    for got in program(*args), by_jit:
        for a, b in zip(jax.tree.leaves(got), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
