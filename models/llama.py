"""A Llama in plain single-device JAX, and its table of signatures.

    python -m models.llama --placement cpu:2x4 --parallel fsdp
    python -m sbp plan models/llama.py:train_step --placement h100:2x4

RMS norms (Zhang and Sennrich, 2019), rotary positions (Su et al., 2021), attention with fewer keys and values
than queries (Ainslie et al., 2023), by hand or as one op of JAX (`fused`), a SwiGLU between the linear maps
(Shazeer, 2020), a head of its own.
The layers lie in one stack that a `jax.lax.scan` runs through, or one by one; each can be computed once more
in the backward pass (`remat`), so that of a layer only its input is kept.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from models import parallel, text, train
from models.pipeline import Pipeline
from sbp import B, S
from sbp.placement import Placement

PyTree: TypeAlias = Any
Fused: TypeAlias = Literal["xla", "cudnn"] | None


@dataclass(frozen=True, slots=True)
class Config:
    """The sizes of a Llama, its number formats, and how its layers run.

    Arguments:
      heads: of queries; `kv_heads` of them share one head of keys and values.
      hidden: between the two linear maps of a layer.
      sequence: the number of tokens that it sees at once.
      rotation: base of the wavelengths of the rotary positions.
      scan: whether the layers lie in one stack; else each is by itself.
      remat: whether the backward pass computes each layer once more.
      attention: what `jax.nn.dot_product_attention` is asked for, "xla" or "cudnn"; None: attention by hand.
      weight_dtype: dtype of the weights, and of the optimizer's state.
      compute_dtype: dtype of the layers; norms, softmax and loss are float32 (float64 if the weights are).
    """

    layers: int = 2
    width: int = 128
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 384
    vocabulary: int = 96
    sequence: int = 32
    rotation: float = 500_000.0
    scan: bool = True
    remat: bool = True
    attention: Fused = None
    weight_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                f"a width of {self.width}, {self.heads} heads, {self.kv_heads} of keys and values: the heads "
                "must divide the width into even parts, and those of keys and values must divide the heads"
            )

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.width // self.heads


# The sizes of Llama 3 (Grattafiori et al., 2024, table 3), with the context of its pre-training, and of
# Llama 3.2 1B, which has no head of its own.
PRESETS = {
    "tiny": Config(),
    "1b": Config(16, 2048, 32, 8, 8192, 128_256, 8192, compute_dtype=jnp.bfloat16),
    "8b": Config(32, 4096, 32, 8, 14_336, 128_256, 8192, compute_dtype=jnp.bfloat16),
    "70b": Config(80, 8192, 64, 8, 28_672, 128_256, 8192, compute_dtype=jnp.bfloat16),
}


# ---------------------------------------------------------------------------------------------------------
# Where the weights are split under tensor parallelism. The model below does not know of it.

LAYER = {
    "attention_norm": B,
    "query": S(1),
    "key": S(1),
    "value": S(1),
    "out": S(0),
    "mlp_norm": B,
    "gate": S(1),
    "up": S(1),
    "down": S(0),
}


def table(config: Config) -> PyTree:
    """The signature of each parameter along a tensor-parallel axis, as a pytree prefix; of one layer each."""
    layers = LAYER if config.scan else [LAYER] * config.layers
    return {"embedding": S(0), "layers": layers, "norm": B, "head": S(1)}


def signatures(
    choice: str, placement_shape: Sequence[int], config: Config, optimizer: optax.GradientTransformation
) -> PyTree:
    """The `in_sbp` of the train step for a choice of parallelism (a key of `parallel.PARALLEL`)."""
    params = jax.eval_shape(partial(init, config=config), jax.random.key(0))
    stacked = {"embedding": 0, "layers": int(config.scan), "norm": 0, "head": 0}
    return parallel.signatures(choice, placement_shape, table(config), params, optimizer, stacked)


# ---------------------------------------------------------------------------------------------------------
# The model


def init(key: jax.Array, config: Config) -> PyTree:
    """Random parameters: normal, of a variance that keeps that of the activations.

    The queries' heads are "key heads, queries of each": a split by the first is one by all heads alike.
    """
    d, e, f, k = config.width, config.head_width, config.hidden, config.kv_heads
    of_ends, of_layers = jax.random.split(key)

    def normal(key: jax.Array, *shape: int, variance: float) -> jax.Array:
        return (variance**0.5 * jax.random.normal(key, shape)).astype(config.weight_dtype)

    def layer(key: jax.Array) -> PyTree:
        keys, branches, ones = jax.random.split(key, 7), 2 * config.layers, jnp.ones(d, config.weight_dtype)
        return {
            "attention_norm": ones,
            "query": normal(keys[0], d, k, config.heads // k, e, variance=1 / d),
            "key": normal(keys[1], d, k, e, variance=1 / d),
            "value": normal(keys[2], d, k, e, variance=1 / d),
            "out": normal(keys[3], k, config.heads // k, e, d, variance=1 / (d * branches)),
            "mlp_norm": ones,
            "gate": normal(keys[4], d, f, variance=1 / d),
            "up": normal(keys[5], d, f, variance=1 / d),
            "down": normal(keys[6], f, d, variance=1 / (f * branches)),
        }

    keys, (first, last) = jax.random.split(of_layers, config.layers), jax.random.split(of_ends)
    return {
        "embedding": normal(first, config.vocabulary, d, variance=1.0),
        "layers": jax.vmap(layer)(keys) if config.scan else [layer(key) for key in keys],
        "norm": jnp.ones(d, config.weight_dtype),
        "head": normal(last, d, config.vocabulary, variance=1 / d),
    }


def _exact(x: jax.Array) -> jax.Array:
    """In float32, or wider if it is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS normalization over the last dim, in the dtype of `x`."""
    wide = _exact(x)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def rotate(x: jax.Array, config: Config) -> jax.Array:
    """Each pair of numbers turned by an angle that grows with the position: `... s e -> ... s e`.

    Pairs are the two halves of a head, as in the published weights for JAX and PyTorch.
    """
    half = config.head_width // 2
    wavelength = config.rotation ** (jnp.arange(half) / half)
    angle = jnp.arange(x.shape[-2])[:, None] / wavelength
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    wide = _exact(x)
    left, right = wide[..., :half], wide[..., half:]
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)


def attention(x: jax.Array, layer: PyTree, config: Config) -> jax.Array:
    """Causal self-attention, `b s d -> b s d`."""
    queries, keys, values = heads(x, layer, config)
    found = (
        fused_attend(queries, keys, values, config.attention)
        if config.attention
        else attend(queries, keys, values)
    )
    return jnp.einsum("bqkge,kged->bqd", found, layer["out"])


def heads(x: jax.Array, layer: PyTree, config: Config) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, `b k g s e`, and keys and values, `b k s e`: k heads, g queries of each, e numbers wide."""
    queries = rotate(jnp.einsum("bsd,dkge->bkgse", x, layer["query"]), config)
    keys = rotate(jnp.einsum("bsd,dke->bkse", x, layer["key"]), config)
    return queries, keys, jnp.einsum("bsd,dke->bkse", x, layer["value"])


