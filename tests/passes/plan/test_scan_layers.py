"""A loop over stacked layers is planned as the layers written out: what one device sends is the same."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from models import gpt
from sbp import B, S
from sbp.hardware.catalogue import BYTES_ONLY
from sbp.signature import Split

PyTree = Any
CONFIG = gpt.Config(vocabulary=32, width=32, heads=8, layers=2, sequence=16)
LAYER = jax.eval_shape(partial(gpt.init, config=CONFIG), jax.random.key(0))["layers"][0]
STACKED = jax.tree.map(lambda x: jax.ShapeDtypeStruct((CONFIG.layers, *x.shape), x.dtype), LAYER)
SEPARATE = [LAYER] * CONFIG.layers
X = jax.ShapeDtypeStruct((16, CONFIG.sequence, CONFIG.width), jnp.float32)


def block(x: jax.Array, layer: PyTree) -> jax.Array:
    """A layer of the transformer."""
    x = x + gpt.attention(gpt.normalize(x, layer["attention_norm"]), layer, None, CONFIG)
    return x + gpt.mlp(gpt.normalize(x, layer["mlp_norm"]), layer)


def looped(layers: PyTree, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, layer: (block(x, layer), None), x, layers)[0]


def written_out(layers: PyTree, x: jax.Array) -> jax.Array:
    for layer in layers:
        x = block(x, layer)
    return x


def step(model: Callable[..., jax.Array], layers: PyTree, x: jax.Array) -> PyTree:
    """A step of gradient descent."""
    gradients = jax.grad(lambda layers: jnp.mean(model(layers, x) ** 2))(layers)
    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, gradients)


def moved(signature: Any) -> Any:
    """The signature of a weight with one more dim in front."""
    return Split(signature.dim + 1) if isinstance(signature, Split) else signature


def signatures(weights: PyTree, data: PyTree) -> tuple[Any, Any]:
    """`in_sbp` of stacked and of separate layers.

    Arguments:
      weights: the signatures of a layer along every axis.
      data: the activations'.
    """
    full = [jax.tree.map(lambda own, below: jax.tree.map(lambda _: own, below), w, LAYER) for w in weights]
    one = jax.tree.map(lambda *own: list(own), *full)
    many = jax.tree.map(lambda *own: [moved(s) for s in own], *full)
    return (many, data), ([one] * CONFIG.layers, data)


WHOLE = dict.fromkeys(LAYER, B)
HOW = {
    "tensor": ((8,), [gpt.LAYER], [B]),
    "data": ((8,), [WHOLE], [S(0)]),
    "data and tensor": ((2, 4), [WHOLE, gpt.LAYER], [S(0), B]),
}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("tensor", "forward"),
        ("data", "forward"),
        ("data and tensor", "forward"),
        ("tensor", "training"),
        ("data", "training"),
    ],
)
def test_a_loop_sends_what_its_layers_send(how: str, what: str) -> None:
    """Where bytes alone count: with latencies, stacked weights may be gathered once for all layers."""
    shape, weights, data = HOW[how]
    place, options = sbp.placement("cpu", shape=shape), sbp.Options(hardware=BYTES_ONLY)
    stacked, separate = signatures(weights, data)
    sent = []
    for model, layers, in_sbp in ((looped, STACKED, stacked), (written_out, SEPARATE, separate)):
        fn = partial(step, model) if what == "training" else model
        out_sbp = in_sbp[0] if what == "training" else data
        plan = sbp.compile(fn, place, in_sbp=in_sbp, out_sbp=out_sbp, options=options).plan(layers, X)
        assert plan.gap < 0.01
        sent.append(plan.wire_bytes)
    assert sent[0] == pytest.approx(sent[1])
    assert (sent[0] > 0) == (how != "data" or what == "training")
