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


def test_a_mask_that_a_later_loop_makes_again_stays() -> None:
    same = scanned(lambda: jnp.tril(jnp.ones((N, N), bool)))
    other = scanned(lambda: jnp.tril(jnp.ones((N, N), bool), -1))
    assert same - other == pytest.approx(MASK, rel=0.05)  # and the holes between
