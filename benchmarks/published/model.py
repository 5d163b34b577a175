"""The model of a row: a decoder as one device trains it, whole or cut into stages of a pipeline.

Two families in one: gated MLPs with rotary positions (Llama, Mixtral, Grok, DeepSeek), and MLPs of two
matrices (GPT, MPT, Nemotron). Biases, dropout and learned positions are left out: their cost does not show.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from benchmarks.published.chips import HOPPER, kind_of
from benchmarks.published.kernels import ATTENTION, plain_attention, product
from benchmarks.published.rows import PublishedStep

PyTree: TypeAlias = Any
FUSED_SINCE = 2022.5
"""Kernels that keep the scores out of memory: arXiv:2205.14135 is of the end of May 2022."""

# Multi-head latent attention of DeepSeek-V2 and V3 (arXiv:2412.19437, section 4.2).
LATENT_QUERY, LATENT_KEYS, ROTARY_WIDTH, KEY_WIDTH, VALUE_WIDTH = 1536, 512, 64, 128, 128

# Results that a checkpoint may keep, by name.
KEPT = ("qkv", "context", "out", "gate", "up", "down", "experts")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One weight of a layer, or of an end of the model.

    Arguments:
      shape: without the dim of the layers.
      width: the dim that tensor parallelism splits; None for none.
      expert: whether dim 0 is that of the experts.
    """

    shape: tuple[int, ...]
    width: int | None = None
    expert: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the model, as one stage of a pipeline has it.

    Arguments:
      dense, sparse: layers with an MLP, then layers with experts.
      first, last: whether it begins with the embedding, and ends with the head and the loss.
    """

    dense: int
    sparse: int = 0
    first: bool = True
    last: bool = True


@dataclass(frozen=True)
class Decoder:
    """The functions of a model.

    Arguments:
      row: its sizes.
      kept: names of the results in a layer that are kept for the backward pass; the rest is computed again.
      groups: into how many parts a sequence is cut for the choice of experts, each with its own capacity:
        over so many devices the sequence is split.
      placed: says how a weight lies where it is used.
      stream: says how the activations between layers lie.
    """

    row: PublishedStep
    kept: Collection[str] = KEPT
    groups: int = 1
    placed: Callable[[str, jax.Array], jax.Array] = lambda name, w: w
    stream: Callable[[jax.Array], jax.Array] = lambda x: x

    @property
    def computed(self) -> Any:
        """The dtype of the activations."""
        return jnp.float16 if self.row.precision == "fp16" else jnp.bfloat16

    @property
    def flash2(self) -> bool:
        """Whether attention runs as FlashAttention-2 on a chip that has faster kernels (Hopper)."""
        return self.row.framework.flash2 and kind_of(self.row.chip) in HOPPER

    @property
    def head_width(self) -> int:
        """The width of one attention head; where heads do not divide the width, the next multiple of 64."""
        share = self.row.width / self.row.heads
        return int(share) if share % 8 == 0 else 64 * ceil(share / 64)

    # -- weights

    def leaves(self, stage: Stage) -> dict[str, dict[str, Leaf]]:
        """The weights of a stage: "ends", and those of one layer of each kind that it has."""
        d, v = self.row.width, self.row.vocabulary
        ends: dict[str, Leaf] = {}
        if stage.first:
            ends["embedding"] = Leaf((v, d), 0)
        if stage.last:
            ends |= {"norm": Leaf((d,)), "head": Leaf((d, v), 1)}
        found = {"ends": ends}
        shared = {"attention_norm": Leaf((d,)), "mlp_norm": Leaf((d,)), **self._attention_leaves()}
        if stage.dense:
            experts = self.row.experts
            width = experts.dense_hidden if experts else 0
            found["dense"] = shared | self._mlp_leaves(width or self.row.hidden)
        if stage.sparse:
            found["sparse"] = shared | self._expert_leaves()
        return found

    def _attention_leaves(self) -> dict[str, Leaf]:
        d, h, k, e = self.row.width, self.row.heads, self.row.kv_heads, self.head_width
        if self.row.latent_attention:
            return {
                "query_down": Leaf((d, LATENT_QUERY)),
                "query": Leaf((LATENT_QUERY, h * (KEY_WIDTH + ROTARY_WIDTH)), 1),
                "keys_down": Leaf((d, LATENT_KEYS + ROTARY_WIDTH)),
                "keys": Leaf((LATENT_KEYS, h * KEY_WIDTH), 1),
                "values": Leaf((LATENT_KEYS, h * VALUE_WIDTH), 1),
                "out": Leaf((h * VALUE_WIDTH, d), 0),
            }
        return {
            "query": Leaf((d, h * e), 1),
            "keys": Leaf((d, k * e), 1),
            "values": Leaf((d, k * e), 1),
            "out": Leaf((h * e, d), 0),
        }

    def _mlp_leaves(self, hidden: int) -> dict[str, Leaf]:
        d = self.row.width
        gate = {"gate": Leaf((d, hidden), 1)} if self.row.gated else {}
        return gate | {"up": Leaf((d, hidden), 1), "down": Leaf((hidden, d), 0)}

    def _expert_leaves(self) -> dict[str, Leaf]:
        experts, d, f = self.row.experts, self.row.width, self.row.hidden
        assert experts is not None
        n = experts.count
        shared = {f"shared_{k}": x for k, x in self._mlp_leaves(f * experts.shared).items()}
        return {
            "router": Leaf((d, n)),
            "expert_gate": Leaf((n, d, f), 2, expert=True),
            "expert_up": Leaf((n, d, f), 2, expert=True),
            "expert_down": Leaf((n, f, d), 1, expert=True),
            **(shared if experts.shared else {}),
        }

    def shapes(self, stage: Stage, dtype: Any) -> PyTree:
        """All weights of a stage as `ShapeDtypeStruct`s, layers as `stacked` has them."""

        def one(leaf: Leaf, layers: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((layers, *leaf.shape) if layers else leaf.shape, dtype)

        return stacked(self.row.in_loop, stage, self.leaves(stage), one)

    def count(self, stage: Stage) -> tuple[int, int]:
        """How many weights of a stage are outside of experts, and in them."""
        found = [0, 0]
        layers = {"ends": 1, "dense": stage.dense, "sparse": stage.sparse}
        for kind, group in self.leaves(stage).items():
            for leaf in group.values():
                found[leaf.expert] += layers[kind] * prod(leaf.shape)
        return found[0], found[1]

    # -- what is computed

    def run(self, stage: Stage, weights: PyTree, x: jax.Array, targets: jax.Array | None = None) -> jax.Array:
        """What a stage makes of tokens `b s` or activations `b s d`: activations, or of the last the loss."""
        ends = {name: self.placed(name, w) for name, w in weights["ends"].items()}
        if stage.first:
            x = ends["embedding"][x].astype(self.computed)
        x = self.stream(x)
        for kind, mlp in (("dense", self.mlp), ("sparse", self.experts)):
            if kind in weights:
                x = self._through(x, weights[kind], partial(self.layer, mlp=mlp))
        if not stage.last:
            return x
        assert targets is not None
        logits = product(normalized(x, ends["norm"]), ends["head"], False).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    def _through(self, x: jax.Array, layers: PyTree, one: Callable[..., jax.Array]) -> jax.Array:
        policy = jax.checkpoint_policies.save_only_these_names(*self.kept)
        checked = jax.checkpoint(one, policy=policy)
        if self.row.in_loop:
            return jax.lax.scan(lambda x, layer: (checked(x, layer), None), x, layers)[0]
        # One by one, not in a loop: what the next layer needs is then fetched while this one computes.
        for layer in layers:
            x = checked(x, layer)
        return x

    def layer(self, x: jax.Array, layer: Mapping[str, jax.Array], mlp: Callable[..., jax.Array]) -> jax.Array:
        """One layer, `b s d -> b s d`."""
        w = {name: self.placed(name, x) for name, x in layer.items()}
        for norm, inside in (("attention_norm", self.attention), ("mlp_norm", mlp)):
            x = self.stream(x + self.whole(inside(self.whole(normalized(x, w[norm])), w)))
        return x

    def whole(self, x: jax.Array) -> jax.Array:
        """What enters and leaves the products of a layer, where tensor parallel devices have all of it."""
        return x if self.row.sequence_parallel else self.stream(x)

    def times(self, x: jax.Array, w: jax.Array, name: str) -> jax.Array:
        """A product with a weight, in the row's precision."""
        return checkpoint_name(product(x, w, self.row.precision == "fp8"), name)

    def attention(self, x: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
        """Causal self-attention, `b s d -> b s d`."""
        heads = self._latent_heads if self.row.latent_attention else self._heads
        fused = ATTENTION["flash2_attention" if self.flash2 else "attention"]
        core = fused if self.row.year >= FUSED_SINCE else plain_attention
        context = core(*heads(x, w)).transpose(0, 3, 1, 2, 4)  # b s k g e
        return self.times(context.reshape(*x.shape[:2], -1), w["out"], "out")

    def _heads(self, x: jax.Array, w: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        (b, s, _), k, e = x.shape, self.row.kv_heads, self.head_width
        q = self.times(x, w["query"], "qkv").reshape(b, s, k, -1, e).transpose(0, 2, 3, 1, 4)
        keys, values = (self._by_head(self.times(x, w[n], "qkv"), e) for n in ("keys", "values"))
        return (rotated(q), rotated(keys), values) if self.row.gated else (q, keys, values)

    def _by_head(self, x: jax.Array, e: int) -> jax.Array:
        """`b s (h e) -> b h s e`."""
        return x.reshape(*x.shape[:2], -1, e).transpose(0, 2, 1, 3)

    def _latent_heads(self, x: jax.Array, w: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        q = self.times(self.times(x, w["query_down"], "qkv"), w["query"], "qkv")
        q = self._by_head(q, KEY_WIDTH + ROTARY_WIDTH)
        latent = self.times(x, w["keys_down"], "qkv")
        latent, position = latent[..., :LATENT_KEYS], rotated(latent[..., LATENT_KEYS:])
        k = self._by_head(self.times(latent, w["keys"], "qkv"), KEY_WIDTH)
        v = self._by_head(self.times(latent, w["values"], "qkv"), VALUE_WIDTH)
        shared = jnp.broadcast_to(position[:, None], (*k.shape[:3], ROTARY_WIDTH))
        q = jnp.concatenate([q[..., :KEY_WIDTH], rotated(q[..., KEY_WIDTH:])], axis=-1)
        return q[:, :, None], jnp.concatenate([k, shared], axis=-1), v

    def mlp(self, x: jax.Array, w: Mapping[str, jax.Array], prefix: str = "") -> jax.Array:
        """Two linear maps, or three of which one gates, `b s d -> b s d`."""
        up = self.times(x, w[f"{prefix}up"], "up")
        if self.row.gated:
            inside = jax.nn.silu(self.times(x, w[f"{prefix}gate"], "gate")) * up
        else:
            inside = jax.nn.gelu(up)
        return self.times(inside, w[f"{prefix}down"], "down")

    def experts(self, x: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
        """The experts that each token goes to, as many tokens to each, `b s d -> b s d`.

        Of every group of tokens an expert takes the same number (a capacity factor of 1, or forced balance).
        """
        experts = self.row.experts
        assert experts is not None
        b, s, d = x.shape
        tokens = x.reshape(b, self.groups, s // self.groups, d)
        chosen = jax.nn.softmax(product(tokens, w["router"], False).astype(jnp.float32))
        weight, expert = jax.lax.top_k(chosen, experts.active)
        order = jnp.argsort(expert.reshape(b, self.groups, -1), axis=-1)  # by expert, then by token
        sent = jnp.take_along_axis(tokens, (order // experts.active)[..., None], axis=2)
        mine = sent.reshape(b, self.groups, experts.count, -1, d)
        made = self._expert_mlp(mine, w).reshape(b, self.groups, -1, d)
        back = jnp.take_along_axis(made, jnp.argsort(order, axis=-1)[..., None], axis=2)
        back = back.reshape(b, self.groups, s // self.groups, experts.active, d)
        mixed = jnp.sum(back * weight[..., None].astype(back.dtype), axis=3).reshape(b, s, d)
        return mixed + self.mlp(x, w, "shared_") if experts.shared else mixed

    def _expert_mlp(self, x: jax.Array, w: Mapping[str, jax.Array]) -> jax.Array:
        """Each expert's tokens through its MLP: `b g e c d`."""
        x = x.transpose(2, 0, 1, 3, 4)

        def times(x: jax.Array, name: str) -> jax.Array:
            one = partial(product, eight_bits=self.row.precision == "fp8")
            return checkpoint_name(jax.vmap(one)(x, w[name]), "experts")

        inside = jax.nn.silu(times(x, "expert_gate")) * times(x, "expert_up")
        return times(inside, "expert_down").transpose(1, 2, 0, 3, 4)


def stacked(
    in_loop: bool, stage: Stage, leaves: Mapping[str, Mapping[str, Leaf]], one: Callable[[Leaf, int], Any]
) -> PyTree:
    """Something of each weight of a stage, layers of a kind in a list.

    Arguments:
      in_loop: whether weights of the layers of a kind are one array each instead, layers first.
      one: what, given the weight and how many layers its array has; 0 for one by itself.
    """
    counts = {"dense": stage.dense, "sparse": stage.sparse}
    found: dict[str, Any] = {}
    for kind, group in leaves.items():
        n = counts.get(kind, 0)
        made = {name: one(x, n if in_loop else 0) for name, x in group.items()}
        found[kind] = [made] * n if kind in counts and not in_loop else made
    return found


def normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS normalization over the last dim, computed in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions: `... s e -> ... s e`, pairs being the two halves of a head."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[-2])[:, None] / 500_000.0 ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    wide = x.astype(jnp.float32)
    left, right = wide[..., :half], wide[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)
