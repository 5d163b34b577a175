"""A segment: rows by key in files that are written once and mapped.

Four files stand beside each other: the keys in order, a mark per row (its checksum, and the step that wrote
it), the rows, and the fences: the first key of every block of keys and the block's checksum. Fences are held
in memory, and a version has their digest; so a search in mapped keys cannot be misled by a byte that has
changed. A row has its own checksum. Both are looked at whenever something is read.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from sbp.runtime.embedding.tiers import messages

Keys = NDArray[np.uint64]
Steps = NDArray[np.int64]
Rows = NDArray[np.uint8]
BLOCK = 512
"""Keys of a block: a page of them."""
MARK = np.dtype([("check", "<u8"), ("step", "<i8")])
SUFFIXES = (".keys", ".marks", ".rows")
FENCES = ".fences"
CHUNK_BYTES = 1 << 23
"""Of rows that are read or written at a time."""


def weights(count: int) -> NDArray[np.uint64]:
    """Odd numbers: a sum of words times these changes if any one bit of a word does.

    >>> [int(x) % 2 for x in weights(3)], len(set(weights(99).tolist()))
    ([1, 1, 1], 99)
    """
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed ^ (mixed >> np.uint64(29))) | np.uint64(1)


def checks(keys: Keys, steps: Steps, rows: Rows) -> NDArray[np.uint64]:
    """A checksum per row: of its key, its step and its bytes.

    Arguments:
      rows: "n width", a multiple of 8 bytes.
    """
    words = np.ascontiguousarray(rows).view("<u8")
    of_key, of_step, *of_words = weights(2 + words.shape[1])
    found: NDArray[np.uint64] = np.einsum("nw,w->n", words, np.array(of_words, np.uint64))
    found += keys * of_key + steps.view(np.uint64) * of_step
    return found


@dataclass(frozen=True)
class RowView:
    """Some rows of an array, which are copied only when they are needed, a part at a time.

    Arguments:
      every: "n width" bytes.
      at: which of them.

    >>> view = RowView(np.arange(12, dtype=np.uint8).reshape(4, 3), np.array([3, 0, 1]))
    >>> view.shape, view.part(np.array([0, 2]))[1:].tolist()
    ((3, 3), [[3, 4, 5]])
    """

    every: Rows
    at: NDArray[np.integer[Any]]

    @property
    def shape(self) -> tuple[int, int]:
        """As of an array."""
        return len(self.at), self.every.shape[1]

    @property
    def dtype(self) -> np.dtype[np.uint8]:
        """As of an array."""
        return self.every.dtype

    def part(self, places: NDArray[np.integer[Any]]) -> RowView:
        """Some of them."""
        return RowView(self.every, self.at[places])

    def __getitem__(self, span: slice) -> Rows:
        found: Rows = self.every[self.at[span]]
        return found


@dataclass(frozen=True)
class Fences:
    """The first key of each block of a segment, and the checksum of the block's keys."""

    first: Keys
    sums: NDArray[np.uint64]

    @staticmethod
    def of(keys: Keys) -> Fences:
        """Those of keys in order; a segment's keys are given block by whole block, but for the last."""
        return Fences(np.array(keys[::BLOCK]), block_sums(keys))

    @property
    def digest(self) -> str:
        """The SHA-256 of both."""
        return hashlib.sha256(self.first.tobytes() + self.sums.tobytes()).hexdigest()


