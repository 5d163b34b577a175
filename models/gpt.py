"""A GPT in plain single-device JAX, and its table of signatures.

    python -m models.gpt --placement cpu:2x4 --parallel 2d

trains it on text, prints every collective of the distributed program, and compares it with one device.

    python -m models.gpt --stages 2 --microbatches 8 --schedule zb-h1 --placement cpu:2x2x2

does so in a pipeline of two stages, each of them data and tensor parallel. Without training, nor any device:

    python -m sbp plan models/gpt.py:train_step --placement h100:4x8
    python -m sbp plan models/gpt.py:pipeline_step --stages 2 --schedule zb-h1 --placement h100:2x8
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from models import parallel, text, train
from models.pipeline import WHOLE, Pipeline, add_options, pipeline_of
from sbp import B, S
from sbp.placement import Placement

PyTree: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Config:
    """The sizes of a GPT; `sequence` is the number of tokens it sees at once.

    Arguments:
      compute_dtype: dtype of all but the weights and the loss; None: that of the weights.
    """

    layers: int = 2
    width: int = 128
    heads: int = 8
    vocabulary: int = 96
    sequence: int = 32
    dropout: float = 0.05
    compute_dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"a width of {self.width} over {self.heads} heads: the heads must divide the width"
            )

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.width // self.heads


# ---------------------------------------------------------------------------------------------------------
# Where the weights are split under tensor parallelism. The model below does not know of it.

LAYER = {
    "attention_norm": B,
    "qkv": S(2),
    "out": S(0),
    "mlp_norm": B,
    "up": S(1),
    "up_bias": S(0),
    "down": S(0),
    "down_bias": B,
}


def table(config: Config) -> PyTree:
    """The signature of each parameter along a tensor-parallel axis, as a pytree prefix."""
    return {"embedding": S(0), "position": B, "layers": [LAYER] * config.layers, "norm": B}


def signatures(
    choice: str, placement_shape: Sequence[int], config: Config, optimizer: optax.GradientTransformation
) -> PyTree:
    """The `in_sbp` of the train step for a choice of parallelism (a key of `parallel.PARALLEL`)."""
    params = jax.eval_shape(partial(init, config=config), jax.random.key(0))
    return parallel.signatures(choice, placement_shape, table(config), params, optimizer)


# ---------------------------------------------------------------------------------------------------------
# The model


def init(key: jax.Array, config: Config) -> PyTree:
    """Random parameters: normal, of a variance that keeps that of the activations."""
    d, h, e = config.width, config.heads, config.head_width
    keys = iter(jax.random.split(key, 1 + 4 * config.layers))

    def normal(*shape: int, variance: float) -> jax.Array:
        return variance**0.5 * jax.random.normal(next(keys), shape)

    def norm() -> PyTree:
        return {"scale": jnp.ones(d), "bias": jnp.zeros(d)}

    def layer() -> PyTree:
        branches = 2 * config.layers
        return {
            "attention_norm": norm(),
            "qkv": normal(3, d, h, e, variance=1 / d),
            "out": normal(h, e, d, variance=1 / (d * branches)),
            "mlp_norm": norm(),
            "up": normal(d, 4 * d, variance=1 / d),
            "up_bias": jnp.zeros(4 * d),
            "down": normal(4 * d, d, variance=1 / (4 * d * branches)),
            "down_bias": jnp.zeros(d),
        }

    return {
        "embedding": normal(config.vocabulary, d, variance=1 / d),
        "position": (2 / d) ** 0.5 * waves(config.sequence, d),
        "layers": [layer() for _ in range(config.layers)],
        "norm": norm(),
    }


def waves(length: int, width: int) -> jax.Array:
    """Positions as sines and cosines of falling frequency (Vaswani et al., 2017): neighbours look alike."""
    dim = jnp.arange(width)
    angle = jnp.arange(length)[:, None] * 100.0 ** -(dim // 2 * 2 / width)
    return jnp.where(dim % 2 == 0, jnp.sin(angle), jnp.cos(angle))


def normalize(x: jax.Array, norm: PyTree) -> jax.Array:
    """Layer normalization over the last dim (Ba et al., 2016)."""
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * norm["scale"] + norm["bias"]


def drop(x: jax.Array, key: jax.Array | None, rate: float) -> jax.Array:
    """Dropout (Srivastava et al., 2014); without a key, or at rate 0, nothing is dropped."""
    if key is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def attention(x: jax.Array, layer: PyTree, key: jax.Array | None, config: Config) -> jax.Array:
    """Causal self-attention (Vaswani et al., 2017), `b s d -> b s d`."""
    qkv = jnp.einsum("bsd,tdhe->tbhse", x, layer["qkv"])
    queries, keys, values = qkv[0], qkv[1], qkv[2]
    scores = jnp.einsum("bhqe,bhke->bhqk", queries, keys) * config.head_width**-0.5
    position = jnp.arange(x.shape[1])
    seen = position[:, None] >= position[None, :]
    weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(scores.dtype).min), axis=-1)
    mixed = jnp.einsum("bhqk,bhke->bqhe", drop(weights, key, config.dropout), values)
    return jnp.einsum("bqhe,hed->bqd", mixed, layer["out"])


def mlp(x: jax.Array, layer: PyTree) -> jax.Array:
    """Two linear maps with a GELU between, `b s d -> b s d`."""
    return jax.nn.gelu(x @ layer["up"] + layer["up_bias"]) @ layer["down"] + layer["down_bias"]


def logits(
    params: PyTree, tokens: jax.Array, key: jax.Array | None, config: Config, pipeline: Pipeline = WHOLE
) -> jax.Array:
    """The logits of the next token at every position, `b s -> b s v`; without a key there is no dropout.

    Arguments:
      pipeline: its first stage also embeds, and its last one also scores.
    """
    keys = repeat(None) if key is None else iter(jax.random.split(key, 1 + 3 * config.layers))
    if config.compute_dtype is not None:
        params = jax.tree.map(lambda w: w.astype(config.compute_dtype), params)
    with pipeline.stage(0):
        x = params["embedding"][tokens] + params["position"][: tokens.shape[1]]
        x = drop(x, next(keys), config.dropout)
    for index, layer in enumerate(params["layers"]):
        with pipeline.block(index, config.layers), jax.named_scope(f"layer{index}"):
            mixed = attention(normalize(x, layer["attention_norm"]), layer, next(keys), config)
            x = x + drop(mixed, next(keys), config.dropout)
            x = x + drop(mlp(normalize(x, layer["mlp_norm"]), layer), next(keys), config.dropout)
    with pipeline.stage(-1):
        return normalize(x, params["norm"]) @ params["embedding"].T


def loss(
    params: PyTree, tokens: jax.Array, key: jax.Array | None, config: Config, pipeline: Pipeline = WHOLE
) -> jax.Array:
    """The mean cross-entropy in nats of predicting `tokens[:, 1:]` from `tokens[:, :-1]`."""
    scores = logits(params, tokens[:, :-1], key, config, pipeline)
    with pipeline.stage(-1):
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        log_probability = jax.nn.log_softmax(scores)
        return -jnp.take_along_axis(log_probability, tokens[:, 1:, None], axis=-1).mean()


def make_train_step(
    config: Config, optimizer: optax.GradientTransformation, pipeline: Pipeline = WHOLE
) -> train.Step:
    """One step of training on a batch of `sequence + 1` tokens per row."""
    return train.gradient_step(partial(loss, config=config, pipeline=pipeline), optimizer, pipeline)


# What `python -m sbp plan` plans: the main job as it is without options.
OPTIMIZER = optax.adamw(3e-3, b2=0.99)
train_step = make_train_step(Config(), OPTIMIZER)


def microbatched_step(microbatches: int) -> train.Step:
    """The train step on so many parts of its batch: for `--search 64 --microbatches 8,16`."""
    return make_train_step(Config(), OPTIMIZER, Pipeline(microbatches=microbatches))


pipeline_step = microbatched_step(8)  # for `--stages`


def example_args() -> tuple[PyTree, ...]:
    """The shapes of the arguments: 32 rows of tokens."""
    tokens = jax.ShapeDtypeStruct((32, Config().sequence + 1), jnp.int32)
    return train.example(partial(init, config=Config()), OPTIMIZER, tokens)


def train_step_sbp(placement: Placement) -> PyTree:
    """Data parallel along the first axis, and tensor parallel along the others."""
    return signatures("2d" if placement.ndim > 1 else "data", placement.shape, Config(), OPTIMIZER)


@partial(jax.jit, static_argnames=("config", "length"))
def sample(
    params: PyTree,
    prompt: jax.Array,
    key: jax.Array,
    *,
    config: Config,
    length: int,
    temperature: float = 1.0,
) -> jax.Array:
    """Writes `length` tokens that continue `prompt`; temperature 0 is greedy."""
    prompt = prompt[-config.sequence :]
    window = jnp.zeros(config.sequence, jnp.int32).at[: len(prompt)].set(prompt)

    def one(
        carry: tuple[jax.Array, jax.Array], key: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        window, used = carry
        scores = logits(params, window[None], None, config)[0, used - 1]
        drawn = jax.random.categorical(key, scores / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature > 0, drawn, scores.argmax()).astype(jnp.int32)
        full = used == config.sequence
        window = jnp.where(full, jnp.roll(window, -1), window)
        return (window.at[jnp.where(full, used - 1, used)].set(token), used + 1 - full), token

    start = (window, jnp.int32(len(prompt)))
    return jax.lax.scan(one, start, jax.random.split(key, length))[1]


# ---------------------------------------------------------------------------------------------------------
# The main job


def parser() -> argparse.ArgumentParser:
    """The options of `python -m models.gpt`."""
    options = train.parser(
        "models.gpt",
        "Train a GPT on text, distributed; see every collective; compare with one device.",
        parallel=("2d", "data", "tensor", "zero", "auto"),
        steps=300,
        batch=32,
        lr=3e-3,
    )
    default = Config()
    options.add_argument("--text", metavar="FILE", help="a text of your own (default: CPython's help topics)")
    options.add_argument("--layers", type=int, default=default.layers, help="pairs of attention and MLP")
    options.add_argument("--width", type=int, default=default.width, help="of the residual stream")
    options.add_argument("--heads", type=int, default=default.heads, help="of attention, per layer")
    options.add_argument("--seq", type=int, default=default.sequence, help="tokens seen at once")
    options.add_argument(
        "--vocab", type=int, default=default.vocabulary, help="ids; rarer characters share one"
    )
    options.add_argument("--dropout", type=float, default=default.dropout, help="rate; 0 is none")
    options.add_argument(
        "--sample", type=int, default=400, metavar="N", help="characters to write at the end"
    )
    options.add_argument("--temperature", type=float, default=0.7, help="of the sampled text; 0 is greedy")
    add_options(options)
    return options


def main(argv: Sequence[str] | None = None) -> train.Result:
    """Runs the main job."""
    args = parser().parse_args(argv)
    pipeline, placement, options = pipeline_of(args, train.prepare(args))
    config = Config(args.layers, args.width, args.heads, args.vocab, args.seq, args.dropout)
    optimizer = optax.adamw(args.lr, b2=0.99)
    corpus = text.read(args.text)
    vocabulary = text.Vocabulary.of(corpus, config.vocabulary)
    tokens = vocabulary.encode(corpus)

    result = train.run(
        train.Job(
            title=f"GPT, {config}, on {len(tokens):,} characters of {args.text or 'pydoc_data.topics'}",
            step=make_train_step(config, optimizer, pipeline),
            init=lambda key: init(key, config),
            optimizer=optimizer,
            batch=lambda step: text.windows(tokens, args.batch, config.sequence + 1, (args.seed, step)),
            in_sbp=signatures(args.parallel, pipeline.stage_shape(placement), config, optimizer),
            options=options,
        ),
        placement,
        args,
    )
    if args.sample:
        prompt = vocabulary.encode("The ")
        key = jax.random.key(args.seed)
        written = sample(
            result.params, prompt, key, config=config, length=args.sample, temperature=args.temperature
        )
        print(f"\nsampled text\n{'-' * 12}\nThe {vocabulary.decode(np.asarray(written))}")
    return result


if __name__ == "__main__":
    main()
