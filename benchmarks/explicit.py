"""The GPT as somebody writes it who ports it to JAX's explicit mode by hand: a peer, and a program for us.

Lines that differ from `models/gpt.py` have `out_sharding=`, `jax.reshard` or `reduced` in them. A port is
*plain* with what JAX asks for, and *best* where weights are `reduced`, or gathered once: then gradients are
sums that wait until the last micro-batch is done, as MaxText does it (maxtext#5060).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as Spec

from models import gpt

PyTree: TypeAlias = Any
TENSOR = {
    "qkv": Spec(None, None, "model", None),
    "out": Spec("model", None, None),
    "up": Spec(None, "model"),
    "up_bias": Spec("model"),
    "down": Spec("model", None),
}


@dataclass(frozen=True)
class Port:
    """A layout of the port: "data", "fsdp", "tensor" or "2d".

    Arguments:
      best: whether gradients wait as sums.
    """

    layout: str
    best: bool = False

    @property
    def batch(self) -> str | None:
        """The axis that splits the batch."""
        return None if self.layout == "tensor" else "data"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh."""
        return {"2d": ("data", "model"), "tensor": ("model",)}.get(self.layout, ("data",))

    def weights(self, params: PyTree, size: int) -> PyTree:
        """How the weights lie, a spec per leaf.

        Arguments:
          size: of the axis that FSDP splits weights by.
        """

        def layer(name: str, x: Any) -> Spec:
            return TENSOR.get(name, Spec()) if "model" in self.axes else self.split(x, size)

        def named(path: Sequence[Any], x: Any) -> Spec:
            name = next(str(k.key) for k in reversed(path) if hasattr(k, "key"))
            if name == "embedding" and "model" in self.axes:
                return Spec("model", None)
            return layer(name, x)

        return jax.tree_util.tree_map_with_path(named, params)

    def split(self, x: Any, size: int, first: int = 0) -> Spec:
        """FSDP's spec: split at the first dim that divides, from `first` on."""
        if self.layout != "fsdp":
            return Spec()
        dims = (d for d, n in enumerate(x.shape) if d >= first and n % size == 0 and n >= size)
        dim = next(dims, None)
        return Spec() if dim is None else Spec(*[None] * dim, "data")

    def entering(self, spec: Spec) -> Spec:
        """How a weight lies where it is used."""
        whole = Spec(*[None if e == "data" else e for e in spec])
        if not self.best or self.batch is None:
            return whole
        return Spec(*whole, reduced={"data"})

    def used(self, params: PyTree, specs: PyTree) -> PyTree:
        """The weights as they lie where they are used."""
        return jax.tree.map(lambda w, s: jax.reshard(w, self.entering(s)), params, specs)

    def waiting(self, spec: Spec) -> Spec:
        """How its gradient lies until the last micro-batch is done."""
        whole = Spec(*[None if e == "data" else e for e in spec])
        return Spec(*whole, unreduced={"data"}) if self.best and self.batch is not None else spec


def beside(w: jax.Array, x: jax.Array, port: Port) -> jax.Array:
    """A weight that is added or multiplied to each row: JAX refuses a `reduced` one, and takes it as rows."""
    if not port.best or port.batch is None:
        return w
    return jax.reshard(jnp.broadcast_to(w, x.shape), Spec(port.batch, *jax.typeof(x).sharding.spec[1:]))


def normalize(x: jax.Array, norm: PyTree, port: Port) -> jax.Array:
    """As `gpt.normalize`."""
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(variance + 1e-5) * beside(norm["scale"], x, port)
    return scaled + beside(norm["bias"], x, port)


def attention(x: jax.Array, layer: PyTree, config: gpt.Config, port: Port) -> jax.Array:
    """As `gpt.attention`."""
    qkv = jnp.einsum("bsd,tdhe->tbhse", x, layer["qkv"])
    queries, keys, values = qkv[0], qkv[1], qkv[2]
    scores = jnp.einsum("bhqe,bhke->bhqk", queries, keys) * config.head_width**-0.5
    position = jnp.arange(x.shape[1])
    seen = position[:, None] >= position[None, :]
    weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(scores.dtype).min), axis=-1)
    mixed = jnp.einsum("bhqk,bhke->bqhe", weights, values)
    return jnp.einsum("bqhe,hed->bqd", mixed, layer["out"], out_sharding=Spec(port.batch))


def mlp(x: jax.Array, layer: PyTree, port: Port) -> jax.Array:
    """As `gpt.mlp`."""
    hidden = x @ layer["up"]
    hidden = jax.nn.gelu(hidden + beside(layer["up_bias"], hidden, port))
    down = jnp.matmul(hidden, layer["down"], out_sharding=Spec(port.batch))
    return down + beside(layer["down_bias"], down, port)


def loss(params: PyTree, tokens: jax.Array, config: gpt.Config, port: Port) -> jax.Array:
    """As `gpt.loss`, without dropout."""
    x = params["embedding"].at[tokens[:, :-1]].get(out_sharding=Spec(port.batch))
    x = x + beside(params["position"][: tokens.shape[1] - 1], x, port)
    for layer in params["layers"]:
        x = x + attention(normalize(x, layer["attention_norm"], port), layer, config, port)
        x = x + mlp(normalize(x, layer["mlp_norm"], port), layer, port)
    scores = normalize(x, params["norm"], port) @ params["embedding"].T
    log_probability = jax.nn.log_softmax(scores)
    # JAX has no `take_along_axis` along a split vocabulary.
    chosen = tokens[:, 1:, None] == jax.lax.broadcasted_iota(tokens.dtype, scores.shape, 2)
    return -jnp.where(chosen, log_probability, 0).sum(-1).mean()


Loss: TypeAlias = Callable[[PyTree, jax.Array], jax.Array]


def make_train_step(
    loss: Loss, optimizer: optax.GradientTransformation, port: Port, size: int, microbatches: int
) -> Callable[..., Any]:
    """`(params, opt_state, batch, key) -> (params, opt_state, loss)`, as `gpt.make_train_step` gives it.

    Arguments:
      loss: of weights as they lie where they are used; the port's own gathers those of its layers itself.
    """

    def step(params: PyTree, state: PyTree, tokens: jax.Array, key: jax.Array) -> Any:
        specs = port.weights(params, size)

        def one(params: PyTree, tokens: jax.Array) -> jax.Array:
            return loss(params if port.best else port.used(params, specs), tokens)

        gradient = jax.value_and_grad(one)
        held = port.used(params, specs) if port.best else params
        if microbatches == 1:
            value, grads = gradient(held, tokens)
        else:
            shape = (len(tokens) // microbatches, microbatches, tokens.shape[1])
            parts = jnp.swapaxes(tokens.reshape(shape, out_sharding=Spec(port.batch)), 0, 1)
            zeros = jax.tree.map(
                lambda w, s: jnp.zeros(w.shape, w.dtype, out_sharding=port.waiting(s)), params, specs
            )

            def add(sums: PyTree, part: jax.Array) -> Any:
                return jax.tree.map(jnp.add, sums, gradient(held, part)), None

            (value, grads), _ = jax.lax.scan(
                add, (jnp.zeros((), jax.tree.leaves(zeros)[0].dtype), zeros), parts
            )
            value, grads = jax.tree.map(
                lambda x: x / microbatches, (value, jax.tree.map(jax.reshard, grads, specs))
            )
        grads = jax.tree.map(jax.reshard, grads, specs)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step
