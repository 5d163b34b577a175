"""Dynamic vocabularies: they map 64-bit keys that appear during training to a fixed number of rows."""

from __future__ import annotations

import hashlib
import os
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from sbp.errors import EmbeddingError
from sbp.runtime.embedding.keys import LIMITS, NO_ID, as_keys, problem
from sbp.runtime.embedding.sorted_keys import UNKNOWN, Keys, Rows, SortedKeys

Counts = NDArray[np.int64]


class Policy(Protocol):
    """Which key loses its row to a new key when all rows are taken."""

    def order(self, used: Counts, count: Counts) -> Sequence[Counts] | None:
        """Columns to sort the rows by: the lowest row is evicted first, the next column breaks ties.

        None means that no row is ever evicted.

        Arguments:
          used: per row, the number of the last batch that had the key.
          count: per row, how often the key was looked up since it has the row.
        """


@dataclass(frozen=True, slots=True)
class Refuse:
    """No key is evicted; a new key in a full vocabulary is an error."""

    def order(self, used: Counts, count: Counts) -> Sequence[Counts] | None:
        """None: no row is evicted."""
        return None


@dataclass(frozen=True, slots=True)
class LeastRecentlyUsed:
    """Evicts the key that was not seen for the longest time; ties: the less frequent key."""

    def order(self, used: Counts, count: Counts) -> Sequence[Counts] | None:
        """By age, then by frequency."""
        return used, count


@dataclass(frozen=True, slots=True)
class LeastFrequentlyUsed:
    """Evicts the key with the fewest lookups; ties: the key that was not seen for longer."""

    def order(self, used: Counts, count: Counts) -> Sequence[Counts] | None:
        """By frequency, then by age."""
        return count, used


@dataclass(frozen=True, slots=True)
class Assignment:
    """The result of a lookup.

    Arguments:
      rows: int32, in the shape of the keys.
      new_rows: rows that now belong to another key, ascending. Reset them and their optimizer state to
        initial values.
      new_keys: the new key of each of `new_rows`.
      evicted_keys: keys that lost their rows.
    """

    rows: Rows
    new_rows: Rows
    new_keys: Keys
    evicted_keys: Keys


def lowest(columns: Sequence[Counts], k: int) -> NDArray[np.intp]:
    """Positions of the `k` lowest by the first column; the next columns, then the position, break ties.

    >>> lowest([np.array([2, 1, 1, 0]), np.array([0, 5, 4, 9])], 2).tolist()
    [2, 3]
    """
    if k == 0:
        return np.empty(0, np.intp)
    first, *others = columns
    edge = np.partition(first, k - 1)[k - 1]
    below, tied = np.flatnonzero(first < edge), np.flatnonzero(first == edge)
    k -= below.size
    if others:
        tied = tied[lowest([column[tied] for column in others], k)]
    return np.sort(np.concatenate([below, tied[:k]]))


