"""A classifier of very many classes: the batch and the classes are split over the same devices.

    python -m models.classifier --classes 1000000
    python -m sbp plan models/classifier.py:train_step --placement h100:8

Each device scores its own classes for the whole batch, which is gathered before or after the small net,
wherever that is cheaper. The softmax over the split classes needs only maxima and sums of the size of the
batch: nothing of the size of the logits travels.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
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

# The net that makes features is small: every device has it. The head is split by class.
TABLE = {"hidden": B, "features": B, "head": S(0)}


def init(key: jax.Array, inputs: int, width: int, classes: int) -> PyTree:
    """A net of one hidden layer, and one row of `width` weights per class."""
    keys = jax.random.split(key, 3)

    def normal(key: jax.Array, *shape: int, fan_in: int) -> jax.Array:
        return jax.random.normal(key, shape) * fan_in**-0.5

    return {
        "hidden": normal(keys[0], inputs, 2 * width, fan_in=inputs),
        "features": normal(keys[1], 2 * width, width, fan_in=2 * width),
        "head": normal(keys[2], classes, width, fan_in=width),
    }


def features(params: PyTree, inputs: jax.Array) -> jax.Array:
    """What the head sees, `batch inputs -> batch width`."""
    return jax.nn.relu(inputs @ params["hidden"]) @ params["features"]


def loss(params: PyTree, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The mean softmax cross-entropy in nats over all classes."""
    inputs, labels = batch
    logits = features(params, inputs) @ params["head"].T
    log_probability = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probability, labels[:, None], axis=-1).mean()


def make_train_step(optimizer: optax.GradientTransformation) -> train.Step:
    """One step of training on a batch of inputs and labels; the key is not used."""
    return train.gradient_step(lambda params, batch, key: loss(params, batch), optimizer)


# What `python -m sbp plan` plans: 100,000 classes, as without options.
BEGIN, OPTIMIZER = partial(init, inputs=32, width=64, classes=100_000), optax.sgd(0.05, momentum=0.9)
train_step = make_train_step(OPTIMIZER)


def train_step_args() -> tuple[PyTree, ...]:
    """The shapes of the arguments: 64 examples."""
    inputs = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    return train.example(BEGIN, OPTIMIZER, (inputs, jax.ShapeDtypeStruct((64,), jnp.int32)))


def train_step_sbp(placement: Placement) -> PyTree:
    """Batch and classes are split over all devices."""
    return parallel.signatures("classes", placement.shape, TABLE, train_step_args()[0], OPTIMIZER)


@dataclass(frozen=True, slots=True)
class Identities:
    """Synthetic identities: as in life a few are frequent and most are rare (Zipf), each a point with noise.

    Arguments:
      classes: how many there are.
      inputs: the width of an example.
      exponent: of Zipf's law.
    """

    classes: int
    inputs: int
    exponent: float = 1.1
    seed: int = 0
    cumulative: NDArray[np.float64] = field(init=False, repr=False)
    shuffled_ids: NDArray[np.int32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        cumulative = np.cumsum(np.arange(1, self.classes + 1, dtype=np.float64) ** -self.exponent)
        # Frequent identities are spread over all ids, else the first device would have all the work.
        order = np.random.default_rng(self.seed).permutation(self.classes).astype(np.int32)
        object.__setattr__(self, "cumulative", cumulative / cumulative[-1])
        object.__setattr__(self, "shuffled_ids", order)

    def batch(self, size: int, seed: tuple[int, ...]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Inputs and labels; equal seeds give equal batches."""
        random = np.random.default_rng(seed)
        ranks = np.searchsorted(self.cumulative, random.uniform(size=size), side="right")
        labels = self.shuffled_ids[np.minimum(ranks, self.classes - 1)]
        centres = np.stack(
            [np.random.default_rng((self.seed, label)).normal(size=self.inputs) for label in labels]
        )
        inputs = centres + 0.3 * random.normal(size=centres.shape)
        return inputs.astype(np.float32), labels


def parser() -> argparse.ArgumentParser:
    """The options of `python -m models.classifier`."""
    options = train.parser(
        "models.classifier",
        "Train a classifier of very many classes, split by class.",
        parallel=("classes", "data", "zero", "auto"),
        placement="cpu:8",
        steps=20,
        batch=64,
        lr=0.05,
    )
    options.add_argument("--classes", type=int, default=100_000)
    options.add_argument("--width", type=int, default=64, help="features")
    options.add_argument("--inputs", type=int, default=32, help="width of an example")
    return options


def main(argv: Sequence[str] | None = None) -> train.Result:
    """Trains the classifier."""
    args = parser().parse_args(argv)
    placement = train.prepare(args)
    optimizer, data = optax.sgd(args.lr, momentum=0.9), Identities(args.classes, args.inputs, seed=args.seed)
    begin = partial(init, inputs=args.inputs, width=args.width, classes=args.classes)
    params = jax.eval_shape(begin, jax.random.key(0))
    return train.run(
        train.Job(
            title=f"classifier of {args.classes:,} synthetic identities",
            step=make_train_step(optimizer),
            init=begin,
            optimizer=optimizer,
            batch=lambda step: data.batch(args.batch, (args.seed, step)),
            in_sbp=parallel.signatures(args.parallel, placement.shape, TABLE, params, optimizer),
        ),
        placement,
        args,
    )


if __name__ == "__main__":
    main()
