"""Dynamic vocabularies: they map 64-bit keys that appear during training to a fixed number of rows."""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from sbp.errors import EmbeddingError
from sbp.runtime.embedding.admission import Admission, Sketch, mix_bits
from sbp.runtime.embedding.eviction import EvictionHeap, Policy, Refuse, columns_of
from sbp.runtime.embedding.key_index import UNKNOWN, KeyIndex, Keys, Rows
from sbp.runtime.embedding.keys import LIMITS, NO_ID, as_keys, problem

LOG = logging.getLogger("sbp")
EPOCH = 512
"""Half-lives after which counts are made smaller, before they overflow."""


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


class Vocabulary:
    """Keys and their rows, on the host. Use it from one thread at a time.

    Arguments:
      capacity: the number of rows, at most 2**31 - 1.
      policy: `Refuse()`, `LeastRecentlyUsed()`, `LeastFrequentlyUsed()`, or another `Policy`.
      name: for messages.
      admission: which new keys get a row; None for all of them.

    >>> words = Vocabulary(3)
    >>> words.lookup([7_000_000_000, 5, 5]).rows
    array([1, 0, 0], dtype=int32)
    """

    def __init__(
        self,
        capacity: int,
        policy: Policy | None = None,
        *,
        name: str = "Vocabulary",
        admission: Admission | None = None,
    ) -> None:
        if not 1 <= capacity <= LIMITS.max:
            why = "a row is an int32"
            raise EmbeddingError(
                problem(name, f"capacity={capacity}", f"1..{LIMITS.max}", why, "several vocabularies")
            )
        self.capacity = capacity
        self.policy = Refuse() if policy is None else policy
        self.name = name
        self.admission = admission
        self._sketch = None if admission is None else Sketch(admission)
        self._batches = 0
        self._size = 0
        self._index = KeyIndex()
        self._heap: EvictionHeap | None = None  # made when the first key leaves
        # Zeros take no memory before they are written.
        self._keys, self._held = np.zeros(capacity, np.int64), np.zeros(capacity, bool)
        self._used, self._count = np.zeros(capacity), np.zeros(capacity)

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

        A key of this batch never evicts another key of it. If the batch does not fit, nothing changes. The
        work is that of the keys of the batch, whatever the capacity.

        Arguments:
          keys: integers of any shape.
          padding: a value that is no key; it gets row -1, "no id", as does a key that is not admitted.

        Raises:
          EmbeddingError: if there are more distinct keys than rows, if the policy evicts no row, or if keys
            are not integers of 64 bits.
        """
        array = as_keys(keys, self.name)
        real = np.ones(array.shape, bool) if padding is None else array != padding
        unique, inverse, counts = np.unique(array[real], return_inverse=True, return_counts=True)
        rows = self._index.find(unique)
        is_new = rows == UNKNOWN
        seen = None if self._sketch is None else self._sketch.count_batch(unique[is_new], counts[is_new])
        if seen is not None:
            is_new[is_new] = seen.is_admitted
        new_keys, held = unique[is_new], rows[rows != UNKNOWN]
        new_rows, evicted, aside = self._free_rows(new_keys.size, held)

        if self._sketch is not None and seen is not None:
            self._sketch.count(seen)
        self._index.remove(evicted)
        rows[is_new] = new_rows
        self._assign(new_keys, new_rows)
        known = rows != UNKNOWN
        self._count_in(rows[known], counts[known])
        if self._heap is not None:
            columns = columns_of(self.policy, self._used[: self._size], self._count[: self._size])
            assert columns is not None
            self._heap.put(np.concatenate([new_rows, aside]), *columns)
        out = np.full(array.shape, NO_ID, np.int32)
        out[real] = rows[inverse.reshape(-1)]
        return Assignment(out, new_rows, new_keys, evicted)

    def _free_rows(self, wanted: int, held: Rows) -> tuple[Rows, Keys, Rows]:
        """Rows for new keys, ascending, the keys that lose theirs, and what the heap has to get back.

        Arguments:
          held: rows of this batch.
        """
        size, distinct = len(self), wanted + held.size
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
            return free, np.empty(0, np.int64), np.empty(0, np.int32)
        if (columns := columns_of(self.policy, self._used[:size], self._count[:size])) is None:
            raise EmbeddingError(
                problem(
                    self.name,
                    f"{wanted} new keys, with {size} of {self.capacity} rows taken",
                    f"at most {free.size} new keys",
                    f"the vocabulary is full, and {self.policy} lets no key leave",
                    "a larger capacity, or policy=LeastRecentlyUsed()",
                )
            )
        if self._heap is None:
            self._heap = EvictionHeap.of(*columns, self.capacity)
        self._held[held] = True
        leaves, aside = self._heap.take(missing, *columns, self._held)
        self._held[held] = False
        return np.concatenate([leaves, free]), self._keys[leaves], aside

    def _assign(self, keys: Keys, rows: Rows) -> None:
        self._size = max(self._size, int(rows.max(initial=-1)) + 1)
        self._keys[rows], self._count[rows] = keys, 0
        self._index.add(keys, rows)

    def _count_in(self, rows: Rows, counts: NDArray[np.int64]) -> None:
        """Counts a batch."""
        self._batches += 1
        self._used[rows] = self._batches
        half_life = getattr(self.policy, "half_life", None)
        if half_life is None:
            self._count[rows] += counts
            return
        epoch, before = (int(n / (EPOCH * half_life)) for n in (self._batches, self._batches - 1))
        if epoch > before:
            np.ldexp(self._count, -EPOCH, out=self._count)
            self._heap = None
        self._count[rows] += counts * 2.0 ** (self._batches / half_life - EPOCH * epoch)

    @property
    def batches(self) -> int:
        """The number of lookups so far."""
        return self._batches

    def get_state(self) -> dict[str, NDArray[Any]]:
        """The state for `set_state` and `from_state`, as plain arrays."""
        return {
            "capacity": np.array(self.capacity, np.int64),
            "batches": np.array(self._batches, np.int64),
            "keys": self.keys,
            "used": self._used[: self._size].astype(np.int64),
            "count": self._count[: self._size].copy(),
            **({} if self._sketch is None else {"sketch": self._sketch.counts.copy()}),
        }

    def set_state(self, state: Mapping[str, ArrayLike]) -> None:
        """Continues from the state of another vocabulary with as many rows, or with fewer: then it has grown.

        Raises:
          EmbeddingError: if an array is missing, if the arrays contradict each other, or if there were more
            rows.
        """
        saved = int(np.asarray(state.get("capacity", 0)))
        if saved > self.capacity:
            raise EmbeddingError(
                problem(
                    f"{self.name}: a saved state",
                    f"capacity {saved}",
                    f"at most {self.capacity}, its own",
                    "keys would lose their rows",
                    f"Vocabulary({saved}), and a table of as many rows",
                )
            )
        grown = {**state, "capacity": np.array(self.capacity)} if saved else state
        new = Vocabulary.from_state(grown, self.policy, name=self.name, admission=self.admission)
        if saved < self.capacity:
            LOG.info("%s has grown from %d to %d rows", self.name, saved, self.capacity)
        vars(self).update(vars(new))

    @classmethod
    def from_state(
        cls,
        state: Mapping[str, ArrayLike],
        policy: Policy | None = None,
        *,
        name: str = "Vocabulary",
        admission: Admission | None = None,
    ) -> Vocabulary:
        """A vocabulary that continues from a state, with counts of keys without a row if it has some.

        Raises:
          EmbeddingError: if an array is missing, or if the arrays contradict each other.
        """
        wanted = ("capacity", "batches", "keys", "used", "count")
        types = {"count": np.float64}
        given = {k: np.asarray(state[k]).astype(types.get(k, np.int64)) for k in wanted if k in state}
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
        new = cls(int(given["capacity"]), policy, name=name, admission=admission)
        saved = np.asarray(state.get("sketch", ()), np.uint16)
        if new._sketch is not None and saved.shape == new._sketch.counts.shape:
            new._sketch.counts = saved.copy()
        new._batches, new._size = int(given["batches"]), given["keys"].size
        for name_of, array in (("keys", new._keys), ("used", new._used), ("count", new._count)):
            array[: new._size] = given[name_of]
        new._index.add(given["keys"].astype(np.int64), np.arange(new._size, dtype=np.int32))
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
        cls,
        path: str | PathLike[str],
        policy: Policy | None = None,
        *,
        name: str = "Vocabulary",
        admission: Admission | None = None,
    ) -> Vocabulary:
        """Reads a file that `save` wrote. The policy is an argument again: the file does not hold it.

        Raises:
          EmbeddingError: if the file is missing or damaged.
        """
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as state:
                found = dict(state)
            # NumPy does not compare the sums of an archive.
            if not np.array_equal(found.pop("sha256"), _digest(found)):
                raise ValueError("other bytes than were written")
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as e:
            got = f"{type(e).__name__}: {e}"[:200]
            why, fix = "it was not written by Vocabulary.save, or cannot be read", "another copy of it"
            raise EmbeddingError(problem(f"{name}: {path}", got, "a file of save", why, fix)) from e
        return cls.from_state(found, policy, name=name, admission=admission)


def _digest(state: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    """The SHA-256 of arrays, with their names."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(f"{name}{state[name].shape}".encode() + np.ascontiguousarray(state[name]).tobytes())
    return np.frombuffer(found.digest(), np.uint8)


_GOLDEN = 0x9E3779B97F4A7C15


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
    salt = mix_bits(np.array([seed & (2**64 - 1)], np.uint64) + np.uint64(_GOLDEN))
    steps = np.arange(1, dim + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    bits = mix_bits(mix_bits(start[..., None] ^ salt) + steps)
    uniform = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.asarray((2 * uniform - 1) * scale).astype(dtype)
