"""Pooling: the rows of a bag become one vector, in plain JAX."""

from collections.abc import Callable
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sbp.compat.untyped import DType
from sbp.errors import EmbeddingError
from sbp.runtime.embedding.features import Bags, PaddedBags, Weights
from sbp.runtime.embedding.keys import problem
from sbp.runtime.lower.reference_interpreter import Tensor

Add: TypeAlias = Callable[[Tensor], jax.Array]
"""Adds up what belongs to one bag."""

# What the weighted sum is divided by, of the sum of (a power of) the weights: the names of keras-rs and
# TensorFlow.
_NORMS: dict[str, tuple[int, Callable[[jax.Array], jax.Array]] | None] = {
    "sum": None,
    "mean": (1, lambda total: total),
    "sqrtn": (2, jnp.sqrt),
}
COMBINERS = tuple(_NORMS)


def check_combiner(combiner: str | None, where: str) -> None:
    """Refuses a combiner that is not there.

    Raises:
      EmbeddingError: if it is none of `COMBINERS`, nor None.
    """
    if combiner is not None and combiner not in _NORMS:
        legal = ", ".join(map(repr, COMBINERS)) + ", or None to keep the rows"
        why = "a combiner says how the rows of a bag become one vector"
        fix = "with combiner=None any other one can be written in JAX"
        raise EmbeddingError(problem(where, f"combiner={combiner!r}", legal, why, fix))


def segments(bags: Bags) -> jax.Array:
    """The bag of every position of flat values, int32 `[capacity]`; the number of bags where it has none."""
    n = bags.values.shape[0]
    begins = jnp.zeros(n, np.int32).at[bags.offsets].add(1, mode="drop", wrap_negative_indices=False)
    bag = jnp.cumsum(begins, dtype=np.int32) - 1
    return jnp.where(bag < 0, bags.bags, bag)


def flat_add(bags: Bags) -> Add:
    """Adds up positions by their bag, `[capacity, ...] -> [bags, ...]`."""
    bag = segments(bags)

    def add(x: Tensor) -> jax.Array:
        return jnp.zeros((bags.bags, *x.shape[1:]), x.dtype).at[bag].add(x, mode="drop")

    return add


def padded_add(x: Tensor) -> jax.Array:
    """Adds up the places of a bag, `[batch, hotness, ...] -> [batch, ...]`."""
    # An array of the host stays one, which does as well.
    return cast("jax.Array", x.sum(axis=1))


def counts(present: Tensor, weights: Weights | None, dtype: DType) -> Tensor:
    """What each id counts for: its weight or one, and zero where there is no id."""
    return present.astype(dtype) if weights is None else jnp.where(present, weights, 0).astype(dtype)


def divide(summed: jax.Array, count: Callable[[], Tensor], combiner: str, add: Add) -> jax.Array:
    """A weighted sum divided as the combiner says; zero where the divisor is, as for an empty bag.

    Arguments:
      count: makes what each id counts for.
    """
    norm = _NORMS[combiner]
    if norm is None:
        return summed
    power, root = norm
    total = add(count() ** power)
    empty = total == 0
    divisor = root(jnp.where(empty, 1, total))[..., None]
    return jnp.where(empty[..., None], 0, summed / divisor)


def combine(
    rows: jax.Array, present: Callable[[], Tensor], weights: Weights | None, combiner: str, add: Add
) -> jax.Array:
    """Pools rows that are zero where there is no id; added up in float32 at least, in the rows' type after.

    Arguments:
      present: tells which ids there are.
    """
    wide = jnp.promote_types(rows.dtype, np.float32)
    terms = rows.astype(wide)
    if weights is not None:
        terms = terms * counts(present(), weights, wide)[..., None]
    return divide(add(terms), lambda: counts(present(), weights, wide), combiner, add).astype(rows.dtype)


def pool(rows: jax.Array, bags: Bags | PaddedBags | ArrayLike, combiner: str | None = "mean") -> jax.Array:
    """The rows of each bag as one vector.

    `"sum"` is the weighted sum, `"mean"` divides it by the sum of the weights, `"sqrtn"` by the root of the
    sum of their squares. An empty bag gives zeros, as does one whose divisor is zero.

    Arguments:
      rows: `[batch, hotness, dim]` for bags of fixed hotness, `[capacity, dim]` for ragged ones.
      bags: a `PaddedBags` or its ids `[batch, hotness]`, with -1 for no id; or `Bags`.
      combiner: one of `"sum"`, `"mean"`, `"sqrtn"`; None gives the rows, zero where there is no id.

    Returns:
      `[batch, dim]`, with None as `rows`.

    Raises:
      EmbeddingError: if the combiner is another word, or if rows and bags differ in shape.
    """
    check_combiner(combiner, "pool(...)")
    flat = isinstance(bags, Bags)
    padded = bags if isinstance(bags, Bags | PaddedBags) else PaddedBags(jnp.asarray(bags))
    ids = padded.values if isinstance(padded, Bags) else padded.ids
    if rows.shape[:-1] != ids.shape or ids.ndim != (1 if flat else 2):
        why = "there is one row per place of a bag"
        legal = "rows [capacity, dim]" if flat else "rows [batch, hotness, dim] for ids [batch, hotness]"
        got = f"rows {list(rows.shape)} for ids {list(ids.shape)}"
        raise EmbeddingError(problem("pool(...)", got, legal, why, "look up bags.values, or the padded ids"))
    present = segments(padded) < padded.bags if isinstance(padded, Bags) else ids >= 0
    rows = jnp.where(present[..., None], rows, 0)
    if combiner is None:
        return rows
    add = flat_add(padded) if isinstance(padded, Bags) else padded_add
    return combine(rows, lambda: present, padded.weights, combiner, add)
