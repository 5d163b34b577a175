"""The ids of a feature inside a traced program, whatever layout they came in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from sbp.errors import EmbeddingError, Problem, raise_all
from sbp.runtime.embedding.features import Bags, Ids, PaddedBags, Weights, bags_problem, weights_problem
from sbp.runtime.embedding.keys import LIMITS, NO_ID, element, find_problem, problem, uncut
from sbp.runtime.embedding.pooling import Add, combine, flat_add, padded_add, segments
from sbp.runtime.embedding.tables import FeatureConfig, Uncompressed

GivenIds: TypeAlias = Bags | PaddedBags | Ids
"""The ids of a feature as a user has them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One feature of one batch.

    Arguments:
      feature: whose ids they are.
      ids: int32, `[batch, hotness]` or, of ragged bags, `[capacity]`; those out of the table's range have no
        row.
      weights: shaped as the ids, or None.
      bags: the ragged bags.
      single: whether ids came as `[batch]`.
    """

    feature: FeatureConfig
    ids: jax.Array
    weights: Weights | None
    bags: Bags | None
    single: bool

    @property
    def batch(self) -> int:
        """How many bags there are."""
        return int(self.ids.shape[0]) if self.bags is None else self.bags.bags

    def present(self) -> jax.Array:
        """Which ids have a row."""
        return (self.ids >= 0) & (self.ids < self.feature.table.vocabulary_size)

    def parts(self) -> tuple[jax.Array, ...]:
        """The row of each id in each stored part of the table; out of its range where the id is."""
        compression = self.feature.table.compression
        if isinstance(compression, Uncompressed):
            return (self.ids,)
        present = self.present()
        return tuple(jnp.where(present, i, NO_ID) for i in compression.ids(jnp.where(present, self.ids, 0)))

    @property
    def add(self) -> Add:
        """Adds up what belongs to one bag."""
        return padded_add if self.bags is None else flat_add(self.bags)

    def pool(self, rows: jax.Array) -> jax.Array:
        """The feature's result, of the rows of its ids (zero where there is none)."""
        combiner = self.feature.table.combiner
        if self.single and (self.weights is None or combiner is None):
            out = rows[:, 0]
        elif combiner is None:
            out = rows
        else:
            out = combine(rows, self.present, self.weights, combiner, self.add)
        self.feature.check_shape("output", out.shape, self.feature.output_shape)
        return out


def _int32(ids: jax.Array) -> jax.Array:
    """Ids as int32; those that it does not hold are out of every table's range, and become -1."""
    if ids.dtype.itemsize < 4 or ids.dtype == np.int32:
        return ids.astype(np.int32)
    return jnp.where((ids >= 0) & (ids <= LIMITS.max), ids, NO_ID).astype(np.int32)


def entry(feature: FeatureConfig, given: GivenIds) -> Entry:
    """The ids of one feature, out-of-range ones made absent.

    Raises:
      EmbeddingError: if they are no integers, would be cut, or have another shape than the feature.
    """
    where = f"feature {feature.name!r}"
    bags = given if isinstance(given, Bags) else None
    padded = given if isinstance(given, Bags | PaddedBags) else PaddedBags(given)
    ids = jnp.asarray(uncut(padded.values if isinstance(padded, Bags) else padded.ids, where))
    weights = padded.weights
    if weights is not None and weights.shape != ids.shape:
        got, legal = f"weights {list(weights.shape)}", f"{list(ids.shape)}"
        raise EmbeddingError(problem(where, got, legal, "each id has one weight", "shape them as the ids"))
    shape = ids.shape if bags is None else (bags.bags, None)
    if len(shape) not in (1, 2) or (bags is not None and ids.ndim != 1):
        legal = "[batch], [batch, hotness], PaddedBags or Bags"
        why = "a feature has one bag of ids per example"
        fix = "merge dims, or use several features"
        raise EmbeddingError(problem(where, f"ids {list(ids.shape)}", legal, why, fix))
    if bags is None:
        feature.check_shape("input", ids.shape, feature.input_shape)
    single = ids.ndim == 1 and bags is None
    if single:
        ids, weights = ids[:, None], None if weights is None else weights[:, None]
    ids = _int32(ids)
    if bags is not None:
        ids = jnp.where(segments(bags) < bags.bags, ids, NO_ID)
    return Entry(feature, ids, weights, bags, single)


def inputs_by_name(features: Sequence[FeatureConfig], inputs: Mapping[str, GivenIds]) -> dict[str, GivenIds]:
    """The input of each feature, by name.

    Raises:
      EmbeddingError: if one is missing, or nobody's.
    """
    given, wanted = list(inputs), [f.name for f in features]
    found = [
        problem("inputs", f"{what} {name!r}", ", ".join(map(repr, wanted)), why, fix)
        for names, others, what, why, fix in (
            (wanted, given, "no", "every feature of the collection is looked up", "a batch of -1 has no ids"),
            (given, wanted, "also", "no feature of the collection has this name", "leave it out"),
        )
        for name in names
        if name not in others
    ]
    raise_all(found)
    return {name: inputs[name] for name in wanted}


def entries(features: Sequence[FeatureConfig], inputs: Mapping[str, GivenIds]) -> dict[str, Entry]:
    """All features of a batch.

    Raises:
      EmbeddingError: if an input cannot be taken, or if features differ in their number of examples.
    """
    given = inputs_by_name(features, inputs)
    out = {f.name: entry(f, given[f.name]) for f in features}
    first = out[features[0].name]
    for name, e in out.items():
        if e.batch != first.batch:
            got, legal = f"{e.batch} examples", f"{first.batch}, as {features[0].name!r} has"
            why, fix = "the features of one batch belong to the same examples", "pad with -1, or empty bags"
            raise EmbeddingError(problem(f"feature {name!r}", got, legal, why, fix))
    return out


def check_ids(feature: FeatureConfig, given: GivenIds) -> GivenIds | Problem:
    """An input on the host with ids as int32 and everything checked, or the first thing that is wrong."""
    where, size = f"feature {feature.name!r}", feature.table.vocabulary_size
    if isinstance(given, Bags):
        return bags_problem(given, size, feature.name) or given
    bags = given if isinstance(given, PaddedBags) else PaddedBags(given)
    found = find_problem(bags.ids, size, where, padding=True, place=element)
    if found is None and bags.weights is not None:
        found = weights_problem(bags.weights, np.shape(bags.ids), feature.name, element)
    if found is not None:
        return found
    ids = np.asarray(bags.ids).astype(np.int32)
    return PaddedBags(ids, bags.weights) if isinstance(given, PaddedBags) else ids


def check_inputs(features: Sequence[FeatureConfig], inputs: Mapping[str, GivenIds]) -> Mapping[str, GivenIds]:
    """All inputs of a batch, checked on the host.

    Raises:
      EmbeddingError: every problem of the batch.
    """
    given = inputs_by_name(features, inputs)
    out = {f.name: check_ids(f, given[f.name]) for f in features}
    raise_all(p for p in out.values() if isinstance(p, Problem))
    return {name: x for name, x in out.items() if not isinstance(x, Problem)}
