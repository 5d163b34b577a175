"""Optimizers for tables that optax does not have; use them through `sbp.rows`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sbp.compat.untyped import PyTree
from sbp.lazy import Transformation


def rowwise_adagrad(learning_rate: float, initial: float = 0.1, epsilon: float = 1e-7) -> Transformation:
    """Adagrad with one accumulator per row, which adds the mean of the row's squared gradients.

    The state of a table "v d" has v numbers instead of v x d. Source: Gupta et al., "Training Recommender
    Systems at Scale", 2020.

    Arguments:
      learning_rate: the step of a row whose accumulator is 1.
      initial: the first value of the accumulators.
      epsilon: added to their square roots.

    >>> tx, table = rowwise_adagrad(1.0, initial=0.0), jnp.zeros((2, 4))
    >>> added, state = tx.update(jnp.ones((2, 4)), tx.init(table), table)
    >>> added.round(3)[0].tolist(), state.tolist()
    ([-1.0, -1.0, -1.0, -1.0], [1.0, 1.0])
    """

    def init(params: PyTree) -> PyTree:
        return jax.tree.map(lambda p: jnp.full(p.shape[:1], initial, p.dtype), params)

    def step(grad: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = total + jnp.square(grad).mean(axis=tuple(range(1, grad.ndim)))
        scale = -learning_rate / (jnp.sqrt(total) + epsilon)
        return grad * scale.reshape(scale.shape + (1,) * (grad.ndim - 1)), total

    def update(grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        return _split(jax.tree.map(step, grads, state), grads)

    return Transformation(init, update)


class RowwiseAdamState(NamedTuple):
    """Row-wise Adam's state: steps so far, a first moment per weight, a second one per row."""

    steps: jax.Array
    mu: PyTree
    nu: PyTree


def rowwise_adam(
    learning_rate: float, b1: float = 0.9, b2: float = 0.999, epsilon: float = 1e-8
) -> Transformation:
    """Adam with one second moment per row, that of the mean of the row's squared gradients.

    The state of a table "v d" has v x d + v numbers instead of 2 x v x d. It is what FBGEMM calls partial
    row-wise Adam, without weight decay: https://github.com/pytorch/FBGEMM, `OptimType`.

    Arguments:
      learning_rate: of a step.
      b1, b2: decay of the moments.
      epsilon: added to the root of the second moment, which is corrected for its start from zero.

    >>> tx, table = rowwise_adam(1.0), jnp.zeros((2, 4))
    >>> added, state = tx.update(jnp.ones((2, 4)), tx.init(table), table)
    >>> added.round(3)[0].tolist(), state.nu.shape
    ([-1.0, -1.0, -1.0, -1.0], (2,))
    """

    def init(params: PyTree) -> RowwiseAdamState:
        nu = jax.tree.map(lambda p: jnp.zeros(p.shape[:1], p.dtype), params)
        return RowwiseAdamState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), nu)

    def update(grads: PyTree, state: RowwiseAdamState, params: PyTree = None) -> tuple[PyTree, PyTree]:
        steps = state.steps + 1

        def step(grad: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            mu = b1 * mu + (1 - b1) * grad
            nu = b2 * nu + (1 - b2) * jnp.square(grad).mean(axis=tuple(range(1, grad.ndim)))
            root = jnp.sqrt(nu / (1 - b2 ** steps.astype(nu.dtype))) + epsilon
            first = mu / (1 - b1 ** steps.astype(mu.dtype))
            return -learning_rate * first / root.reshape(root.shape + (1,) * (grad.ndim - 1)), (mu, nu)

        added, after = _split(jax.tree.map(step, grads, state.mu, state.nu), grads)
        mu, nu = (jax.tree.map(lambda _, s, i=i: s[i], grads, after) for i in (0, 1))
        return added, RowwiseAdamState(steps, mu, nu)

    return Transformation(init, update)


class FtrlState(NamedTuple):
    """FTRL's two numbers per weight: the sum of squared gradients, and the sum that gives the weight."""

    squares: PyTree
    linear: PyTree


def ftrl(
    learning_rate: float, l1: float = 0.0, l2: float = 0.0, beta: float = 1.0, initial: float = 0.1
) -> Transformation:
    """FTRL-Proximal, per coordinate: weights with little evidence are exactly zero.

    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013, algorithm 1.

    Arguments:
      learning_rate, beta: the step of a coordinate is `learning_rate / (beta + root of its squares)`.
      l1, l2: penalties.
      initial: the first value of the sums of squares.

    >>> tx, table = ftrl(1.0, l1=10.0), jnp.ones((1, 1))
    >>> added, _ = tx.update(jnp.ones((1, 1)), tx.init(table), table)
    >>> (table + added).tolist()
    [[0.0]]
    """

    def init(params: PyTree) -> FtrlState:
        squares = jax.tree.map(lambda p: jnp.full(p.shape, initial, p.dtype), params)
        return FtrlState(squares, jax.tree.map(jnp.zeros_like, params))

    def step(
        grad: jax.Array, squares: jax.Array, linear: jax.Array, param: jax.Array
    ) -> tuple[jax.Array, FtrlState]:
        after = squares + jnp.square(grad)
        linear = linear + grad - (jnp.sqrt(after) - jnp.sqrt(squares)) / learning_rate * param
        rate = (beta + jnp.sqrt(after)) / learning_rate + l2
        param_after = jnp.where(jnp.abs(linear) <= l1, 0, (jnp.sign(linear) * l1 - linear) / rate)
        return param_after - param, FtrlState(after, linear)

    def update(grads: PyTree, state: FtrlState, params: PyTree = None) -> tuple[PyTree, FtrlState]:
        if params is None:
            raise ValueError("ftrl: update(grads, state, params) needs the parameters")
        done = jax.tree.map(step, grads, state.squares, state.linear, params)
        added, after = _split(done, grads)
        squares, linear = (jax.tree.map(lambda _, s, i=i: s[i], grads, after) for i in (0, 1))
        return added, FtrlState(squares, linear)

    return Transformation(init, update)


def _split(done: PyTree, like: PyTree) -> tuple[PyTree, PyTree]:
    """A tree of pairs as two trees."""
    first = jax.tree.map(lambda _, pair: pair[0], like, done)
    return first, jax.tree.map(lambda _, pair: pair[1], like, done)
