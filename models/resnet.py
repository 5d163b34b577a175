"""A residual network that reads digits: split by batch, by the rows of the images, or into stages.

    python -m models.resnet --depth 18 --size 32 --parallel data
    python -m models.resnet --stages 4 --microbatches 8 --schedule 1f1b --placement cpu:4x2
    python -m sbp plan models/resnet.py:train_step --placement h100:8
    python -m sbp plan models/resnet.py:pipeline_step --stages 4 --schedule 1f1b --placement h100:4x2

Batch normalisation takes its mean and variance over the whole batch, however that is split: what the devices
add up is one line per channel. In a pipeline that is the whole micro-batch, and the averages of training move
by the mean of all micro-batches. Split by rows, each convolution fetches the rows around its own from the
neighbours, and nothing else travels but gradients.

Few numbers under a mean and a variance (small micro-batches of small images) make training so sensitive to
rounding that two devices drift apart within steps: compare such runs with `--x64`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from numpy.typing import NDArray

from models import mlp, parallel, train
from models.pipeline import WHOLE, Pipeline, add_options, pipeline_of
from sbp import B, S
from sbp.placement import Placement
from sbp.signature import Signature

PyTree: TypeAlias = Any

EPSILON, MOMENTUM = 1e-5, 0.9
# How a batch of images, "b h w c", lies along a placement axis, and its labels, "b".
BATCH: dict[str, tuple[Signature, Signature]] = {"data": (S(0), S(0)), "spatial": (S(1), B)}


@dataclass(frozen=True, slots=True)
class Config:
    """The shape of the net (He et al., 2016).

    Arguments:
      blocks: residual blocks in each of the four groups of equal images.
      bottleneck: whether a block narrows its input before the 3 x 3 convolution and widens it after.
      width: channels of the first group; every group doubles them and halves the image.
      classes: what is told apart.
    """

    blocks: tuple[int, ...] = (2, 2, 2, 2)
    bottleneck: bool = False
    width: int = 64
    classes: int = 10


DEPTHS = {18: Config((2, 2, 2, 2)), 34: Config((3, 4, 6, 3)), 50: Config((3, 4, 6, 3), bottleneck=True)}


def _kernels(config: Config, channels: int, out: int, first: bool) -> dict[str, tuple[int, ...]]:
    """The kernels of one block, by name: rows, columns, channels in and out."""
    wide = 4 * out if config.bottleneck else out
    shapes: dict[str, tuple[int, ...]]
    if config.bottleneck:
        shapes = {"a": (1, 1, channels, out), "b": (3, 3, out, out), "c": (1, 1, out, wide)}
    else:
        shapes = {"a": (3, 3, channels, out), "b": (3, 3, out, out)}
    return {**shapes, "skip": (1, 1, channels, wide)} if first and channels != wide else shapes


def init(key: jax.Array, config: Config) -> PyTree:
    """Kernels for channels-last images of three channels, and what normalises after each."""
    count = 0

    def layer(shape: tuple[int, ...]) -> PyTree:
        nonlocal count
        count += 1
        scale = (2 / np.prod(shape[:-1])) ** 0.5
        kernel = jax.random.normal(jax.random.fold_in(key, count), shape) * scale
        norm = {"scale": jnp.ones(shape[-1]), "bias": jnp.zeros(shape[-1])}
        return {"kernel": kernel, **norm, "mean": jnp.zeros(shape[-1]), "variance": jnp.ones(shape[-1])}

    params: dict[str, Any] = {"stem": layer((7, 7, 3, config.width)), "groups": []}
    channels = config.width
    for group, blocks in enumerate(config.blocks):
        out = config.width * 2**group
        made = []
        for block in range(blocks):
            kernels = _kernels(config, channels, out, block == 0)
            made.append({name: layer(shape) for name, shape in kernels.items()})
            channels = 4 * out if config.bottleneck else out
        params["groups"].append(made)
    scale = channels**-0.5
    params["head"] = {
        "weight": jax.random.normal(jax.random.fold_in(key, 0), (channels, config.classes)) * scale,
        "bias": jnp.zeros(config.classes),
    }
    return params


@dataclass(frozen=True)
class _Pass:
    """One pass through the net: with the statistics of the batch, or with the averages of training.

    Arguments:
      pipeline: its stages have equally many blocks; the first one also the stem, and the last one the head.
    """

    training: bool
    pipeline: Pipeline = WHOLE

    def conv(self, layer: PyTree, x: jax.Array, stride: int = 1) -> tuple[jax.Array, PyTree]:
        """A convolution and its normalisation (Ioffe and Szegedy, 2015), and its new averages."""
        dims = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, layer["kernel"], (stride, stride), "SAME", dimension_numbers=dims)
        mean, variance = layer["mean"], layer["variance"]
        averages = {"mean": mean, "variance": variance}
        if self.training:
            mean = x.mean((0, 1, 2))
            variance = jnp.square(x - mean).mean((0, 1, 2))
            averages = {"mean": _moved(layer["mean"], mean), "variance": _moved(layer["variance"], variance)}
        x = (x - mean) * lax.rsqrt(variance + EPSILON) * layer["scale"] + layer["bias"]
        return x, averages

    def block(self, layers: PyTree, x: jax.Array, stride: int) -> tuple[jax.Array, PyTree]:
        """The convolutions of one block, and its input added to what they give."""
        new, y = {}, x
        names = [name for name in ("a", "b", "c") if name in layers]
        for name in names:
            # The 3 x 3 convolution strides: the first one of a plain block, the second of a bottleneck.
            strided = name == ("b" if len(names) == 3 else "a")
            y, new[name] = self.conv(layers[name], y, stride if strided else 1)
            y = jax.nn.relu(y) if name != names[-1] else y
        if "skip" in layers:
            x, new["skip"] = self.conv(layers["skip"], x, stride)
        return jax.nn.relu(x + y), new

    def net(self, params: PyTree, images: jax.Array) -> tuple[jax.Array, PyTree]:
        """The scores of the classes, "b classes", and the new averages of all layers."""
        blocks = [
            (g, i, layers) for g, group in enumerate(params["groups"]) for i, layers in enumerate(group)
        ]
        with self.pipeline.stage(0):
            x, stem = self.conv(params["stem"], images.astype(params["stem"]["kernel"].dtype), 2)
            x = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        groups: list[list[PyTree]] = [[] for _ in params["groups"]]
        for at, (group, index, layers) in enumerate(blocks):
            with self.pipeline.block(at, len(blocks)):
                x, averages = self.block(layers, x, 2 if group and not index else 1)
            groups[group].append(averages)
        head = params["head"]
        with self.pipeline.stage(-1):
            scores = x.mean((1, 2)) @ head["weight"] + head["bias"]
        return scores, {"stem": stem, "groups": groups}


def _moved(average: jax.Array, new: jax.Array) -> jax.Array:
    """An average a little nearer to what the batch has; it is not learned."""
    return lax.stop_gradient(MOMENTUM * average + (1 - MOMENTUM) * new)


def logits(params: PyTree, images: jax.Array) -> jax.Array:
    """The scores of the classes with the averages of training, "b h w c" -> "b classes"."""
    return _Pass(training=False).net(params, images)[0]


def loss(
    params: PyTree, batch: tuple[jax.Array, jax.Array], pipeline: Pipeline = WHOLE
) -> tuple[jax.Array, PyTree]:
    """The mean cross-entropy in nats, and the new averages."""
    images, labels = batch
    scores, averages = _Pass(True, pipeline).net(params, images)
    with pipeline.stage(-1):
        log_probability = jax.nn.log_softmax(scores)
        return -jnp.take_along_axis(log_probability, labels[:, None], axis=-1).mean(), averages


def make_train_step(optimizer: optax.GradientTransformation, pipeline: Pipeline = WHOLE) -> train.Step:
    """One step of training on a batch of images and labels; the key is not used."""
    gradients = pipeline.cut(jax.value_and_grad(partial(loss, pipeline=pipeline), has_aux=True), (1,))

    def step(params: PyTree, state: PyTree, batch: Any, key: jax.Array) -> tuple[PyTree, PyTree, jax.Array]:
        (value, averages), grads = gradients(params, batch)
        updates, state = optimizer.update(grads, state, params)
        # The averages have no gradient: what an optimizer adds to them is nothing.
        return optax.apply_updates(_with(params, averages), updates), state, value

    return step


def _with(params: PyTree, averages: PyTree) -> PyTree:
    """The parameters with other averages."""
    if isinstance(params, dict):
        return {k: _with(x, averages[k]) if k in averages else x for k, x in params.items()}
    if isinstance(params, list):
        return [_with(x, new) for x, new in zip(params, averages, strict=True)]
    return averages


def signatures(
    choice: str, shape: Sequence[int], config: Config, optimizer: optax.GradientTransformation
) -> PyTree:
    """The `in_sbp` of the train step: "data", "spatial", "zero" or "auto"."""
    params = jax.eval_shape(partial(init, config=config), jax.random.key(0))
    if choice not in BATCH:
        return parallel.signatures(choice, shape, B, params, optimizer)
    weights, state, _, key = parallel.signatures("data", shape, B, params, optimizer)
    images, labels = ([s] * len(shape) for s in BATCH[choice])
    return weights, state, (images, labels), key


# What `python -m sbp plan` plans: the job as it is without options. The parts of `pipeline_step` are for
# `--stages`.
SMALL, OPTIMIZER = Config(width=16), optax.sgd(0.05, momentum=0.9)
train_step = make_train_step(OPTIMIZER)
pipeline_step = make_train_step(OPTIMIZER, Pipeline(microbatches=8))


def example_args() -> tuple[PyTree, ...]:
    """The shapes of the arguments: 64 images of 32 x 32 pixels."""
    images = jax.ShapeDtypeStruct((64, 32, 32, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((64,), jnp.int32)
    return train.example(partial(init, config=SMALL), OPTIMIZER, (images, labels))


def train_step_sbp(placement: Placement) -> PyTree:
    """Data parallel along all axes."""
    return signatures("data", placement.shape, SMALL, OPTIMIZER)


def enlarge(images: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Digits of 8 x 8 pixels as `size` x `size` images of three equal channels, "b pixels" -> "b h w c"."""
    square = images.reshape(-1, 8, 8)
    nearest = np.arange(size) * 8 // size
    return np.repeat(square[:, nearest][:, :, nearest][..., None], 3, axis=-1)


