"""Logistic regression on the features of a recommender: the baseline that a model has to beat.

A weight for each row of each table and each dense feature (Richardson et al., 2007, "Predicting clicks").
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models import train
from models.recommender.batch import Batch

PyTree: TypeAlias = Any


def init(sizes: Sequence[int], dense: int) -> PyTree:
    """Zeros: the weights of all tables in one array, and those of the dense features."""
    return {"rows": jnp.zeros(sum(sizes)), "dense": jnp.zeros(dense), "bias": jnp.zeros(())}


def logits(params: PyTree, batch: Batch, sizes: Sequence[int]) -> jax.Array:
    """The score of each row, `[b]`; `batch.keys` are rows of tables of these sizes."""
    begin = np.cumsum([0, *sizes[:-1]], dtype=np.int32)
    by_row = sum(_sums(params["rows"], x, first) for x, first in zip(_columns(batch), begin, strict=True))
    return by_row + batch.dense @ params["dense"] + params["bias"]


def _columns(batch: Batch) -> Any:
    return batch.keys if isinstance(batch.keys, tuple) else jnp.asarray(batch.keys).T[..., None]


def _sums(weights: jax.Array, rows: jax.Array, first: np.int32) -> jax.Array:
    """The sum of the weights of each bag; -1 is no row."""
    return jnp.where(rows >= 0, weights[rows + first], 0.0).sum(axis=1)


def loss(params: PyTree, batch: Batch, sizes: Sequence[int]) -> jax.Array:
    """The mean cross-entropy in nats."""
    return optax.sigmoid_binary_cross_entropy(logits(params, batch, sizes), batch.label).mean()


def fit(batches: Iterable[Batch], sizes: Sequence[int], dense: int, lr: float = 0.05) -> PyTree:
    """The weights after one pass of Adagrad (Duchi et al., 2011) over batches of one size.

    Arguments:
      batches: with rows as `keys` (`hash_keys`).
      sizes: the rows of each table.
      dense: the number of dense features.
      lr: the learning rate.
    """
    optimizer = optax.adagrad(lr, initial_accumulator_value=1e-8, eps=1e-10)
    step = jax.jit(train.gradient_step(lambda params, batch, key: loss(params, batch, sizes), optimizer))
    params, key = init(sizes, dense), jax.random.key(0)
    state = optimizer.init(params)
    for batch in batches:
        params, state, _ = step(params, state, batch, key)
    return params
