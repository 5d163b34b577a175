"""What the recommender models share: a net of linear layers, and the features of a batch side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

PyTree: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a model sees of a batch.

    Arguments:
      dense: how many numbers.
      features: how many categorical features.
      width: of each feature's vector.
    """

    dense: int
    features: int
    width: int

    @property
    def joint_width(self) -> int:
        """The width of `side_by_side`."""
        return self.dense + self.features * self.width


def linear(key: jax.Array, inputs: int, outputs: int) -> PyTree:
    """One layer that keeps the variance of what is not negative (He et al., 2015)."""
    weight = jax.random.normal(key, (inputs, outputs)) * (2 / inputs) ** 0.5
    return {"weight": weight, "bias": jnp.zeros(outputs)}


def net(key: jax.Array, widths: Sequence[int]) -> PyTree:
    """Linear layers from the first width to the last; none for a single width."""
    keys = jax.random.split(key, max(len(widths) - 1, 1))
    return [linear(k, n, m) for k, (n, m) in zip(keys, pairwise(widths), strict=False)]


def through(layers: PyTree, x: jax.Array) -> jax.Array:
    """What hidden layers make of `x`, with a rectifier after each: `batch inputs -> batch outputs`."""
    for layer in layers:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return x


def score(layer: PyTree, x: jax.Array) -> jax.Array:
    """What the last layer makes of `x`: `batch inputs -> batch`."""
    return (x @ layer["weight"] + layer["bias"])[:, 0]


def side_by_side(dense: jax.Array, vectors: Mapping[str, jax.Array]) -> jax.Array:
    """Dense features and all vectors in one row for each example: `batch joined`."""
    return jnp.concatenate([dense, *vectors.values()], axis=1)
