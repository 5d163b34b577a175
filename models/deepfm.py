"""DeepFM: a factorization machine and a net that share their vectors; their scores are added.

    python -m models.deepfm --placement cpu:8 --table rows
    python -m sbp plan models/deepfm.py:train_step --placement h100:8

The first number of a row is the weight of its key, the others are its factors: one lookup gets both.

Source: Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", 2017.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from models.recommender import training
from models.recommender.layers import Inputs, net, score, side_by_side, through

PyTree: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class DeepFM:
    """The shape of the net.

    Arguments:
      deep: widths of the hidden layers over the dense features and all factors.
    """

    deep: tuple[int, ...] = (128, 64)

    def init(self, key: jax.Array, inputs: Inputs) -> PyTree:
        """What is learned beside the tables.

        Raises:
          ValueError: if a row has no room for a weight and factors.
        """
        if inputs.width < 2:
            raise ValueError(f"rows of width {inputs.width}: a weight and one factor or more")
        keys = jax.random.split(key, 4)
        factors = inputs.width - 1
        deep = (inputs.dense + inputs.features * factors, *self.deep)
        return {
            "linear": net(keys[0], (inputs.dense, 1))[0],
            "factors": jax.random.normal(keys[1], (inputs.dense, factors)) * factors**-0.5,
            "deep": net(keys[2], deep),
            "score": net(keys[3], (deep[-1], 1))[0],
        }

    def forward(self, params: PyTree, dense: jax.Array, vectors: Mapping[str, jax.Array]) -> jax.Array:
        """The score of each example, `[batch]`.

        Arguments:
          params: as `init` gave them.
          dense: `[batch, dense features]`.
          vectors: of each feature, `[batch, width]`: a weight, then factors.
        """
        rows = jnp.stack(list(vectors.values()), axis=1)
        weights, factors = rows[:, :, 0], rows[:, :, 1:]
        # A dense feature has the factors of its row, times its value.
        numbers = dense[:, :, None] * params["factors"]
        machine = weights.sum(axis=1) + pairs(jnp.concatenate([numbers, factors], axis=1))
        named = {name: vector[:, 1:] for name, vector in vectors.items()}
        deep = through(params["deep"], side_by_side(dense, named))
        return score(params["linear"], dense) + machine + score(params["score"], deep)


def pairs(factors: jax.Array) -> jax.Array:
    """The sum of the dot products of all pairs, `batch features width -> batch`, in linear time (Rendle)."""
    square_of_sum, sum_of_squares = jnp.square(factors.sum(axis=1)), jnp.square(factors).sum(axis=1)
    return 0.5 * (square_of_sum - sum_of_squares).sum(axis=1)


# What `python -m sbp plan` plans: the job as it is without options.
train_step, train_step_args, train_step_sbp = training.example(DeepFM())


def main(argv: Sequence[str] | None = None) -> training.Result:
    """Trains a DeepFM."""
    return training.main("models.deepfm", DeepFM(), argv)


if __name__ == "__main__":
    main()