class Vocabulary:
    """Keys and their rows, on the host. Use it from one thread at a time.

    Arguments:
      capacity: the number of rows, at most 2**31 - 1.
      policy: `Refuse()`, `LeastRecentlyUsed()`, `LeastFrequentlyUsed()`, or another `Policy`.
      name: for messages.

    >>> words = Vocabulary(3)
    >>> words.lookup([7_000_000_000, 5, 5]).rows
    array([1, 0, 0], dtype=int32)
    """

    def __init__(self, capacity: int, policy: Policy | None = None, *, name: str = "Vocabulary") -> None:
        if not 1 <= capacity <= LIMITS.max:
            why = "a row is an int32"
            raise EmbeddingError(
                problem(name, f"capacity={capacity}", f"1..{LIMITS.max}", why, "several vocabularies")
            )
        self.capacity = capacity
        self.policy = Refuse() if policy is None else policy
        self.name = name
        self._batches = 0
        self._size = 0
        self._index = SortedKeys()
        # Zeros take no memory before they are written.
        self._keys, self._used, self._count = (np.zeros(capacity, np.int64) for _ in range(3))

    def __len__(self) -> int:
        return self._size

    @property
    def keys(self) -> Keys:
        """The key of every row that has one, in the order of the rows."""
        return self._keys[: self._size].copy()

    def find(self, keys: ArrayLike) -> Rows:
        """The row of each key, or -1 ("no id") for a key without a row; the vocabulary stays as it is.

        For evaluation: an unknown key has no trained row.
        """
        return self._index.find(as_keys(keys, self.name))

    def lookup(self, keys: ArrayLike, *, padding: int | None = None) -> Assignment:
        """The row of each key; a new key gets a row. New keys get rows in the order of their values.

        A key of this batch never evicts another key of it. If the batch does not fit, nothing changes.

        Arguments:
          keys: integers of any shape.
          padding: a value that is no key; it gets row -1, "no id".

        Raises:
          EmbeddingError: if there are more distinct keys than rows, if the policy evicts no row, or if keys
            are not integers of 64 bits.
        """
        array = as_keys(keys, self.name)
        real = np.ones(array.shape, bool) if padding is None else array != padding
        unique, inverse, counts = np.unique(array[real], return_inverse=True, return_counts=True)
        rows = self._index.find(unique)
        new_keys = unique[rows == UNKNOWN]
        new_rows, evicted = self._free_rows(new_keys.size, rows[rows != UNKNOWN], unique.size)

        if evicted.size:
            self._index.remove(evicted)
        if new_keys.size:
            self._assign(new_keys, new_rows)
            rows[rows == UNKNOWN] = new_rows
        self._batches += 1
        self._used[rows] = self._batches
        self._count[rows] += counts
        out = np.full(array.shape, NO_ID, np.int32)
        out[real] = rows[inverse.reshape(-1)]
        return Assignment(out, new_rows, new_keys, evicted)

    def _free_rows(self, wanted: int, held: Rows, distinct: int) -> tuple[Rows, Keys]:
        """Rows for new keys, ascending, and the keys that lose theirs; `held` are rows of this batch."""
        size = len(self)
        if distinct > self.capacity:
            raise EmbeddingError(
                problem(
                    self.name,
                    f"{distinct} distinct keys in one batch",
                    f"at most {self.capacity}: the capacity",
                    "two keys of one batch cannot share a row",
                    "a larger capacity, or smaller batches",
                )
            )
        free = np.arange(size, min(size + wanted, self.capacity), dtype=np.int32)
        missing = wanted - free.size
        if not missing:
            return free, np.empty(0, np.int64)
        others = np.ones(size, bool)
        others[held] = False
        candidates = np.flatnonzero(others)
        order = self.policy.order(self._used[candidates], self._count[candidates])
        if order is None:
            raise EmbeddingError(
                problem(
                    self.name,
                    f"{wanted} new keys, with {size} of {self.capacity} rows taken",
                    f"at most {free.size} new keys",
                    f"the vocabulary is full, and {self.policy} lets no key leave",
                    "a larger capacity, or policy=LeastRecentlyUsed()",
                )
            )
        victims = candidates[lowest(order, missing)].astype(np.int32)
        return np.concatenate([victims, free]), self._keys[victims]

    def _assign(self, keys: Keys, rows: Rows) -> None:
        self._size = max(self._size, int(rows[-1]) + 1)
        self._keys[rows], self._count[rows] = keys, 0
        self._index.add(keys, rows)

    @property
    def batches(self) -> int:
        """The number of lookups so far."""
        return self._batches

    def get_state(self) -> dict[str, NDArray[np.int64]]:
        """The state for `set_state` and `from_state`, as plain arrays."""
        return {
            "capacity": np.array(self.capacity, np.int64),
            "batches": np.array(self._batches, np.int64),
            "keys": self.keys,
            "used": self._used[: self._size].copy(),
            "count": self._count[: self._size].copy(),
        }

    def set_state(self, state: Mapping[str, ArrayLike]) -> None:
        """Continues from the state of another vocabulary with as many rows.

        Raises:
          EmbeddingError: if an array is missing, if the arrays contradict each other, or if the capacity
            differs.
        """
        new = Vocabulary.from_state(state, self.policy, name=self.name)
        if new.capacity != self.capacity:
            raise EmbeddingError(
                problem(
                    f"{self.name}: a saved state",
                    f"capacity {new.capacity}",
                    f"{self.capacity}, its own",
                    "the rows of a table are as many as its vocabulary gives away",
                    f"Vocabulary({new.capacity}), and a table of as many rows",
                )
            )
        vars(self).update(vars(new))

    @classmethod
    def from_state(
        cls, state: Mapping[str, ArrayLike], policy: Policy | None = None, *, name: str = "Vocabulary"
    ) -> Vocabulary:
        """A vocabulary that continues from a state.

        Raises:
          EmbeddingError: if an array is missing, or if the arrays contradict each other.
        """
        wanted = ("capacity", "batches", "keys", "used", "count")
        given = {k: np.asarray(state[k]).astype(np.int64) for k in wanted if k in state}
        sizes = {k: a.shape for k, a in given.items()}
        fits = len(given) == len(wanted) and (
            given["keys"].shape == given["used"].shape == given["count"].shape
            and given["keys"].size == np.unique(given["keys"]).size <= given["capacity"]
        )
        if not fits:
            raise EmbeddingError(
                problem(
                    f"{name}: a saved state",
                    f"arrays {sizes}",
                    "capacity, batches; keys, used and count of one length, no longer than the capacity",
                    "it is not a result of get_state(): an array is missing, or a key is there twice",
                    "save it again",
                )
            )
        new = cls(int(given["capacity"]), policy, name=name)
        new._batches, new._size = int(given["batches"]), given["keys"].size
        for name_of, array in (("keys", new._keys), ("used", new._used), ("count", new._count)):
            array[: new._size] = given[name_of]
        order = np.argsort(given["keys"])
        new._index.add(given["keys"][order], order.astype(np.int32))
        return new

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the state to an uncompressed `.npz` file; an old file is replaced in one step.

        Raises:
          EmbeddingError: if it cannot be written; the old file stays.
        """
        file = Path(path)
        unfinished = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
        try:
            with unfinished.open("wb") as out:
                state = self.get_state()
                np.savez(out, **state, sha256=_digest(state))  # type: ignore[arg-type]
                out.flush()
                os.fsync(out.fileno())
            os.replace(unfinished, file)
        except OSError as e:
            why, fix = (
                "the file cannot be written; the old one is unchanged",
                "space on the disk, or another path",
            )
            raise EmbeddingError(problem(f"{self.name}: {file}", str(e), "a file", why, fix)) from e
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(
        cls, path: str | PathLike[str], policy: Policy | None = None, *, name: str = "Vocabulary"
    ) -> Vocabulary:
        """Reads a file that `save` wrote. The policy is an argument again: the file does not hold it.

        Raises:
          EmbeddingError: if the file is missing or damaged.
        """
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as state:
                found = dict(state)
            # NumPy does not compare the sums of an archive; files of version 0.1 have no digest.
            digest = found.pop("sha256", None)
            if digest is not None and not np.array_equal(digest, _digest(found)):
                raise ValueError("other bytes than were written")
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as e:
            got = f"{type(e).__name__}: {e}"[:200]
            why, fix = "it was not written by Vocabulary.save, or cannot be read", "another copy of it"
            raise EmbeddingError(problem(f"{name}: {path}", got, "a file of save", why, fix)) from e
        return cls.from_state(found, policy, name=name)


def _digest(state: Mapping[str, NDArray[np.int64]]) -> NDArray[np.uint8]:
    """The SHA-256 of arrays, with their names."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(f"{name}{state[name].shape}".encode() + np.ascontiguousarray(state[name]).tobytes())
    return np.frombuffer(found.digest(), np.uint8)


_GOLDEN = 0x9E3779B97F4A7C15


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64 bits in which every bit depends on every other: the finaliser of SplitMix64."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def initial_rows(
    seed: int, keys: ArrayLike, dim: int, dtype: DTypeLike = np.float32, scale: float = 1.0
) -> NDArray[Any]:
    """Initial embeddings, uniform in [-scale, scale]; a function of the seed and each key alone.

    They do not depend on the number of devices or the order of the keys, and are the same again after an
    eviction. The bits come from SplitMix64 (Steele, Lea and Flood, 2014), started at a mix of seed and key.

    Arguments:
      keys: integers `[...]`.
      dim: the width of a row.

    Returns:
      values `[..., dim]`.
    """
    start = np.asarray(as_keys(keys, "initial_rows(keys=...)")).view(np.uint64)
    salt = _mixed(np.array([seed & (2**64 - 1)], np.uint64) + np.uint64(_GOLDEN))
    steps = np.arange(1, dim + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    bits = _mixed(_mixed(start[..., None] ^ salt) + steps)
    uniform = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.asarray((2 * uniform - 1) * scale).astype(dtype)