def attend(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """The values of each position and those before it, weighted as queries and keys fit: `b q k g e`."""
    scores = _exact(jnp.einsum("bkgqe,bkse->bkgqs", queries, keys)) * queries.shape[-1] ** -0.5
    position = jnp.arange(keys.shape[2])
    seen = position[:, None] >= position[None, :]
    weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(scores.dtype).min), axis=-1)
    return jnp.einsum("bkgqs,bkse->bqkge", weights.astype(values.dtype), values)


def fused_attend(queries: jax.Array, keys: jax.Array, values: jax.Array, how: Fused) -> jax.Array:
    """What `attend` gives, as one op of JAX: on GPUs with "cudnn" no scores lie in memory."""
    b, k, g, s, e = queries.shape
    queries = queries.transpose(0, 3, 1, 2, 4).reshape(b, s, k * g, e)
    keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
    found = jax.nn.dot_product_attention(queries, keys, values, is_causal=True, implementation=how)
    return found.reshape(b, s, k, g, e)


def mlp(x: jax.Array, layer: PyTree) -> jax.Array:
    """A linear map, gated by another one through a SiLU, and a third one: `b s d -> b s d`."""
    return (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]


def block(x: jax.Array, layer: PyTree, config: Config) -> jax.Array:
    """One layer, `b s d -> b s d`."""
    layer = jax.tree.map(lambda w: w.astype(x.dtype), layer)
    x = x + attention(normalize(x, layer["attention_norm"]), layer, config)
    return x + mlp(normalize(x, layer["mlp_norm"]), layer)


def through(
    x: jax.Array, layers: PyTree, one: Callable[[jax.Array, PyTree], jax.Array], config: Config
) -> jax.Array:
    """What all layers make of `x`, `b s d -> b s d`; `one` is a layer."""
    # Inside a scan XLA cannot merge the second computation with the first: nothing has to prevent it.
    one = jax.checkpoint(one, prevent_cse=not config.scan) if config.remat else one
    if config.scan:
        return jax.lax.scan(lambda x, layer: (one(x, layer), None), x, layers)[0]
    for index, layer in enumerate(layers):
        with jax.named_scope(f"layer{index}"):
            x = one(x, layer)
    return x