def block_sums(keys: Keys) -> NDArray[np.uint64]:
    """The checksums of blocks of keys; the last one may be shorter."""
    padded = np.zeros(-(-len(keys) // BLOCK) * BLOCK, np.uint64)
    padded[: len(keys)] = keys
    found: NDArray[np.uint64] = np.einsum("nw,w->n", padded.reshape(-1, BLOCK), weights(BLOCK))
    return found


@dataclass(frozen=True)
class Segment:
    """One segment, mapped.

    Arguments:
      path: of its files, without a suffix.
      width: bytes of a row.
      fences: of its keys.
    """

    path: Path
    width: int
    fences: Fences
    keys: Keys = field(repr=False)
    marks: NDArray[Any] = field(repr=False)
    rows: Rows = field(repr=False)
    checked_blocks: NDArray[np.bool_] = field(repr=False)
    """Which blocks of keys have been checked."""

    @staticmethod
    def open(path: Path, count: int, width: int, digest: str) -> Segment:
        """A segment of a folder.

        Arguments:
          digest: of its fences.

        Raises:
          StoreError: if a file of it is missing or has another size, or its fences are others.
        """
        file, blocks = path.with_name(path.name + FENCES), -(-count // BLOCK)
        fences = Fences(*np.array(_mapped(file, 16 * blocks).view("<u8").reshape(2, blocks)))
        if fences.digest != digest:
            raise messages.damaged_bytes(file, "other bytes than were written")
        return Segment.map(path, count, width, fences)

    @staticmethod
    def map(path: Path, count: int, width: int, fences: Fences) -> Segment:
        """A segment whose fences are known.

        Raises:
          StoreError: if a file of it is missing or has another size.
        """
        sizes = (8, MARK.itemsize, width)
        keys, marks, rows = (
            _mapped(path.with_name(path.name + s), count * n) for s, n in zip(SUFFIXES, sizes, strict=True)
        )
        return Segment(
            path,
            width,
            fences,
            keys.view("<u8"),
            marks.view(MARK),
            rows.reshape(count, width),
            np.zeros(len(fences.first), bool),
        )

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def name(self) -> str:
        """Its name in the folder."""
        return self.path.name

    @property
    def bytes(self) -> int:
        """Of its files."""
        return len(self) * (8 + MARK.itemsize + self.width)

    def find(self, keys: Keys) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Which of some sorted keys are here, and where: positions in what is asked, and in the segment.

        Raises:
          StoreError: if keys are not as they were written.
        """
        if not len(keys) or not len(self):
            return np.empty(0, np.intp), np.empty(0, np.intp)
        block = np.searchsorted(self.fences.first, keys, "right") - 1
        asked = np.flatnonzero(block >= 0)
        block = block[asked]
        self.check_blocks(np.unique(block))
        place = np.searchsorted(self.keys, keys[asked])
        if np.any((place < block * BLOCK) | (place > np.minimum((block + 1) * BLOCK, len(self)))):
            self.check_blocks(np.arange(len(self.fences.first)))  # a search that was misled
        here = place < len(self)
        here[here] = self.keys[place[here]] == keys[asked][here]
        return asked[here], place[here]

    def check_blocks(self, blocks: NDArray[np.intp]) -> None:
        """Compares blocks of keys with their checksums, each once.

        Raises:
          StoreError: naming the file, if one differs.
        """
        blocks = blocks[~self.checked_blocks[blocks]]
        for first in range(0, len(blocks), 4096):
            part = blocks[first : first + 4096]
            places = part[:, None] * BLOCK + np.arange(BLOCK)
            keys = self.keys[np.minimum(places, len(self) - 1)]
            keys[places >= len(self)] = 0
            wrong = part[np.einsum("nw,w->n", keys, weights(BLOCK)) != self.fences.sums[part]]
            if len(wrong):
                at = int(wrong[0]) * BLOCK
                raise messages.damaged_bytes(
                    self.path.with_name(self.name + ".keys"), f"other keys from number {at} on"
                )
            self.checked_blocks[part] = True

    def read(self, place: NDArray[np.intp]) -> tuple[Steps, Rows]:
        """Steps and rows at some places.

        Raises:
          StoreError: naming the file, if a row is not as it was written.
        """
        rows, marks = self.rows[place], self.marks[place]
        steps = np.ascontiguousarray(marks["step"])
        wrong = np.flatnonzero(checks(self.keys[place], steps, rows) != marks["check"])
        if len(wrong):
            row = int(place[wrong[0]])
            raise messages.damaged_bytes(
                self.path.with_name(self.name + ".rows"), f"other bytes in row {row}"
            )
        return steps, rows

    def verify(self) -> None:
        """Looks at everything.

        Raises:
          StoreError: naming the file, if anything is not as it was written.
        """
        self.check_blocks(np.arange(len(self.fences.first)))
        for part in parts(len(self), self.width):
            self.read(np.arange(part.start, part.stop))


def parts(count: int, width: int) -> Iterator[slice]:
    """Slices of rows, of `CHUNK_BYTES` each, that begin with a block."""
    each = max(BLOCK, CHUNK_BYTES // max(width, 1) // BLOCK * BLOCK)
    return (slice(i, min(i + each, count)) for i in range(0, count, each))


def _mapped(path: Path, size: int) -> NDArray[np.uint8]:
    """The bytes of a file, read as they are used."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found == size:
                return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except FileNotFoundError:
        raise messages.damaged_bytes(path, "no such file") from None
    raise messages.damaged_bytes(path, f"{found} bytes, not {size}")


def write(path: Path, width: int, given: Iterable[tuple[Keys, Steps, Rows]]) -> Segment:
    """Writes a segment; `sync` waits until it is on the disk.

    Arguments:
      path: of its files, without a suffix.
      given: keys in order, steps and rows, in parts of whole blocks but for the last.

    Raises:
      OSError: if it cannot be written; what was written of it is removed.
    """
    paths = [path.with_name(path.name + s) for s in SUFFIXES]
    count, fences = 0, list[Fences]()
    try:
        with (
            open(paths[0], "wb") as keys_file,
            open(paths[1], "wb") as marks,
            open(paths[2], "wb") as rows_file,
        ):
            for keys, steps, rows in given:
                mark = np.empty(len(keys), MARK)
                mark["check"], mark["step"] = checks(keys, steps, rows), steps
                for file, x in ((keys_file, keys), (marks, mark), (rows_file, rows)):
                    _put(file, x)
                count += len(keys)
                fences.append(Fences.of(keys))
        first, sums = (np.concatenate([getattr(f, name) for f in fences]) for name in ("first", "sums"))
        with open(path.with_name(path.name + FENCES), "wb") as file:
            _put(file, first)
            _put(file, sums)
    except BaseException:
        remove(path)
        raise
    return Segment.map(path, count, width, Fences(first, sums))


def _put(file: BinaryIO, x: NDArray[Any]) -> None:
    """Writes an array's bytes."""
    file.write(memoryview(np.ascontiguousarray(x)).cast("B"))


def sync(path: Path) -> None:
    """Waits until the files of a segment are on the disk.

    Raises:
      OSError: if they cannot be written; what was written of them might be lost.
    """
    for suffix in (*SUFFIXES, FENCES):
        with open(path.with_name(path.name + suffix), "rb") as file:
            os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Removes the files of a segment; those that map them keep their bytes."""
    for suffix in (*SUFFIXES, FENCES):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
