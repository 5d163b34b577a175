"""A batch of clicks on the host: labels, dense features, and 64-bit keys that become rows of tables."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self, TypeAlias, TypeVar, cast

import jax
import numpy as np
from numpy.typing import NDArray

MOST_ROWS = 2**31 - 1
"""Rows of a table: what an int32 can name. JAX truncates 64-bit integers unless `jax_enable_x64` is set."""


@dataclass(frozen=True, slots=True)
class Lists:
    """A multi-hot feature: row r has `values[offsets[r]:offsets[r + 1]]`.

    Arguments:
      values: the keys (or rows) of all rows, one after the other, `[n]`.
      offsets: where each row begins, and the end, `[b + 1]`.

    >>> Lists(np.array([7, 8, 9]), np.array([0, 2, 2, 3])).pad(2)
    array([[ 7,  8],
           [-1, -1],
           [ 9, -1]])
    """

    values: NDArray[np.integer]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def rows_between(self, start: int, stop: int) -> Lists:
        """The rows from `start` to `stop`."""
        offsets = self.offsets[start : stop + 1]
        return Lists(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def pad(self, width: int, fill: int = -1) -> NDArray[np.integer]:
        """The lists as one array `[b, width]`, filled up with `fill`.

        Raises:
          ValueError: if a list is longer than `width`.
        """
        lengths = np.diff(self.offsets)
        if lengths.max(initial=0) > width:
            row = int(lengths.argmax())
            raise ValueError(f"row {row} has a list of {lengths[row]}: at most {width}")
        out = np.full((len(self), width), fill, self.values.dtype)
        out[np.arange(width) < lengths[:, None]] = self.values[self.offsets[0] : self.offsets[-1]]
        return out


Keys: TypeAlias = NDArray[np.integer] | tuple[Lists, ...]
"""Of clicks on the host: one for each feature, or lists of any length."""
Rows: TypeAlias = NDArray[np.int32] | tuple[NDArray[np.int32], ...]
"""Of tables, for a model: `[b, features]`, or a bag of each feature, `[b, hotness]`, -1 for none."""


@partial(jax.tree_util.register_dataclass, data_fields=["label", "dense", "keys"], meta_fields=[])
@dataclass(frozen=True, slots=True)
class Batch:
    """Some clicks, as a pytree. On a device `keys` are rows (`hash_keys`): JAX would truncate 64-bit keys.

    Arguments:
      label: 1 where there was a click, else 0; float32 `[b]`.
      dense: scaled numbers, float32 `[b, dense features]`.
      keys: int64 `[b, categorical features]`, or one `Lists` for each feature if one is multi-hot; as a model
        takes them, rows of tables.
    """

    label: NDArray[np.float32]
    dense: NDArray[np.float32]
    keys: Keys | Rows

    def __len__(self) -> int:
        return len(self.label)

    def rows_between(self, start: int, stop: int) -> Batch:
        """The rows from `start` to `stop`."""

        def cut(keys: Any) -> Any:
            return keys.rows_between(start, stop) if isinstance(keys, Lists) else keys[start:stop]

        keys = tuple(map(cut, self.keys)) if isinstance(self.keys, tuple) else cut(self.keys)
        return Batch(self.label[start:stop], self.dense[start:stop], keys)


def as_lists(keys: Keys | Rows) -> tuple[Lists, ...]:
    """Keys as one `Lists` for each feature; one-hot features become lists of one."""
    if isinstance(keys, tuple):
        return cast("tuple[Lists, ...]", keys)
    return tuple(Lists(column, np.arange(len(keys) + 1)) for column in np.ascontiguousarray(keys.T))


def pad_lists(keys: Keys, hotness: Sequence[int], dtype: type[np.integer] = np.int32) -> Keys | Rows:
    """Rows as a model takes them: lists become bags of fixed size."""
    if not isinstance(keys, tuple):
        return keys.astype(dtype)
    return cast("Rows", tuple(x.pad(most).astype(dtype) for x, most in zip(keys, hotness, strict=True)))


def concatenate(batches: Sequence[Batch]) -> Batch:
    """The rows of all batches, in order; as lists if any batch has lists."""
    if len(batches) == 1:
        return batches[0]
    label = np.concatenate([batch.label for batch in batches])
    dense = np.concatenate([batch.dense for batch in batches])
    arrays = [batch.keys for batch in batches if not isinstance(batch.keys, tuple)]
    if len(arrays) == len(batches):
        return Batch(label, dense, np.concatenate(arrays))
    features = zip(*(as_lists(batch.keys) for batch in batches), strict=True)
    return Batch(label, dense, tuple(_join(feature) for feature in features))


def _join(lists: Sequence[Lists]) -> Lists:
    lengths = np.concatenate([np.diff(part.offsets) for part in lists])
    return Lists(
        np.concatenate([part.values[part.offsets[0] : part.offsets[-1]] for part in lists]),
        np.concatenate([[0], np.cumsum(lengths)]),
    )


def rebatch(batches: Iterable[Batch], size: int, *, drop_last: bool = False) -> Iterator[Batch]:
    """The same rows in batches of `size`; the last one may be smaller, unless it is dropped."""
    if size < 1:
        raise ValueError(f"batches of {size}: at least one row")
    held: list[Batch] = []
    rows = 0
    for batch in batches:
        held.append(batch)
        rows += len(batch)
        if rows < size:
            continue
        joined, full = concatenate(held), rows // size * size
        for start in range(0, full, size):
            yield joined.rows_between(start, start + size)
        rows -= full
        held = [joined.rows_between(full, full + rows)] if rows else []
    if rows and not drop_last:
        yield concatenate(held)


class Cuttable(Protocol):
    """Some rows that can be cut before anybody parses them."""

    def __len__(self) -> int:
        """How many."""

    def drop(self, rows: int) -> Self:
        """Those behind the first ones."""


R = TypeVar("R", bound=Cuttable)


def drop_rows(pieces: Iterable[R], rows: int) -> Generator[R, None, int]:
    """The pieces behind the first rows; returns how many of these they have too few for."""
    for piece in pieces:
        if rows < len(piece):
            yield piece.drop(rows) if rows else piece
        rows = max(0, rows - len(piece))
    return rows


def hash_keys(keys: Keys, sizes: Sequence[int]) -> Keys:
    """The rows of tables that keys are hashed to; different keys may share a row (Weinberger et al., 2009).

    Arguments:
      keys: as in `Batch`.
      sizes: the rows of each feature's table.

    Returns:
      int32 rows, in the form of `keys`.

    Raises:
      ValueError: if the sizes are not one for each feature, or no int32 can name a table's rows.

    >>> hash_keys(np.array([[0, 1], [2, 1]]), sizes=[1000, 10])
    array([[535,   5],
           [110,   5]], dtype=int32)
    """
    features = len(keys) if isinstance(keys, tuple) else keys.shape[1]
    if len(sizes) != features:
        raise ValueError(f"{len(sizes)} table sizes for {features} features")
    if wrong := [size for size in sizes if not 1 <= size <= MOST_ROWS]:
        raise ValueError(f"a table of {wrong[0]} rows: between 1 and {MOST_ROWS}")
    if isinstance(keys, tuple):
        return tuple(
            Lists(_rows(feature.values, np.uint64(size)), feature.offsets)
            for feature, size in zip(keys, sizes, strict=True)
        )
    return _rows(keys, np.array(sizes, np.uint64))


def _rows(keys: NDArray[np.integer], sizes: NDArray[np.uint64] | np.uint64) -> NDArray[np.int32]:
    return (mix(keys) % sizes).astype(np.int32)


def mix(keys: NDArray[np.integer]) -> NDArray[np.uint64]:
    """A bijection of 64-bit integers whose every output bit depends on every input bit (splitmix64).

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    x = keys.astype(np.int64).view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