def logits(params: PyTree, tokens: jax.Array, config: Config) -> jax.Array:
    """The logits of the next token at every position, `b s -> b s v`."""
    x = params["embedding"][tokens].astype(config.compute_dtype)
    x = through(x, params["layers"], partial(block, config=config), config)
    return _exact(normalize(x, params["norm"].astype(x.dtype)) @ params["head"].astype(x.dtype))


def loss(params: PyTree, tokens: jax.Array, key: jax.Array | None, config: Config) -> jax.Array:
    """The mean cross-entropy in nats of predicting `tokens[:, 1:]` from `tokens[:, :-1]`; no key is used."""
    log_probability = jax.nn.log_softmax(logits(params, tokens[:, :-1], config))
    return -jnp.take_along_axis(log_probability, tokens[:, 1:, None], axis=-1).mean()


def make_train_step(config: Config, optimizer: optax.GradientTransformation) -> train.Step:
    """One step of training on a batch of `sequence + 1` tokens per row."""
    return train.gradient_step(partial(loss, config=config), optimizer)


# What `python -m sbp plan` plans: the main job as it is without options.
OPTIMIZER = optax.adamw(3e-3, b2=0.99)
train_step = make_train_step(Config(), OPTIMIZER)


def microbatched_step(microbatches: int) -> train.Step:
    """The train step on so many parts of its batch: for `--search 64 --microbatches 8,16`."""
    return train.gradient_step(partial(loss, config=Config()), OPTIMIZER, Pipeline(microbatches=microbatches))


def example_args() -> tuple[PyTree, ...]:
    """The shapes of the arguments: 32 rows of tokens."""
    tokens = jax.ShapeDtypeStruct((32, Config().sequence + 1), jnp.int32)
    return train.example(partial(init, config=Config()), OPTIMIZER, tokens)


def train_step_sbp(placement: Placement) -> PyTree:
    """Batch and widths of weights split along the first axis, heads along the others."""
    return signatures("fsdp" if placement.ndim > 1 else "zero", placement.shape, Config(), OPTIMIZER)


# ---------------------------------------------------------------------------------------------------------
# The main job


def parser() -> argparse.ArgumentParser:
    """The options of `python -m models.llama`."""
    options = train.parser(
        "models.llama",
        "Train a Llama on text, distributed; see every collective; compare with one device.",
        parallel=("fsdp", "2d", "data", "tensor", "zero", "auto"),
        steps=100,
        batch=32,
        lr=3e-3,
    )
    default, flag = Config(), argparse.BooleanOptionalAction
    options.add_argument("--text", metavar="FILE", help="a text of your own (default: CPython's help topics)")
    options.add_argument("--layers", type=int, default=default.layers, help="pairs of attention and MLP")
    options.add_argument("--width", type=int, default=default.width, help="of the residual stream")
    options.add_argument("--heads", type=int, default=default.heads, help="of queries, per layer")
    options.add_argument("--kv-heads", type=int, default=default.kv_heads, help="of keys and values")
    options.add_argument("--hidden", type=int, default=default.hidden, help="width inside the MLP")
    options.add_argument("--seq", type=int, default=default.sequence, help="tokens seen at once")
    options.add_argument("--scan", action=flag, default=default.scan, help="layers in one stack")
    options.add_argument("--remat", action=flag, default=default.remat, help="compute layers twice")
    options.add_argument("--fused", choices=("xla", "cudnn"), help="attention as one op of JAX")
    options.add_argument("--bf16", action="store_true", help="compute in bfloat16, weights in float32")
    return options


def main(argv: Sequence[str] | None = None) -> train.Result:
    """Runs the main job."""
    args = parser().parse_args(argv)
    placement = train.prepare(args)
    config = Config(
        layers=args.layers,
        width=args.width,
        heads=args.heads,
        kv_heads=args.kv_heads,
        hidden=args.hidden,
        sequence=args.seq,
        scan=args.scan,
        remat=args.remat,
        attention=args.fused,
        weight_dtype=jnp.float64 if args.x64 else jnp.float32,
        compute_dtype=jnp.bfloat16 if args.bf16 else jnp.float64 if args.x64 else jnp.float32,
    )
    optimizer, corpus = optax.adamw(args.lr, b2=0.99), text.read(args.text)
    tokens = text.Vocabulary.of(corpus, config.vocabulary).encode(corpus)
    return train.run(
        train.Job(
            title=f"Llama, {config.layers} layers of width {config.width}, on {len(tokens):,} characters",
            step=make_train_step(config, optimizer),
            init=partial(init, config=config),
            optimizer=optimizer,
            batch=lambda step: text.windows(tokens, args.batch, config.sequence + 1, (args.seed, step)),
            in_sbp=signatures(args.parallel, placement.shape, config, optimizer),
        ),
        placement,
        args,
    )


if __name__ == "__main__":
    main()
