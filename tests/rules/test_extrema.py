"""Maxima and minima that wait, beside operands that do not: those may be whole on every device."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import primitives

import sbp
from sbp import B, S

RNG = np.random.default_rng(0)
X = RNG.normal(size=10).astype(np.float32)
ROWS = RNG.normal(size=(8, 10)).astype(np.float32)
INDEX, UPDATES = np.array([1, 9, 3, 1]), RNG.normal(size=4).astype(np.float32)

PROGRAMS: dict[str, tuple[Callable[..., Any], Any, tuple[Any, ...]]] = {
    "max beside a whole operand": (lambda z, x: jnp.maximum(z.max(0), x), (S(0), B), (ROWS, X)),
    "two that wait": (lambda z: jnp.minimum(z.min(0), (2 * z).min(0)), (S(0),), (ROWS,)),
    "updates by index": (lambda x, i, u: x.at[i].max(u), (B, S(0), S(0)), (X, INDEX, UPDATES)),
    "into one that waits": (
        lambda z, i, u: z.min(0).at[i].min(u),
        (S(0), S(0), S(0)),
        (ROWS, INDEX, UPDATES),
    ),
    "without what lax adds": (lambda z: primitives.reduce_max_p.bind(z, axes=(0,)), (S(0),), (ROWS,)),
}


@pytest.mark.parametrize("hierarchy", [(4,), (2, 2)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_extrema_beside_whole_values(name: str, hierarchy: tuple[int, ...]) -> None:
    fn, signatures, args = PROGRAMS[name]
    in_sbp = tuple([s] * len(hierarchy) for s in signatures)
    program = sbp.compile(fn, sbp.placement("cpu", shape=hierarchy), in_sbp=in_sbp)
    sbp.verify(program, *args)
    if name == "updates by index":
        assert [c.kind for c in program.plan(*args).collectives] == ["all_reduce"]