def parser() -> argparse.ArgumentParser:
    """The options of `python -m models.resnet`."""
    choices = ("data", "spatial", "zero", "auto")
    options = train.parser(
        "models.resnet",
        "Train a residual network on digits, distributed.",
        parallel=choices,
        placement="cpu:8",
        steps=20,
        batch=64,
        lr=0.05,
    )
    options.add_argument("--depth", type=int, choices=tuple(DEPTHS), default=18, help="layers with weights")
    options.add_argument("--width", type=int, default=16, help="channels of the first convolution")
    options.add_argument("--size", type=int, default=32, help="pixels of a side")
    add_options(options)
    return options


def main(argv: Sequence[str] | None = None) -> train.Result:
    """Trains the network."""
    args = parser().parse_args(argv)
    pipeline, placement, options = pipeline_of(args, train.prepare(args))
    shape = DEPTHS[args.depth]
    config = Config(shape.blocks, shape.bottleneck, args.width)
    optimizer, data = optax.sgd(args.lr, momentum=0.9), mlp.digits()

    def batch(step: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        images, labels = data.batch(args.batch, (args.seed, step))
        return enlarge(images, args.size), labels

    return train.run(
        train.Job(
            title=f"ResNet-{args.depth}, on {data.name} ({len(data.labels):,} images)",
            step=make_train_step(optimizer, pipeline),
            init=partial(init, config=config),
            optimizer=optimizer,
            batch=batch,
            in_sbp=signatures(args.parallel, pipeline.stage_shape(placement), config, optimizer),
            options=options,
        ),
        placement,
        args,
    )


if __name__ == "__main__":
    main()
