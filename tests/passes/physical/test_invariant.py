"""Masks that loops make again: in memory until the last of them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp

ONE = sbp.placement("h100", shape=(1,))
N, LAYERS = 1024, 4
MASK = N * N


def scanned(second: Any) -> float:
    """The bytes at the peak, which is between two scans; the second body makes a mask too."""

    def fn(ws: Any, x: Any) -> Any:
        mask = jnp.tril(jnp.ones((N, N), bool))

        def layer(x: Any, w: Any) -> Any:
            return jnp.where(mask, x @ w, 0), None

        x, _ = jax.lax.scan(layer, x, ws)
        between = jnp.sort(jnp.concatenate([x] * 8), 0)[:N]

        def again(x: Any, w: Any) -> Any:
            return jnp.where(second(), x @ w, 0), None

        return jax.lax.scan(again, between, ws)[0]

    ws, x = jax.ShapeDtypeStruct((LAYERS, N, N), "float32"), jax.ShapeDtypeStruct((N, N), "float32")
    return sbp.compile(fn, ONE).plan(ws, x).memory_bytes


def test_what_is_made_of_a_value_twice_is_named_once() -> None:
    """Sixty doublings have as many paths as a chessboard has grains."""

    def fn(x: Any) -> Any:
        made = jnp.arange(N, dtype=x.dtype)
        for _ in range(60):
            made = jnp.sin(made) * made
        return jax.lax.scan(lambda x, _: (x + made, None), x, None, length=2)[0]

    assert sbp.compile(fn, ONE).plan(jax.ShapeDtypeStruct((N,), "float32")).memory_bytes > 0


def test_a_mask_that_a_later_loop_makes_again_stays() -> None:
    same = scanned(lambda: jnp.tril(jnp.ones((N, N), bool)))
    other = scanned(lambda: jnp.tril(jnp.ones((N, N), bool), -1))
    assert same - other == pytest.approx(MASK, rel=0.05)  # and the holes between
