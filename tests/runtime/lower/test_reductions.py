"""Reductions of split tensors send what is left of them, and no more than `jax.jit`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp import B, S
from sbp.runtime.hlo.meter import read_compiled

LINE, GRID = sbp.placement("cpu", shape=(8,)), sbp.placement("cpu", shape=(2, 4))
X = np.random.default_rng(0).integers(-3, 4, (64, 48)).astype(np.float32)
BITS = np.random.default_rng(1).integers(-(2**31), 2**31, (64, 48)).astype(np.int32)

REDUCTIONS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "all finite": (lambda x: jnp.all(jnp.isfinite(x)), X),
    "any negative": (lambda x: jnp.any(x < 0, axis=0), X),
    "none of both": (lambda x: ~(jnp.any(x > 9) | jnp.any(x < -9)), X),
    "product": (lambda x: jnp.prod(jnp.where(x > 0, 1.5, -1.0), axis=0), X),
    "converged": (lambda x: jnp.max(jnp.abs(x)) < 1e-3, X),
    "sum": (lambda x: jnp.sum(x, axis=0), X),
}
OF_BITS: dict[str, Callable[[Any], Any]] = {
    name: lambda x, name=name: getattr(lax, f"reduce_{name}")(x, (0,)) for name in ("and", "or", "xor")
}


def jit_bytes(fn: Callable[[Any], Any], x: Any, placement: sbp.Placement, spec: Any) -> float:
    given = jax.device_put(x, jax.NamedSharding(placement.mesh, spec))
    return read_compiled(jax.jit(fn).lower(given).compile()).wire_bytes


@pytest.mark.parametrize("name", REDUCTIONS)
def test_no_more_is_sent_than_by_jit(name: str) -> None:
    fn, x = REDUCTIONS[name]
    program = sbp.compile(fn, LINE, in_sbp=([S(0)],))
    np.testing.assert_allclose(program(x), fn(x), rtol=1e-6)
    sent = read_compiled(program.lower(x).compile()).wire_bytes
    assert sent == program.plan(x).wire_bytes
    assert sent <= jit_bytes(fn, x, LINE, jax.P("x"))


@pytest.mark.parametrize("name", [*REDUCTIONS, *OF_BITS])
def test_along_two_axes_and_as_source(name: str) -> None:
    fn, x = REDUCTIONS.get(name) or (OF_BITS[name], BITS)
    program = sbp.compile(fn, GRID, in_sbp=([S(0), S(1)],))
    np.testing.assert_allclose(program(x), fn(x), rtol=1e-6)
    (got,) = program.plan(x).source().load()(x)
    np.testing.assert_allclose(got, fn(x), rtol=1e-6)


@pytest.mark.parametrize("name", OF_BITS)
def test_bits_are_joined_by_who_has_all_parts(name: str) -> None:
    """XLA has no collective for it: of a split tensor `jit` cannot compute it at all."""
    fn = OF_BITS[name]
    program = sbp.compile(fn, LINE, in_sbp=([S(0)],), out_sbp=[B])
    np.testing.assert_array_equal(program(BITS), fn(BITS))
    assert program.plan(BITS).wire_bytes == 7 * 48 * 4
    assert sbp.verify(program, BITS).outputs


def test_a_partial_is_asked_for_by_name() -> None:
    def twice(x: Any) -> Any:
        return sbp.annotate(jnp.prod(x, axis=0), [sbp.P("prod")]) * 2

    (row,) = sbp.compile(twice, LINE, in_sbp=([S(0)],), out_sbp=[B]).plan(X).collectives
    assert (row.kind, row.before, row.after) == ("all_reduce", (sbp.P("prod"),), (B,))
