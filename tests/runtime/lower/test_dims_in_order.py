"""On GPUs an all-to-all does not lend its layout to what is computed element by element before it."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import B, S

X = jax.ShapeDtypeStruct((1024, 64, 512), jnp.float32)
W = jax.ShapeDtypeStruct((512, 512), jnp.float32)


def constraints(fn: Any, kind: str, in_sbp: Any, *args: Any) -> tuple[int, int]:
    """How often a lowered program says a layout, and how many all-to-alls it has."""
    program = sbp.compile(fn, sbp.placement(kind, shape=(8,)), in_sbp=in_sbp, out_sbp=[S(2)])
    text = program.lower(*args).as_text()
    return text.count("@LayoutConstraint"), text.count("stablehlo.all_to_all")


@pytest.mark.parametrize("kind, layouts", [("h100", 1), ("cpu", 0)])
def test_a_pointwise_result_keeps_its_layout_on_gpus(kind: str, layouts: int) -> None:
    found = constraints(lambda x, y: jnp.tanh(x) * y, kind, ([S(0)], [S(0)]), X, X)
    assert found == (layouts, 1)


def test_a_product_may_write_the_layout_that_is_sent() -> None:
    assert constraints(lambda x, w: x @ w, "h100", ([S(0)], [B]), X, W) == (0, 1)
