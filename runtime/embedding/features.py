"""Sparse features: bags of ids, ragged or of fixed hotness, built and checked on the host.

A *bag* holds the ids of one feature in one example; its *hotness* is their number. Two layouts:

- `PaddedBags`: `ids [batch, hotness]`, with -1 where there is no id. A plain array of that shape, or of
  `[batch]`, means the same. Its batch splits over devices without communication: use this on devices.
- `Bags`: all ids in one flat array, and the offset of each bag, as in Arrow, torch's EmbeddingBag and (for
  several features, `KeyedBags`) torchrec's KeyedJaggedTensor. It is compact, but does not split by batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from sbp.errors import EmbeddingError, Problem, raise_all
from sbp.runtime.embedding.keys import LIMITS, NO_ID, Place, as_integers, find_problem, is_wide, problem

Ints: TypeAlias = NDArray[np.int32]
Ids: TypeAlias = jax.Array | NDArray[Any]
"""Integers, of the host or of a device, or traced."""
Weights: TypeAlias = jax.Array | NDArray[Any]
"""Real numbers, likewise."""


@partial(jax.tree_util.register_dataclass, data_fields=["ids", "weights"], meta_fields=[])
@dataclass(frozen=True)
class PaddedBags:
    """Bags of fixed hotness; a pytree.

    Arguments:
      ids: int32 `[batch, hotness]`, -1 where there is no id.
      weights: `[batch, hotness]`, or None where every id counts once.
    """

    ids: Ids
    weights: Weights | None = None


@partial(jax.tree_util.register_dataclass, data_fields=["values", "offsets", "weights"], meta_fields=[])
@dataclass(frozen=True)
class Bags:
    """Ragged bags of one feature; a pytree. Build it with `from_lists`, `from_values` or `from_lengths`.

    Bag `i` holds `values[offsets[i] : offsets[i + 1]]`. Values before the first offset and after the last one
    are padding, so that batches with different numbers of ids have one shape.

    Arguments:
      values: int32 `[capacity]`.
      offsets: int32 `[bags + 1]`.
      weights: `[capacity]`, or None where every id counts once.
    """

    values: Ids
    offsets: Ids
    weights: Weights | None = None

    @property
    def bags(self) -> int:
        """The number of bags."""
        return int(self.offsets.shape[0]) - 1

    @classmethod
    def from_values(
        cls,
        values: ArrayLike,
        offsets: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        capacity: int | None = None,
        feature: str = "bags",
    ) -> Bags:
        """Bags from flat values and offsets, the layout of a list column in Arrow or Parquet.

        Arguments:
          values: ids `[n]`. Map 64-bit keys to ids with a `Vocabulary` first.
          offsets: `[bags + 1]`, from 0 to n.
          weights: finite numbers `[n]`.
          capacity: pad the values to this length, so that all batches have one shape (default: n).
          feature: its name, for messages.

        Raises:
          EmbeddingError: if offsets do not add up or decrease, if an id is negative or of more than 32 bits,
            if a weight is NaN or infinite, or if there are more values than the capacity.
        """
        bounds = _offsets(offsets, feature)
        flat = _integers(values, feature, "values")
        if bounds[0] != 0 or bounds[-1] != flat.size:
            got = f"offsets from {bounds[0]} to {bounds[-1]} for {flat.size} values"
            why = "every value belongs to one bag"
            fix = "of a slice of an Arrow column take its own values, and subtract its first offset"
            raise EmbeddingError(_of(feature, got, f"offsets from 0 to {flat.size}", why, fix))
        n = int(flat.size)
        size = n if capacity is None else capacity
        if n > size:
            why = "values are padded to the capacity, never cut"
            fix = "a larger capacity, or fewer bags per batch"
            raise EmbeddingError(_of(feature, f"{n} values", f"at most capacity={capacity}", why, fix))
        place = partial(_place, bounds)
        found = find_problem(values, LIMITS.max + 1, f"feature {feature!r}", place=place)
        raise_all([_of_any_table(found)] if found else [])
        padded = np.pad(flat.astype(np.int32), (0, size - n))
        if weights is None:
            return cls(padded, bounds)
        return cls(padded, bounds, np.pad(_weights(weights, (n,), feature, place), (0, size - n)))

    @classmethod
    def from_lengths(
        cls, values: ArrayLike, lengths: ArrayLike, weights: ArrayLike | None = None, **options: Any
    ) -> Bags:
        """Bags from flat values and the number of ids in each bag; otherwise as `from_values`."""
        feature = options.get("feature", "bags")
        counts = _integers(lengths, feature, "lengths")
        if (counts < 0).any():
            bag = int(np.argmax(counts < 0))
            why = "a length is how many ids a bag has"
            raise EmbeddingError(
                _of(f"{feature!r}, bag {bag}", f"length {counts[bag]}", "0 or more", why, "check the column")
            )
        return cls.from_values(values, np.concatenate([[0], np.cumsum(counts)]), weights, **options)

    @classmethod
    def from_lists(
        cls,
        lists: Sequence[Sequence[int]],
        weights: Sequence[Sequence[float]] | None = None,
        **options: Any,
    ) -> Bags:
        """Bags from one list of ids per example; otherwise as `from_values`."""
        feature = options.get("feature", "bags")
        lengths = np.array([len(bag) for bag in lists], np.int64)
        if weights is not None:
            counts = [len(bag) for bag in weights]
            if counts != lengths.tolist():
                bag = next(
                    (i for i, (a, b) in enumerate(zip(counts, lengths, strict=False)) if a != b), len(lists)
                )
                got = f"{counts[bag]} weights" if bag < len(counts) else f"{len(counts)} bags of weights"
                legal = f"{lengths[bag]}" if bag < min(len(lists), len(counts)) else f"{len(lists)} bags"
                why = "each id has one weight"
                raise EmbeddingError(
                    _of(f"{feature!r}, bag {bag}", got, legal, why, "weights shaped as the ids")
                )
        chain = itertools.chain.from_iterable
        return cls.from_lengths(
            list(chain(lists)), lengths, None if weights is None else list(chain(weights)), **options
        )

    def pad(self, max_hotness: int, *, truncate: bool = False, feature: str = "bags") -> PaddedBags:
        """The same bags with fixed hotness, on the host.

        Arguments:
          max_hotness: places per bag.
          truncate: drop the ids beyond `max_hotness`; otherwise they are an error.

        Raises:
          EmbeddingError: if a bag has more ids.
        """
        offsets = np.asarray(self.offsets)
        lengths = np.diff(offsets)
        if not truncate and (lengths > max_hotness).any():
            bag = int(np.argmax(lengths > max_hotness))
            why = "ids are never left out silently"
            fix = f"max_hotness={lengths.max()}, or truncate=True"
            where, legal = f"{feature!r}, bag {bag}", f"at most max_hotness={max_hotness}"
            raise EmbeddingError(_of(where, f"{lengths[bag]} ids", legal, why, fix))
        real = np.arange(max_hotness) < lengths[:, None]
        at = (offsets[:-1, None] + np.arange(max_hotness))[real]
        ids = np.full(real.shape, NO_ID, np.int32)
        ids[real] = np.asarray(self.values)[at]
        if self.weights is None:
            return PaddedBags(ids)
        weights = np.zeros(real.shape, np.asarray(self.weights).dtype)
        weights[real] = np.asarray(self.weights)[at]
        return PaddedBags(ids, weights)


@partial(
    jax.tree_util.register_dataclass, data_fields=["values", "offsets", "weights"], meta_fields=["names"]
)
@dataclass(frozen=True)
class KeyedBags:
    """Ragged bags of several features in one flat array, feature after feature; a pytree.

    `keyed["colour"]` gives the `Bags` of one feature. It shares the flat values, so a lookup of one feature
    reads the rows of all. For models use `pad`.

    Arguments:
      names: the features, in the order of their bags.
      values: int32 `[capacity]`.
      offsets: int32 `[features * batch + 1]`.
      weights: `[capacity]`, or None.
    """

    names: tuple[str, ...]
    values: Ids
    offsets: Ids
    weights: Weights | None = None

    @classmethod
    def from_bags(cls, bags: Mapping[str, Bags], *, capacity: int | None = None) -> KeyedBags:
        """Joins the bags of several features of one batch, on the host.

        Raises:
          EmbeddingError: if features differ in their number of bags or only some have weights, or if there
            are more values than the capacity.
        """
        names = tuple(bags)
        if not names:
            why, fix = "the number of bags is that of the first feature", "one Bags per feature"
            raise EmbeddingError(problem("KeyedBags.from_bags(bags)", "no features", "1 or more", why, fix))
        all_bags = list(bags.values())
        for name, one in bags.items():
            if one.bags != all_bags[0].bags:
                got, legal = f"{one.bags} bags", f"{all_bags[0].bags}, as {names[0]!r} has"
                why = "there is one bag per example and feature"
                raise EmbeddingError(_of(name, got, legal, why, "an empty bag where an example has no id"))
            if (one.weights is None) != (all_bags[0].weights is None):
                got = "no weights" if one.weights is None else "weights"
                why, fix = "the weights of all features are one array", "weights of 1 where there are none"
                raise EmbeddingError(_of(name, got, f"as {names[0]!r}", why, fix))
        real = [slice(int(b.offsets[0]), int(b.offsets[-1])) for b in all_bags]
        lengths = np.concatenate([np.diff(b.offsets) for b in all_bags])
        weighted = all_bags[0].weights is not None
        joined = Bags.from_lengths(
            np.concatenate([np.asarray(b.values)[r] for b, r in zip(all_bags, real, strict=True)]),
            lengths,
            np.concatenate([np.asarray(b.weights)[r] for b, r in zip(all_bags, real, strict=True)])
            if weighted
            else None,
            capacity=capacity,
            feature=", ".join(names),
        )
        return cls(names, joined.values, joined.offsets, joined.weights)

    @property
    def batch(self) -> int:
        """The number of examples."""
        return (int(self.offsets.shape[0]) - 1) // len(self.names)

    def __getitem__(self, name: str) -> Bags:
        if name not in self.names:
            legal, why = ", ".join(map(repr, self.names)), "bags are named by feature"
            raise EmbeddingError(problem("KeyedBags[...]", repr(name), legal, why, "the name of a feature"))
        first = self.names.index(name) * self.batch
        return Bags(self.values, self.offsets[first : first + self.batch + 1], self.weights)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def pad(self, max_hotness: int | Mapping[str, int], *, truncate: bool = False) -> dict[str, PaddedBags]:
        """Each feature with fixed hotness, on the host; see `Bags.pad`."""
        most = max_hotness if isinstance(max_hotness, Mapping) else dict.fromkeys(self.names, max_hotness)
        return {n: self[n].pad(most[n], truncate=truncate, feature=n) for n in self.names}


def bags_problem(bags: Bags, size: int, feature: str) -> Problem | None:
    """The first problem of ragged bags as ids of a table of `size` rows, or None. Padding is not checked."""
    try:
        bounds = _offsets(bags.offsets, feature)
    except EmbeddingError as e:
        return e.problems[0]
    n = np.size(bags.values)
    if bounds[0] < 0 or bounds[-1] > n:
        got, why = f"offsets from {bounds[0]} to {bounds[-1]}", f"there are {n} values"
        return _of(feature, got, f"0..{n}", why, "build bags with Bags.from_values")
    real = slice(int(bounds[0]), int(bounds[-1]))
    place = partial(_place, bounds - bounds[0])
    found = find_problem(np.asarray(bags.values)[real], size, f"feature {feature!r}", place=place)
    if found is None and bags.weights is not None:
        weights = np.asarray(bags.weights)[real]
        found = weights_problem(weights, (real.stop - real.start,), feature, place)
    return found


def _of_any_table(found: Problem) -> Problem:
    """The same where the table is not known yet."""
    return (
        replace(found, why="an id is a position in a table") if found.why.startswith("the table") else found
    )


def _of(feature: str, got: str, legal: str, why: str, fix: str) -> Problem:
    name = feature if feature.startswith("'") else repr(feature)
    return problem(f"feature {name}", got, legal, why, fix)


def _place(bounds: Ints, position: tuple[int, ...]) -> str:
    """Which bag a flat position belongs to."""
    bag = int(np.searchsorted(bounds, position[0], side="right")) - 1
    return f"bag {bag}, place {position[0] - int(bounds[bag])}"


def _integers(given: ArrayLike, feature: str, what: str) -> NDArray[np.int64]:
    array = as_integers(given, f"feature {feature!r}, {what}")
    if isinstance(array, Problem):
        raise EmbeddingError(array)
    if array.ndim != 1:
        shown, why = f"{what} of shape {list(array.shape)}", "bags stand in a row"
        raise EmbeddingError(_of(feature, shown, "one dim", why, f"reshape the {what}"))
    return array.astype(np.int64)


def _offsets(given: ArrayLike, feature: str) -> Ints:
    """Offsets as int32, checked but for their end."""
    offsets = _integers(given, feature, "offsets")
    if not offsets.size:
        fix = "[0] for no bag, or from_lengths"
        raise EmbeddingError(
            _of(feature, "no offsets", "one more offset than bags", "bag i ends at i + 1", fix)
        )
    if offsets.max() > LIMITS.max:
        why = "a device counts positions in 32 bits"
        got, legal = f"offset {offsets.max()}", f"at most {LIMITS.max}"
        raise EmbeddingError(_of(feature, got, legal, why, "smaller batches"))
    down = np.diff(offsets) < 0
    if down.any():
        bag = int(np.argmax(down))
        got = f"offsets {offsets[bag]}, {offsets[bag + 1]}"
        why, fix = "a bag cannot end before it begins", "check the column; lengths go to from_lengths"
        raise EmbeddingError(_of(f"{feature!r}, bag {bag}", got, "offsets that never decrease", why, fix))
    return offsets.astype(np.int32)


def _weights(given: ArrayLike, shape: tuple[int, ...], feature: str, place: Place) -> NDArray[Any]:
    """Weights in a type that JAX takes as it is, so that what is checked is what is used."""
    weights = np.asarray(given)
    if weights.dtype.kind in "iu" or (weights.dtype.kind == "f" and is_wide(weights.dtype)):
        with np.errstate(over="ignore"):
            weights = weights.astype(np.float32)
    found = weights_problem(weights, shape, feature, place)
    raise_all([found] if found else [])
    return weights


def weights_problem(given: ArrayLike, shape: tuple[int, ...], feature: str, place: Place) -> Problem | None:
    """The first problem of the weights of ids of a shape, or None."""
    weights = np.asarray(given)
    number = jax.numpy.issubdtype(weights.dtype, np.number)
    if weights.shape != shape or not number or weights.dtype.kind == "c":
        got = f"weights {weights.dtype}{list(weights.shape)}"
        return _of(
            feature, got, f"real numbers {list(shape)}", "each id has one weight", "shape them as the ids"
        )
    wrong = ~np.isfinite(weights.astype(np.float64))
    if not wrong.any():
        return None
    position = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), shape))
    got = f"weight {weights[position]} at {place(position)}"
    why = "one such weight makes the whole table NaN in a few steps"
    return _of(feature, got, "finite weights", why, "clean the column, or leave the id out")
