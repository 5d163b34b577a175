"""A recommender and its tables as one train step: dense weights and rows learn from one gradient."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import optax

import sbp
from models.recommender.batch import Batch
from models.recommender.layers import Inputs
from sbp import B, S
from sbp.placement import Placement
from sbp.runtime.embedding import (
    Choice,
    Collection,
    ColumnWise,
    FeatureConfig,
    Replicated,
    RowReset,
    RowWise,
    TableConfig,
    TableWise,
    choose,
    reset_rows,
)
from sbp.runtime.embedding.optimizers import ftrl, rowwise_adagrad, rowwise_adam
from sbp.runtime.embedding.tables import TableLayout

PyTree: TypeAlias = Any

ROUNDED = 256
"""Rows of a stack are rounded up to a multiple of this, so that the same stacks fit many placements."""

# What `--table` stands for, made of the number of devices; `AUTO` chooses one of them for each table.
LAYOUTS: Mapping[str, Callable[[int], TableLayout]] = {
    "rows": lambda devices: RowWise(),
    "whole": TableWise,
    "columns": lambda devices: ColumnWise(),
    "replicated": lambda devices: Replicated(),
}
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class TableOptimizer:
    """An optimizer of tables.

    Arguments:
      make: learning rate -> optimizer; it sees the gradient of a mean over the batch.
      lr: the learning rate unless another is given.
    """

    make: Callable[[float], Any]
    lr: float


# Gradients of rows are small, since few examples of a batch have a key: nothing is to drown them.
OPTIMIZERS: Mapping[str, TableOptimizer] = {
    "sgd": TableOptimizer(optax.sgd, 5.0),
    "momentum": TableOptimizer(partial(optax.sgd, momentum=0.9), 1.0),
    "adagrad": TableOptimizer(partial(optax.adagrad, initial_accumulator_value=1e-8, eps=1e-10), 0.05),
    "rowwise": TableOptimizer(partial(rowwise_adagrad, initial=1e-8), 0.05),
    "adam": TableOptimizer(optax.adam, 0.005),
    "rowwise-adam": TableOptimizer(rowwise_adam, 0.005),
    "ftrl": TableOptimizer(partial(ftrl, initial=1e-8, beta=1e-4), 0.05),
}


class Model(Protocol):
    """A recommender without its tables."""

    def init(self, key: jax.Array, inputs: Inputs) -> PyTree:
        """What is learned beside the tables."""

    def forward(self, params: PyTree, dense: jax.Array, vectors: Mapping[str, jax.Array]) -> jax.Array:
        """The score of each example, `[batch]`, of dense features and one vector for each other feature."""


def features(
    sizes: Sequence[int], width: int, layout: TableLayout, hotness: Sequence[int] = ()
) -> tuple[FeatureConfig, ...]:
    """Categorical features, each with a table of its own.

    Arguments:
      sizes: the rows of each.
      width: of a row.
      layout: how the tables are split.
      hotness: the most keys of each feature in an example; none where each has one key.
    """
    initial = jax.nn.initializers.normal(0.1 * width**-0.5)
    tables = [
        TableConfig(f"C{i}", size, width, initializer=initial, placement=layout)
        for i, size in enumerate(sizes, 1)
    ]
    shapes = [(None, most) for most in hotness] if hotness else [(None,) for _ in tables]
    return tuple(FeatureConfig(t.name, t, shape) for t, shape in zip(tables, shapes, strict=True))


def collection(
    sizes: Sequence[int], width: int, layout: TableLayout, devices: int, hotness: Sequence[int] = ()
) -> Collection:
    """The same as a collection over so many devices."""
    own = features(sizes, width, layout, hotness)
    return Collection(own, multiple=math.lcm(ROUNDED, devices))


def collection_of(
    sizes: Sequence[int], width: int, layout: str, devices: int, hotness: Sequence[int] = ()
) -> Collection:
    """The same with a layout by its name, one of `LAYOUTS`."""
    return collection(sizes, width, LAYOUTS[layout](devices), devices, hotness)


def choose_layouts(
    sizes: Sequence[int],
    width: int,
    batch: int,
    placement: Placement,
    optimizer: Any,
    hotness: Sequence[int] = (),
) -> Choice:
    """The cheapest layout of each table.

    Arguments:
      sizes, width, hotness: as of `collection`.
      batch: clicks per step.
      optimizer: of the tables.
    """
    own = features(sizes, width, RowWise(), hotness)
    return choose(own, batch, placement, optimizer=sbp.rows(optimizer))


def _by_rows(stack: jax.Array) -> jax.Array:
    """A stack as one row after the other: a row is what an optimizer treats by itself."""
    return stack if stack.ndim == 2 else stack.reshape(-1, stack.shape[-1])


@dataclass(frozen=True)
class Learner:
    """A model, its tables, and how both learn; its functions are for a single device.

    Arguments:
      model: what scores.
      inputs: what it sees.
      tables: where the vectors of its features come from.
      table_optimizer: of the tables; made lazy here.
      optimizer: of all other parameters.
    """

    model: Model
    inputs: Inputs
    tables: Collection
    table_optimizer: Any
    optimizer: optax.GradientTransformation

    def init(self, key: jax.Array) -> PyTree:
        """The parameters: `{"tables": {stack: array}, "dense": of the model}`."""
        tables, dense = jax.random.split(key)
        return {"tables": self.tables.init(tables), "dense": self.model.init(dense, self.inputs)}

    def init_state(self, params: PyTree) -> PyTree:
        """The state of both optimizers."""
        rows = jax.tree.map(_by_rows, params["tables"])
        return {
            "tables": sbp.rows(self.table_optimizer).init(rows),
            "dense": self.optimizer.init(params["dense"]),
        }

    def start(
        self,
        key: jax.Array,
        placement: Placement,
        rows: Callable[[jax.Array], Mapping[str, jax.Array]] | None = None,
    ) -> tuple[PyTree, PyTree]:
        """The same parameters and state on devices, each of which makes its own rows of the tables.

        Arguments:
          rows: makes the tables of their key, where they are not made as a whole.
        """
        tables, dense = jax.random.split(key)
        made = jax.jit(self.model.init, static_argnums=1)(dense, self.inputs)
        own = self.tables.init(tables, placement) if rows is None else rows(tables)
        params = {"tables": own, "dense": made}
        state = jax.eval_shape(self.init_state, params)
        shardings = self.tables.shardings(placement, like=state)
        return params, jax.jit(self.init_state, out_shardings=shardings)(params)

    def scores(self, params: PyTree, batch: Batch) -> jax.Array:
        """The score of each example, `[batch]`; labels are not looked at, keys are rows of tables."""
        keys, dense = batch.keys, jnp.asarray(batch.dense)
        columns: Any = keys if isinstance(keys, tuple) else jnp.asarray(keys).T
        ids = {f.name: x for f, x in zip(self.tables.features, columns, strict=True)}
        return self.model.forward(params["dense"], dense, self.tables(params["tables"], ids))

    def loss(self, params: PyTree, batch: Batch) -> jax.Array:
        """The mean cross-entropy in nats."""
        return optax.sigmoid_binary_cross_entropy(self.scores(params, batch), batch.label).mean()

    def step(self, params: PyTree, state: PyTree, batch: Batch) -> tuple[PyTree, PyTree, jax.Array]:
        """One step of training: parameters, state and loss."""
        loss, grads = jax.value_and_grad(self.loss)(params, batch)
        dense, dense_state = self.optimizer.update(grads["dense"], state["dense"], params["dense"])
        rows, slopes = (jax.tree.map(_by_rows, tree["tables"]) for tree in (params, grads))
        added, table_state = sbp.rows(self.table_optimizer).update(slopes, state["tables"], rows)
        tables = jax.tree.map(
            lambda stack, new: new.reshape(stack.shape), params["tables"], optax.apply_updates(rows, added)
        )
        params = {"tables": tables, "dense": optax.apply_updates(params["dense"], dense)}
        return params, {"tables": table_state, "dense": dense_state}, loss

    def reset_step(
        self, params: PyTree, state: PyTree, batch: Batch, change: RowReset
    ) -> tuple[PyTree, PyTree, jax.Array]:
        """`step`, before which rows of new keys begin anew."""
        key, by_row = jax.random.key(0), sbp.rows(self.table_optimizer)
        tables, kept = reset_rows(self.tables, params["tables"], state["tables"], by_row, change, key)
        return self.step({**params, "tables": tables}, {**state, "tables": kept}, batch)

    def in_sbp(self, placement: Placement) -> tuple[PyTree, PyTree, PyTree]:
        """The signatures of the arguments of `step`: batch and tables are split over all axes."""
        batch = [S(0)] * placement.ndim
        whole = [B] * placement.ndim
        params = jax.eval_shape(self.init, jax.random.key(0))
        state = jax.eval_shape(self.init_state, params)["tables"]
        lies = [self.tables.in_sbp(placement, like=tree) for tree in (params["tables"], state)]
        return {"tables": lies[0], "dense": whole}, {"tables": lies[1], "dense": whole}, batch
