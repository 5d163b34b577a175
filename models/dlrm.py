"""DLRM: dense features through a net, dot products of all pairs of vectors, and a net over them.

    python -m models.dlrm --placement cpu:8 --table rows
    python -m sbp plan models/dlrm.py:train_step --placement h100:8

Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
2019.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from models.recommender import training
from models.recommender.layers import Inputs, net, score, through

PyTree: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class DLRM:
    """The shape of the net.

    Arguments:
      bottom: widths of the hidden layers over the dense features; a last one as wide as a vector follows.
      top: widths of the hidden layers over the dot products.
    """

    bottom: tuple[int, ...] = (128, 64)
    top: tuple[int, ...] = (128, 64)

    def init(self, key: jax.Array, inputs: Inputs) -> PyTree:
        """What is learned beside the tables."""
        keys = jax.random.split(key, 3)
        vectors = inputs.features + 1
        top = (inputs.width + vectors * (vectors - 1) // 2, *self.top)
        return {
            "bottom": net(keys[0], (inputs.dense, *self.bottom, inputs.width)),
            "top": net(keys[1], top),
            "score": net(keys[2], (top[-1], 1))[0],
        }

    def forward(self, params: PyTree, dense: jax.Array, vectors: Mapping[str, jax.Array]) -> jax.Array:
        """The score of each example, `[batch]`.

        Arguments:
          params: as `init` gave them.
          dense: `[batch, dense features]`.
          vectors: of each feature, `[batch, width]`.
        """
        bottom = through(params["bottom"], dense)
        pairs = dot_products(jnp.stack([bottom, *vectors.values()], axis=1))
        return score(params["score"], through(params["top"], jnp.concatenate([bottom, pairs], axis=1)))


def dot_products(vectors: jax.Array) -> jax.Array:
    """The products of all pairs of different vectors, `batch vectors width -> batch pairs`."""
    count = vectors.shape[1]
    products = jnp.einsum("bid,bjd->bij", vectors, vectors).reshape(-1, count * count)
    row, column = np.tril_indices(count, -1)
    return products[:, (row * count + column).astype(np.int32)]


# What `python -m sbp plan` plans: the job as it is without options.
train_step, train_step_args, train_step_sbp = training.example(DLRM())


def main(argv: Sequence[str] | None = None) -> training.Result:
    """Trains a DLRM."""
    return training.main("models.dlrm", DLRM(), argv)


if __name__ == "__main__":
    main()
