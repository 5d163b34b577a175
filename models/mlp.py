"""An MLP that reads handwritten digits: the smallest model, and its table of signatures.

    python -m models.mlp --parallel tensor
    python -m sbp plan models/mlp.py:train_step --placement h100:2x4

Its digits are those of scikit-learn where that is installed, else a synthetic set of the same shape.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from models import parallel, train
from sbp import B, S
from sbp.placement import Placement

PyTree: TypeAlias = Any

PIXELS, DIGITS = 64, 10

# Where the weights are split under tensor parallelism: up by columns, down by rows, in pairs.
UP = {"weight": S(1), "bias": S(0)}
DOWN = {"weight": S(0), "bias": B}


def table(layers: int) -> PyTree:
    """The signature of each parameter along a tensor-parallel axis; a last odd layer is held whole."""
    pairs = [(UP, DOWN)[index % 2] for index in range(layers)]
    return pairs if layers % 2 == 0 else [*pairs[:-1], B]


def init(key: jax.Array, width: int, layers: int) -> PyTree:
    """`layers` linear maps with `width` units between them (He et al., 2015)."""
    sizes = [PIXELS, *[width] * (layers - 1), DIGITS]
    return [
        {"weight": jax.random.normal(k, (n, m)) * (2 / n) ** 0.5, "bias": jnp.zeros(m)}
        for k, (n, m) in zip(jax.random.split(key, layers), pairwise(sizes), strict=True)
    ]


def logits(params: PyTree, images: jax.Array) -> jax.Array:
    """The scores of the ten digits, `batch pixels -> batch digits`."""
    x = images
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return x @ params[-1]["weight"] + params[-1]["bias"]


def loss(params: PyTree, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The mean cross-entropy in nats."""
    images, labels = batch
    log_probability = jax.nn.log_softmax(logits(params, images))
    return -jnp.take_along_axis(log_probability, labels[:, None], axis=-1).mean()


def make_train_step(optimizer: optax.GradientTransformation) -> train.Step:
    """One step of training on a batch of images and labels; the key is not used."""
    return train.gradient_step(lambda params, batch, key: loss(params, batch), optimizer)


# What `python -m sbp plan` plans: the job as it is without options.
BEGIN, OPTIMIZER = partial(init, width=128, layers=4), optax.adam(3e-3)
train_step = make_train_step(OPTIMIZER)


def train_step_args() -> tuple[PyTree, ...]:
    """The shapes of the arguments: 64 images."""
    images = jax.ShapeDtypeStruct((64, PIXELS), jnp.float32)
    return train.example(BEGIN, OPTIMIZER, (images, jax.ShapeDtypeStruct((64,), jnp.int32)))


def train_step_sbp(placement: Placement) -> PyTree:
    """Data parallel along the first axis, and tensor parallel along the others."""
    choice, params = "2d" if placement.ndim > 1 else "data", train_step_args()[0]
    return parallel.signatures(choice, placement.shape, table(len(params)), params, OPTIMIZER)


@dataclass(frozen=True, slots=True)
class Digits:
    """Images of 8 x 8 pixels between 0 and 1, as rows, with their labels."""

    name: str
    images: NDArray[np.float32]
    labels: NDArray[np.int32]

    def batch(self, size: int, seed: tuple[int, ...]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """A random batch; equal seeds give equal batches."""
        rows = np.random.default_rng(seed).integers(0, len(self.labels), size=size)
        return self.images[rows], self.labels[rows]


def digits() -> Digits:
    """scikit-learn's 1,797 digits, or a synthetic set if it is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        return synthetic_digits()
    data = load_digits()
    return Digits("scikit-learn's digits", (data.data / 16).astype(np.float32), data.target.astype(np.int32))


def synthetic_digits(count: int = 1797, seed: int = 0) -> Digits:
    """Ten random prototypes with noise: the shape of the digits, not digits."""
    random = np.random.default_rng(seed)
    prototypes = random.uniform(size=(DIGITS, PIXELS))
    labels = random.integers(0, DIGITS, size=count)
    images = (prototypes[labels] + random.normal(scale=0.3, size=(count, PIXELS))).clip(0, 1)
    return Digits("synthetic digits", images.astype(np.float32), labels.astype(np.int32))


def parser() -> argparse.ArgumentParser:
    """The options of `python -m models.mlp`."""
    options = train.parser(
        "models.mlp",
        "Train an MLP on digits, distributed.",
        parallel=("2d", "data", "tensor", "zero", "auto"),
        steps=100,
        batch=64,
        lr=3e-3,
    )
    options.add_argument("--layers", type=int, default=4, help="linear maps")
    options.add_argument("--width", type=int, default=128, help="units between them")
    return options


def main(argv: Sequence[str] | None = None) -> train.Result:
    """Trains the MLP."""
    args = parser().parse_args(argv)
    placement = train.prepare(args)
    optimizer, data = optax.adam(args.lr), digits()
    begin = partial(init, width=args.width, layers=args.layers)
    params = jax.eval_shape(begin, jax.random.key(0))
    return train.run(
        train.Job(
            title=f"MLP of {args.layers} layers, on {data.name} ({len(data.labels):,} images)",
            step=make_train_step(optimizer),
            init=begin,
            optimizer=optimizer,
            batch=lambda step: data.batch(args.batch, (args.seed, step)),
            in_sbp=parallel.signatures(args.parallel, placement.shape, table(args.layers), params, optimizer),
        ),
        placement,
        args,
    )


if __name__ == "__main__":
    main()
