"""A store of rows by key on a disk: segments, the newest of which has the row of a key, and versions of them.

What is written goes into a new segment. `commit` writes down which segments there are, as a version: after a
crash a store is what a version says, whole. Segments are merged, a few at a time, so that each is larger than
all that are newer: a search looks into few, and a row is written again a few times in its life (O'Neil et
al., "The log-structured merge-tree", 1996).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbp.errors import StoreError
from sbp.runtime.embedding.tiers import messages, segment
from sbp.runtime.embedding.tiers.merging import merge_segments
from sbp.runtime.embedding.tiers.segment import Keys, Rows, RowView, Segment, Steps
from sbp.text.json_reader import json_of

FORMAT = 1
_VERSION = re.compile(r"version_(\d{12})\.json")
_SEGMENT = re.compile(r"(segment_\d{12})\.(keys|marks|rows|fences)")
_NEW = "version.new"
FEWEST = 6
"""Segments that are merged at least: with more a search takes longer, and rows are written again less."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class _Record:
    """What a version says of a segment: its name, its rows, and the digest of its fences."""

    name: str
    count: int
    fences: str


@dataclass(frozen=True)
class ReadRows:
    """Rows that were read.

    Arguments:
      has_row: which keys have a row.
      steps: when each was written last; 0 where there is none.
      rows: "n width" bytes; zeros where there is none.
    """

    has_row: NDArray[np.bool_]
    steps: Steps
    rows: Rows


