"""DCN V2: layers that multiply the features with mixtures of themselves, and a net after them.

    python -m models.dcn --placement cpu:8 --table rows
    python -m sbp plan models/dcn.py:train_step --placement h100:8

Source: Wang et al., "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to
Rank Systems", 2021; the stacked structure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from models.recommender import training
from models.recommender.layers import Inputs, net, score, side_by_side, through

PyTree: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class DCN:
    """The shape of the net.

    Arguments:
      crosses: how many cross layers; n of them make products of up to n + 1 features.
      rank: of the matrix of each, which is the product of two thin ones; None for a full one.
      deep: widths of the hidden layers after them.
    """

    crosses: int = 2
    rank: int | None = 64
    deep: tuple[int, ...] = (128, 64)

    def init(self, key: jax.Array, inputs: Inputs) -> PyTree:
        """What is learned beside the tables."""
        crosses, deep, last = jax.random.split(key, 3)
        width = inputs.joint_width
        return {
            "crosses": [self._cross(k, width) for k in jax.random.split(crosses, self.crosses)],
            "deep": net(deep, (width, *self.deep)),
            "score": net(last, ((width, *self.deep)[-1], 1))[0],
        }

    def _cross(self, key: jax.Array, width: int) -> PyTree:
        sizes = (width, width) if self.rank is None else (width, self.rank, width)
        keys = jax.random.split(key, len(sizes) - 1)
        shapes = zip(keys, pairwise(sizes), strict=True)
        weights = [jax.random.normal(k, (n, m)) * n**-0.5 for k, (n, m) in shapes]
        return {"weights": weights, "bias": jnp.zeros(width)}

    def forward(self, params: PyTree, dense: jax.Array, vectors: Mapping[str, jax.Array]) -> jax.Array:
        """The score of each example, `[batch]`.

        Arguments:
          params: as `init` gave them.
          dense: `[batch, dense features]`.
          vectors: of each feature, `[batch, width]`.
        """
        x = first = side_by_side(dense, vectors)
        for layer in params["crosses"]:
            x = cross(layer, first, x)
        return score(params["score"], through(params["deep"], x))


def cross(layer: PyTree, first: jax.Array, x: jax.Array) -> jax.Array:
    """`first * (W x + b) + x`, all `[batch, width]`: products of the first features and mixtures of `x`."""
    mixed = x
    for weight in layer["weights"]:
        mixed = mixed @ weight
    return first * (mixed + layer["bias"]) + x


# What `python -m sbp plan` plans: the job as it is without options.
train_step, train_step_args, train_step_sbp = training.example(DCN())


def main(argv: Sequence[str] | None = None) -> training.Result:
    """Trains a DCN."""
    return training.main("models.dcn", DCN(), argv)


if __name__ == "__main__":
    main()
