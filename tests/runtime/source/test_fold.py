"""Layers are one function, whatever of them does not depend on them."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import B, S
from tests.runtime.source.equal import checked

LINE = sbp.placement("cpu", shape=(4,))
LAYERS = 4


def net(weights: Any, x: Any, key: Any) -> Any:
    """The first layer makes the mask that all use; each takes numbers of its own, and casts its weight."""
    steps = jax.random.split(key, LAYERS)
    seen = None
    for k, weight in enumerate(weights):
        scores = jnp.tanh(x @ weight.astype(jnp.float32))
        if seen is None:
            position = jnp.arange(16)
            seen = position[:, None] >= position[None, :]
        kept = jax.random.bernoulli(steps[k], 0.9, (16, 16))
        x = x + jnp.where(seen & kept, scores, 0.0)
    return x


def loss(weights: Any, x: Any, key: Any) -> Any:
    """What gradients are of."""
    return net(weights, x, key).sum()


WEIGHTS = [jnp.full((16, 16), 0.01 * (k + 1), jnp.bfloat16) for k in range(LAYERS)]
ARGS = WEIGHTS, jnp.ones((16, 16)), jax.random.key(0)
SIGNATURES = [B], [S(0)], [B]


def test_what_layers_share_stands_in_front_of_them() -> None:
    text = checked(net, ARGS, LINE, in_sbp=SIGNATURES).text
    assert text.count("def layer(") == 1 and len(re.findall(r"= layer\(", text)) == LAYERS
    layer, main = text.split("def net_on_device(")
    assert ">=" not in layer and main.index(">=") < main.index("= layer(")
    assert all(f"    steps_{k} = steps[{k}]  #" in main for k in range(LAYERS))


def test_what_each_layer_says_stays_in_it() -> None:
    text = checked(net, ARGS, LINE, in_sbp=SIGNATURES).text
    layer, main = text.split("def net_on_device(")
    assert layer.count("    weights_2 = weights.astype(jnp.float32)") == 1
    assert "= weights" not in main


@pytest.mark.parametrize("arguments", [0, (0, 1)])
def test_gradients_too(arguments: Any) -> None:
    """The first and the last layer have a gradient less, and one from outside."""
    text = checked(jax.grad(loss, arguments), ARGS, LINE, in_sbp=SIGNATURES, close=2e-6).text
    for name in ("layer", "layer_backward"):
        assert len(re.findall(rf"= {name}\(", text)) >= LAYERS - 2
