"""The Llama ported to JAX's explicit mode by hand, as `benchmarks/explicit.py` ports the GPT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as Spec

from benchmarks.explicit import Port, beside
from models import llama

PyTree: TypeAlias = Any
TENSOR = {
    "embedding": Spec("model"),
    "head": Spec(None, "model"),
    **dict.fromkeys(("query", "key", "value"), Spec(None, None, "model")),
    **dict.fromkeys(("gate", "up"), Spec(None, None, "model")),
    **dict.fromkeys(("out", "down"), Spec(None, "model")),
}
"""Of stacked layers, whose dim comes first."""


@dataclass(frozen=True)
class LlamaPort(Port):
    """A layout of the port of the Llama."""

    def weights(self, params: PyTree, size: int) -> PyTree:
        """How the weights lie, a spec per leaf; that of layers in a stack is not split."""

        def named(path: Sequence[Any], x: Any) -> Spec:
            name = str(path[-1].key)
            if "model" in self.axes:
                return TENSOR.get(name, Spec())
            return self.split(x, size, first=int(len(path) > 1))

        return jax.tree_util.tree_map_with_path(named, params)

    def used(self, params: PyTree, specs: PyTree) -> PyTree:
        """As of `Port`; layers are gathered one by one, unless sums of their gradients wait."""
        found = super().used(params, specs)
        return found if self.best else {**found, "layers": params["layers"]}

    def of_layer(self, layer: PyTree, size: int) -> PyTree:
        """The weights of one layer where it computes; where sums wait, they were gathered before."""
        if self.best:
            return layer
        stacked = jax.tree.map(lambda w: jax.ShapeDtypeStruct((1, *w.shape), w.dtype), layer)
        specs = self.weights({"layers": stacked}, size)["layers"]
        return jax.tree.map(lambda w, s: jax.reshard(w, Spec(*self.entering(s)[1:])), layer, specs)


def normalize(x: jax.Array, scale: jax.Array, port: Port) -> jax.Array:
    """As `llama.normalize`."""
    return llama.normalize(x, jnp.ones((), x.dtype)) * beside(scale, x, port)


def block(x: jax.Array, layer: PyTree, config: llama.Config, port: LlamaPort, size: int) -> jax.Array:
    """As `llama.block`."""
    layer, rows = port.of_layer(layer, size), Spec(port.batch)
    queries, keys, values = llama.heads(normalize(x, layer["attention_norm"], port), layer, config)
    found = llama.attend(queries, keys, values)
    x = x + jnp.einsum("bqkge,kged->bqd", found, layer["out"], out_sharding=rows)
    y = normalize(x, layer["mlp_norm"], port)
    hidden = jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])
    return x + jnp.matmul(hidden, layer["down"], out_sharding=rows)


def loss(params: PyTree, tokens: jax.Array, config: llama.Config, port: LlamaPort, size: int) -> jax.Array:
    """As `llama.loss`."""
    x = params["embedding"].at[tokens[:, :-1]].get(out_sharding=Spec(port.batch))
    one = partial(block, config=config, port=port, size=size)
    x = llama.through(x, params["layers"], one, config)
    scores = normalize(x, params["norm"], port) @ params["head"]
    log_probability = jax.nn.log_softmax(scores)
    chosen = tokens[:, 1:, None] == jax.lax.broadcasted_iota(tokens.dtype, scores.shape, 2)
    return -jnp.where(chosen, log_probability, 0).sum(-1).mean()