class RowStore:
    """Rows of one width by key, on a disk. One process has it open; its threads may read while one writes.

    Arguments:
      folder: of the store; it is made if it is not there.
      width: bytes of a row, a multiple of 8.
      layout: what a row has, in words; a store is opened with the one that it was made with.
      version: the one that is opened, of `versions`; None for the last. Later ones are forgotten at the
        next commit.

    Raises:
      StoreError: for another width or layout, a version that is not there, a folder of something else, or a
        store that another process has open.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with RowStore(folder.name, 8) as store:
    ...     store.write(np.array([3, 5], np.uint64), np.full((2, 8), 7, np.uint8), step=1)
    ...     first = store.commit()
    >>> with RowStore(folder.name, 8) as store:
    ...     read = store.read(np.array([4, 5], np.uint64))
    >>> first, read.has_row.tolist(), read.rows[1, :3].tolist()
    (1, [False, True], [7, 7, 7])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        width: int,
        *,
        layout: str = "",
        version: int | None = None,
    ) -> None:
        self.folder, self.width, self.layout = Path(folder), width, layout
        if width <= 0 or width % 8:
            raise messages.odd_width(self.folder, width)
        self._lock = threading.RLock()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._owner = open(self.folder / "lock", "a")  # noqa: SIM115, closed with the store
        except OSError as e:
            raise messages.not_written(self.folder, e) from None
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._open(version)
        except BlockingIOError:
            self._owner.close()
            raise messages.in_use(self.folder) from None
        except BaseException:
            self._owner.close()
            raise

    def _open(self, version: int | None) -> None:
        """The segments of a version; what no version names is left from a crash, and removed."""
        known = self.versions
        others = {p.name for p in self.folder.iterdir() if not _SEGMENT.fullmatch(p.name)} - {"lock", _NEW}
        if others and not known:
            raise messages.no_store(self.folder)
        if version is not None and version not in (*known, 0):
            raise messages.unknown_version(self.folder, version, ", ".join(map(str, known)))
        self.version = version if version is not None else max(known, default=0)
        self.segments: tuple[Segment, ...] = ()
        if self.version:
            self.segments = tuple(
                Segment.open(self.folder / x.name, x.count, self.width, x.fences)
                for x in self._manifest(self.version)
            )
        names = [m[1] for p in self.folder.iterdir() if (m := _SEGMENT.fullmatch(p.name))]
        self._synced, self._unsure = {s.name for s in self.segments}, set[str]()
        self._number = max((int(name[-12:]) for name in names), default=0)
        self._sweep()

    @property
    def versions(self) -> list[int]:
        """The versions that are kept, in order."""
        return sorted(int(m[1]) for p in self.folder.iterdir() if (m := _VERSION.fullmatch(p.name)))

    def __len__(self) -> int:
        """Rows in all segments; a key that was written again counts again until they are merged."""
        return sum(map(len, self.segments))

    def read(self, keys: Keys) -> ReadRows:
        """The newest rows of some keys.

        Arguments:
          keys: "n", sorted, each once.

        Raises:
          StoreError: for keys that are not in order, and for bytes that are not those that were written.
        """
        self.check(keys)
        found, steps = np.zeros(len(keys), bool), np.zeros(len(keys), np.int64)
        rows, left = np.zeros((len(keys), self.width), np.uint8), np.arange(len(keys))
        for each in reversed(self.segments):
            here, place = each.find(keys[left])
            at = left[here]
            steps[at], rows[at] = each.read(place)
            found[at] = True
            left = np.delete(left, here)
            if not len(left):
                break
        return ReadRows(found, steps, rows)

    def write(self, keys: Keys, rows: Rows | RowView, *, step: int | Steps) -> None:
        """Writes rows as a segment of their own, and merges segments where that is due.

        A version has it from the next commit on, which waits until all is on the disk.

        Arguments:
          keys: "n", sorted, each once.
          rows: "n width" bytes.
          step: of training, for exports of what has changed; one for all, or "n".

        Raises:
          StoreError: for keys that are not in order, or if the disk is full or cannot be written; the store
            is as it was then.
        """
        self.check(keys, rows)
        if not len(keys):
            return
        steps = np.broadcast_to(np.asarray(step, np.int64), (len(keys),))
        given = ((keys[p], steps[p], rows[p]) for p in segment.parts(len(keys), self.width))
        with self._lock:
            before = self.segments
            try:
                self.segments = (*before, self._written(given, len(keys)))
                self._merge()
            except BaseException:
                self.segments = before
                self._sweep()
                raise

    def commit(self) -> int:
        """Writes down what the store has as a version, and returns its number.

        Raises:
          StoreError: if the disk is full or cannot be written; the versions before it stay.
        """
        with self._lock:
            self._sync()
            later = [v for v in self.versions if v > self.version]
            number = max([self.version, *later]) + 1
            records = [{"name": s.name, "count": len(s), "fences": s.fences.digest} for s in self.segments]
            self._put(
                number, {"format": FORMAT, "width": self.width, "layout": self.layout, "segments": records}
            )
            self.version = number
            self.keep(set(self.versions) - set(later))
            return number

    def keep(self, versions: Collection[int]) -> None:
        """Removes all versions but these and the last, and the segments that only they had."""
        with self._lock:
            for version in set(self.versions) - {*versions, self.version}:
                self._path(version).unlink(missing_ok=True)
            self._sweep()

    def verify(self) -> None:
        """Looks at every byte of what is read.

        Raises:
          StoreError: naming the file that is not as it was written.
        """
        for each in self.segments:
            each.verify()

    def changed_rows(self, since: int) -> Iterator[tuple[Keys, Steps, Rows]]:
        """Keys, steps and rows that were written after a step, in parts, in the order of the keys."""
        for keys, steps, rows in merge_segments(self.segments):
            later = steps > since
            yield keys[later], steps[later], rows[later]

    def close(self) -> None:
        """Lets another process have the store."""
        self._owner.close()

    def __enter__(self) -> RowStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check(self, keys: Keys, rows: Rows | RowView | None = None) -> None:
        """Checks what is given.

        Raises:
          StoreError: for keys that are not sorted, and rows that are not of this store.
        """
        if keys.dtype != np.uint64 or keys.ndim != 1:
            raise messages.not_sorted(self.folder, f"keys of {keys.dtype}{list(keys.shape)}")
        if np.any(keys[1:] <= keys[:-1]):
            raise messages.not_sorted(self.folder, "keys that are not in ascending order")
        if rows is not None and (rows.shape != (len(keys), self.width) or rows.dtype != np.uint8):
            got = f"{rows.dtype}{list(rows.shape)} for {len(keys)} keys, of {self.width} bytes each"
            raise messages.not_sorted(self.folder, got)

    # -- segments

    def _merge(self) -> None:
        """Merges segments so that each but the last few is larger than all that are newer."""
        sizes = [len(s) for s in self.segments]
        first = next((k for k in range(len(sizes) - FEWEST + 1) if sizes[k] <= sum(sizes[k + 1 :])), None)
        if first is not None:
            made = self._written(merge_segments(self.segments[first:]), sum(sizes[first:]))
            self.segments = (*self.segments[:first], made)
            self._sweep()

    def _written(self, given: Iterator[tuple[Keys, Steps, Rows]], most: int) -> Segment:
        """A new segment of parts, of at most so many rows."""
        self._number += 1
        try:
            return segment.write(self.folder / f"segment_{self._number:012d}", self.width, given)
        except OSError as e:
            raise self._failed(e, most * (self.width + 24)) from e

    def _sync(self) -> None:
        """Waits until all segments are on the disk. One of which that is not sure is written once more."""
        for k, each in enumerate(self.segments):
            if each.name in self._unsure:
                again = self._written(merge_segments([each]), len(each))
                self.segments = (*self.segments[:k], again, *self.segments[k + 1 :])
        for each in self.segments:
            if each.name not in self._synced:
                try:
                    segment.sync(self.folder / each.name)
                except OSError as e:
                    self._unsure.add(each.name)
                    raise self._failed(e, each.bytes) from e
                self._synced.add(each.name)

    def _sweep(self) -> None:
        """Removes segments that neither a version names nor the store reads."""
        used = {s.name for s in self.segments}
        for version in self.versions:
            used |= {record.name for record in self._manifest(version)}
        left = {m[1] for p in self.folder.iterdir() if (m := _SEGMENT.fullmatch(p.name))} - used
        for name in left:
            segment.remove(self.folder / name)
        self._synced -= left
        self._unsure -= left

    # -- versions

    def _path(self, version: int) -> Path:
        return self.folder / f"version_{version:012d}.json"

    def _put(self, version: int, content: dict[str, Any]) -> None:
        """Writes the file of a version: whole, or not at all."""
        text = json.dumps(content)
        whole = json.dumps({"digest": hashlib.sha256(text.encode()).hexdigest(), "content": text})
        made = self.folder / _NEW
        try:
            with open(made, "w") as file:
                file.write(whole)
                file.flush()
                os.fsync(file.fileno())
            os.rename(made, self._path(version))
            folder = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as e:
            made.unlink(missing_ok=True)
            raise self._failed(e, len(whole)) from e

    def _manifest(self, version: int) -> list[_Record]:
        """The segments of a version.

        Raises:
          StoreError: if its file is damaged, of another format, or of other rows.
        """
        path = self._path(version)
        try:
            whole = json_of(path.read_bytes())
            if hashlib.sha256(whole["content"].encode()).hexdigest() != whole["digest"]:
                raise ValueError("it has another digest")
            found = json_of(whole["content"])
            said = found["format"], found["width"], found["layout"]
            records = [_Record(str(x["name"]), int(x["count"]), str(x["fences"])) for x in found["segments"]]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise messages.damaged_bytes(path, "other bytes than were written") from None
        if said[0] != FORMAT:
            raise messages.other_format(path, f"format {said[0]}")
        if said[1:] != (self.width, self.layout):
            wanted = (self.width, self.layout)
            there, asked = (f"rows of {n} bytes{t and ': '}{t}" for n, t in (said[1:], wanted))
            raise messages.other_layout(self.folder, asked, there)
        return records

    def _failed(self, error: OSError, needed: int) -> StoreError:
        """What to say of a disk that does not take something."""
        if error.errno in _FULL:
            return messages.no_space(self.folder, needed, shutil.disk_usage(self.folder).free)
        return messages.not_written(self.folder, error)
