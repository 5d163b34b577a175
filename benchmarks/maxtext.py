"""The Llama of models/llama.py as MaxText lays it out: the peer of a step on very many devices.

MaxText names the dims of every weight and of activations between layers, and a table says which mesh axis a
name is split over: `logical_axis_rules` of its MaxText/configs/base.yml (Apache-2.0, at 000e935). Here stand
those of two axes, "fsdp" and "tensor". MaxText/configs/models/gpu/llama3_70b.yml has layers in a scan, each
computed twice (`remat_policy: full`), and a fused attention kernel, without which both sides go here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import llama, train
from sbp import B, S
from sbp.placement import Placement

# A name -> the position of the mesh axis that it is split over; on a mesh of one axis only "fsdp" is there.
WEIGHTS = {"embed": 0, "heads": 1, "mlp": 1, "vocab": 1, "norm": 1}
ACTIVATIONS = {"batch": 0, "heads": 1, "embed": 1, "mlp": 1, "vocab": 1}

LAYER = {
    "attention_norm": "norm",
    "query": "embed heads group kv",
    "key": "embed heads kv",
    "value": "embed heads kv",
    "out": "heads group kv embed",
    "mlp_norm": "norm",
    "gate": "embed mlp",
    "up": "embed mlp",
    "down": "mlp embed",
}


def signatures(shape: Sequence[int], config: llama.Config, optimizer: optax.GradientTransformation) -> Any:
    """The table as signatures of the train step's arguments; the optimizer's state lies as the weights."""
    axes = range(len(shape))

    def of(names: str) -> list[Any]:
        on = [WEIGHTS.get(name) for name in names.split()]
        return [S(on.index(axis)) if axis in on else B for axis in axes]

    stack = {name: of(f"layers {dims}") for name, dims in LAYER.items()}
    layers = stack if config.scan else [{name: of(dims) for name, dims in LAYER.items()}] * config.layers
    ends = {"embedding": of("vocab embed"), "norm": of("norm"), "head": of("embed vocab")}
    weights = {**ends, "layers": layers}
    params = jax.eval_shape(partial(llama.init, config=config), jax.random.key(0))
    state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, signature: signature,
        jax.eval_shape(optimizer.init, params),
        weights,
        transform_non_params=lambda _: [B for _ in axes],
    )
    return weights, state, [S(0), *[B for _ in axes[1:]]], [B for _ in axes]


def make_train_step(
    config: llama.Config, optimizer: optax.GradientTransformation, mesh: Mesh, placement: Placement
) -> train.Step:
    """The train step with activations constrained as in MaxText."""

    def lies(x: jax.Array, names: str) -> jax.Array:
        on = [ACTIVATIONS.get(name, len(mesh.axis_names)) for name in names.split()]
        spec = PartitionSpec(*(mesh.axis_names[a] if a < len(mesh.axis_names) else None for a in on))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return train.gradient_step(partial(loss, config=config, lies=lies), optimizer)


Lies = Callable[[jax.Array, str], jax.Array]


def block(x: jax.Array, layer: Any, config: llama.Config, lies: Lies) -> jax.Array:
    """One layer, `b s d -> b s d`."""
    layer = jax.tree.map(lambda w: w.astype(x.dtype), layer)
    x = lies(x, "batch length embed")
    queries, keys, values = llama.heads(llama.normalize(x, layer["attention_norm"]), layer, config)
    queries = lies(queries, "batch heads group length kv")
    keys, values = (lies(each, "batch heads length kv") for each in (keys, values))
    mixed = lies(llama.attend(queries, keys, values), "batch length heads group kv")
    x = x + lies(jnp.einsum("bqkge,kged->bqd", mixed, layer["out"]), "batch length embed")
    y = llama.normalize(x, layer["mlp_norm"])
    inner = lies(jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"]), "batch length mlp")
    return x + lies(inner @ layer["down"], "batch length embed")


def loss(params: Any, tokens: jax.Array, key: Any, config: llama.Config, lies: Lies) -> jax.Array:
    """The mean cross-entropy in nats; no key is used."""
    x = lies(params["embedding"].astype(config.compute_dtype)[tokens[:, :-1]], "batch length embed")
    x = llama.through(x, params["layers"], partial(block, config=config, lies=lies), config)
    x = llama.normalize(x, params["norm"].astype(x.dtype))
    scores = lies(x @ params["head"].astype(x.dtype), "batch length vocab").astype(jnp.float32)
    log_probability = jax.nn.log_softmax(scores)
    # Not a lookup: a product with a one-hot row leaves split logits split, and is fused away.
    targets = lies(jax.nn.one_hot(tokens[:, 1:], config.vocabulary), "batch length vocab")
    return -(targets * log_probability).sum(-1).mean()
