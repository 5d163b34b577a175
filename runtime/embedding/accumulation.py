"""Tables that take a step with the mean gradient of several batches: ids and gradients are held, no sums."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp.compat.untyped import PyTree
from sbp.errors import EmbeddingError
from sbp.lazy import Optimizer
from sbp.placement import Placement, as_placement
from sbp.runtime.embedding.collection import Collection
from sbp.runtime.embedding.features import Bags
from sbp.runtime.embedding.keys import NO_ID, problem
from sbp.signature import B, S

Stacks = dict[str, jax.Array]


class AccumulationState(NamedTuple):
    """What is held between steps; or how that lies.

    Arguments:
      batches: how many since the last step of the optimizer.
      inputs: of the last batches, "b k ..."; an array for each of a batch.
      grads: of their vectors, "b k d" by feature.
      inner: the optimizer's state.
    """

    batches: Any
    inputs: PyTree
    grads: PyTree
    inner: PyTree


@dataclass(frozen=True)
class Accumulation:
    """The step of tables with the mean gradient of several batches; made by `accumulate`."""

    tables: Collection
    tx: Optimizer
    every: int

    def init(self, params: Mapping[str, jax.Array], inputs: Mapping[str, PyTree]) -> AccumulationState:
        """The first state.

        Arguments:
          params: of the tables.
          inputs: a batch of ids, as of a call of the collection: all batches have its shapes.

        Raises:
          EmbeddingError: for ragged bags, whose sizes differ.
        """
        for name, given in inputs.items():
            if isinstance(given, Bags):
                why, fix = "what is held has one shape for all batches", "PaddedBags: bags of a fixed size"
                where = f"accumulate(...).init(params, inputs): feature {name!r}"
                raise EmbeddingError(problem(where, "ragged bags", "arrays or PaddedBags", why, fix))
        vectors = jax.eval_shape(self.tables, dict(params), inputs)
        held, grads = (jax.tree.map(self._held, dict(x)) for x in (inputs, vectors))
        return AccumulationState(jnp.int32(0), held, grads, self.tx.init(_by_rows(params)))

    def _held(self, x: jax.Array) -> jax.Array:
        none = NO_ID if jnp.issubdtype(x.dtype, jnp.integer) else 0
        return jnp.full((x.shape[0], self.every, *x.shape[1:]), none, x.dtype)

    def update(
        self,
        params: Mapping[str, jax.Array],
        state: AccumulationState,
        inputs: Mapping[str, PyTree],
        grads: Mapping[str, jax.Array],
    ) -> tuple[Stacks, AccumulationState]:
        """Tables and state after a batch more; traceable.

        Arguments:
          params: of the tables.
          inputs: the ids of the batch.
          grads: of the vectors that the collection gave for them, by feature.
        """
        rows, is_last = _by_rows(params), state.batches == self.every - 1
        held, slopes = jax.tree.map(
            lambda held, x: held.at[:, state.batches].set(x),
            (state.inputs, state.grads),
            (dict(inputs), dict(grads)),
        )

        def step() -> tuple[PyTree, PyTree]:
            batch, slope = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (held, slopes))
            _, pull = jax.vjp(lambda tables: self.tables(tables, batch), dict(params))
            (total,) = pull(jax.tree.map(lambda x: x / self.every, slope))
            return self.tx.update(_by_rows(total), state.inner, rows)

        def nothing() -> tuple[PyTree, PyTree]:
            return jax.tree.map(jnp.zeros_like, rows), state.inner

        added, inner = lax.cond(is_last, step, nothing)
        batches = jnp.where(is_last, 0, state.batches + 1).astype(np.int32)
        after = {n: (rows[n] + added[n]).reshape(x.shape) for n, x in params.items()}
        return after, AccumulationState(batches, held, slopes, inner)

    def in_sbp(
        self,
        placement: Placement | jax.sharding.Mesh,
        state: AccumulationState,
        axes: Sequence[str] | None = None,
    ) -> AccumulationState:
        """The signatures of a state: what is held is split as a batch is, over all axes.

        Arguments:
          state: one, or its shapes.
          axes: as of `Collection.in_sbp`.
        """
        placement = as_placement(placement, "in_sbp(placement)")
        whole, split = [B] * placement.ndim, [S(0)] * placement.ndim
        return AccumulationState(whole, split, split, self.tables.in_sbp(placement, axes, like=state.inner))


def accumulate(tables: Collection, tx: Optimizer, every: int) -> Accumulation:
    """Steps of tables with the mean gradient of `every` batches; ids and gradients are held between them.

    It gives what `optax.MultiSteps(tx, every)` gives, which holds a table of sums and changes all of it in
    every step. The loss is differentiated by the vectors, not by the tables.

    Arguments:
      tx: a lazy optimizer: `sbp.rows(...)`.
      every: batches for a step.

    Raises:
      EmbeddingError: for no batch.

    >>> import optax
    >>> from sbp.lazy import rows
    >>> from sbp.runtime.embedding import FeatureConfig, TableConfig
    >>> tables = Collection((FeatureConfig("word", TableConfig("words", 4, 2)),))
    >>> two = accumulate(tables, rows(optax.sgd(1.0)), 2)
    >>> params, ids = tables.init(jax.random.key(0)), {"word": jnp.array([3])}
    >>> before, state = tables(params, ids)["word"], two.init(params, ids)
    >>> for _ in range(2):
    ...     grads = jax.grad(lambda vectors: (vectors["word"] ** 2).sum())(tables(params, ids))
    ...     params, state = two.update(params, state, ids, grads)
    >>> bool((tables(params, ids)["word"] == -before).all())
    True
    """
    if every < 1:
        why, fix = "a step has the mean gradient of so many batches", "1 for a step in every batch"
        where, got = "accumulate(tables, tx, every)", f"every={every}"
        raise EmbeddingError(problem(where, got, "1 or more", why, fix))
    return Accumulation(tables, tx, every)


def _by_rows(stacks: Mapping[str, jax.Array]) -> Stacks:
    """Stacks as one row after the other: a row is what an optimizer treats by itself."""
    return {n: x if x.ndim == 2 else x.reshape(-1, x.shape[-1]) for n, x in stacks.items()}
