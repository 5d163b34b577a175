"""Rows on a disk: random histories against a dict, crashes, damage, and full disks."""

import errno
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbp.errors import StoreError
from sbp.runtime.embedding.tiers import merging, segment, store
from sbp.runtime.embedding.tiers.store import RowStore
from tests.errors.messages import check_message

WIDTH = 16
Model = dict[int, tuple[int, bytes]]


def some(rng: np.random.Generator, most: int, keys: int = 5000) -> tuple[Any, Any]:
    """Keys of a small range, the ends of all numbers among them, and rows."""
    found = np.unique(rng.integers(0, keys, rng.integers(1, most), np.uint64))
    found = np.where(found == keys - 1, np.uint64(2**64 - 1), found)
    return found, rng.integers(0, 256, (len(found), WIDTH), np.uint8)


def written(model: Model, keys: Any, rows: Any, step: int) -> Model:
    """What a model is after a write."""
    return model | {int(k): (step, bytes(r)) for k, r in zip(keys, rows, strict=True)}


def agrees(found: RowStore, model: Model, keys: Any) -> None:
    """Asserts that a store has what a model has."""
    read = found.read(keys)
    for key, is_there, step, row in zip(keys, read.has_row, read.steps, read.rows, strict=True):
        expected = model.get(int(key))
        assert (int(step), bytes(row)) == ((0, bytes(WIDTH)) if expected is None else expected)
        assert is_there == (expected is not None)


def history(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes, commits, ends in good order or not, and openings at a version that is kept."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(store, "FEWEST", int(rng.integers(2, 7)))
    monkeypatch.setattr(merging, "MERGED", int(rng.choice([512, 1024, 1 << 21])))
    monkeypatch.setattr(segment, "CHUNK_BYTES", int(rng.choice([1, 1 << 14, 1 << 26])))
    found, now, versions = RowStore(folder, WIDTH), dict[int, tuple[int, bytes]](), dict[int, Model]()
    for step in range(1, 25):
        kind = rng.choice(["write", "write", "commit", "read", "open", "keep", "changed"])
        if kind == "write":
            keys, rows = some(rng, int(rng.choice([4, 300, 3000])))
            found.write(keys, rows, step=step)
            now = written(now, keys, rows, step)
        elif kind == "commit":
            latest, number = found.version, found.commit()
            versions = {v: m for v, m in versions.items() if v <= latest} | {number: now}
        elif kind == "read":
            agrees(found, now, some(rng, 500)[0])
        elif kind == "open":
            found.close()
            at = int(rng.choice(list(versions))) if versions and rng.random() < 0.5 else None
            found = RowStore(folder, WIDTH, version=at)
            now = versions[found.version] if found.version else {}
        elif kind == "keep":
            kept = {v for v in versions if rng.random() < 0.5}
            found.keep(kept)
            versions = {v: m for v, m in versions.items() if v in kept or v == found.version}
        else:
            since = int(rng.integers(0, step))
            parts = list(found.changed_rows(since))
            assert {int(k) for keys, _, _ in parts for k in keys} == {
                k for k, x in now.items() if x[0] > since
            }
        assert found.versions == sorted(versions)
    found.verify()
    agrees(found, now, np.array(sorted({*now, 1, 7, 4998}), np.uint64))
    sizes = [len(s) for s in found.segments]
    many = sizes[: max(0, len(sizes) - store.FEWEST + 1)]
    assert all(size > sum(sizes[k + 1 :]) for k, size in enumerate(many))
    found.close()


@pytest.mark.some(10)
@pytest.mark.parametrize("seed", range(300))
def test_any_history_leaves_what_a_dict_has(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history(seed, tmp_path / "store", monkeypatch)


WRITER = textwrap.dedent("""
    import sys
    import numpy as np
    from sbp.runtime.embedding.tiers.store import RowStore
    from tests.runtime.embedding.tiers.test_store import WIDTH, some
    rng = np.random.default_rng(int(sys.argv[2]))
    with RowStore(sys.argv[1], WIDTH) as store:
        for step in range(1, 10_000):
            store.write(*some(rng, 3000), step=step)
            print(step, store.commit() if step % 3 == 0 else 0, flush=True)
""")


@pytest.mark.some(3)
@pytest.mark.parametrize("seed", range(20))
def test_a_process_that_is_killed_loses_what_came_after_its_last_commit(seed: int, tmp_path: Path) -> None:
    """While it writes, merges or commits; a version that it has printed is there, and whole."""
    folder, rng = tmp_path / "store", np.random.default_rng(seed)
    command = [sys.executable, "-c", WRITER, str(folder), str(seed)]
    root = str(Path(__file__).resolve().parents[3])
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(rng.uniform(0, 0.5))
        writer.send_signal(signal.SIGKILL)
        lines = [line.split() for line in writer.stdout.read().splitlines()]
    printed = max((int(line[1]) for line in lines if len(line) == 2), default=0)
    with RowStore(folder, WIDTH) as found:
        assert found.version >= printed
        again, model = np.random.default_rng(seed), dict[int, tuple[int, bytes]]()
        for step in range(1, 3 * found.version + 1):
            model = written(model, *some(again, 3000), step)
        found.verify()
        agrees(found, model, np.array(sorted(model), np.uint64))
        found.write(np.array([1], np.uint64), np.zeros((1, WIDTH), np.uint8), step=1)
        assert found.commit() == found.version


def filled(folder: Path, width: int = WIDTH) -> RowStore:
    """A store of one version with 3,000 rows."""
    found = RowStore(folder, width)
    keys = np.arange(0, 6000, 2, dtype=np.uint64)
    found.write(keys, np.random.default_rng(0).integers(0, 256, (3000, width), np.uint8), step=1)
    found.commit()
    return found


@pytest.mark.parametrize("suffix", [".keys", ".marks", ".rows", ".fences"])
@pytest.mark.parametrize("seed", range(3))
def test_a_bit_that_has_changed_is_found_and_its_file_named(suffix: str, seed: int, tmp_path: Path) -> None:
    """By a read of all keys, and by the check."""
    filled(tmp_path).close()
    (path,) = tmp_path.glob(f"*{suffix}")
    data, rng = bytearray(path.read_bytes()), np.random.default_rng(seed)
    data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)
    for look in (lambda s: s.verify(), lambda s: s.read(np.arange(0, 6000, dtype=np.uint64))):
        with pytest.raises(StoreError, match=path.stem), RowStore(tmp_path, WIDTH) as found:
            look(found)


def test_a_search_that_a_changed_key_misleads_is_not_believed(tmp_path: Path) -> None:
    """Keys in the middle of the file lead a binary search astray from blocks that are whole."""
    filled(tmp_path).close()
    (path,) = tmp_path.glob("*.keys")
    keys = np.fromfile(path, np.uint64)
    keys[1500] = 0
    keys.tofile(path)
    with RowStore(tmp_path, WIDTH) as found:
        for key in range(0, 1000, 2):
            try:
                assert found.read(np.array([key], np.uint64)).has_row[0]
            except StoreError as e:
                assert "other keys from number 1024 on" in str(e)  # either is right


def failing(at: int, error: int, action: Callable[..., None]) -> Callable[..., None]:
    """An action that fails when it is asked for the time behind so many."""
    left = itertools.count(at, -1)

    def failed(*given: Any) -> None:
        if next(left) <= 0:
            raise OSError(error, os.strerror(error))
        action(*given)

    return failed


FULL_OR_BROKEN = pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])


@FULL_OR_BROKEN
@pytest.mark.parametrize("at", range(10))
def test_a_disk_that_takes_no_more_leaves_all_that_was_there(
    error: int, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever array fails, of the five of a write or of those of the merge behind it."""
    monkeypatch.setattr(store, "FEWEST", 2)
    with filled(tmp_path) as found:
        keys, rows = np.arange(5000, dtype=np.uint64), np.zeros((5000, WIDTH), np.uint8)
        before = found.read(keys)
        names = {p.name for p in tmp_path.iterdir()}
        with monkeypatch.context() as m:
            m.setattr(segment, "_put", failing(at, error, segment._put))
            with pytest.raises(StoreError, match="no space" if error == errno.ENOSPC else "rror"):
                found.write(keys, rows, step=2)
        assert {p.name for p in tmp_path.iterdir()} == names
        np.testing.assert_array_equal(found.read(keys).rows, before.rows)
        found.write(keys, rows, step=2)
        assert found.commit() == 2 and not found.read(keys).rows.any()


@FULL_OR_BROKEN
@pytest.mark.parametrize("at", range(6))
def test_a_commit_that_the_disk_does_not_take_is_none(
    error: int, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file fails, of the four of a segment, that of the version, and the folder."""
    with filled(tmp_path) as found:
        keys, rows = np.arange(5000, dtype=np.uint64), np.zeros((5000, WIDTH), np.uint8)
        found.write(keys, rows, step=2)
        with monkeypatch.context() as m:
            m.setattr(os, "fsync", failing(at, error, os.fsync))
            with pytest.raises(StoreError, match="no space" if error == errno.ENOSPC else "rror"):
                found.commit()
        names = {s.name for s in found.segments}
        assert not found.read(keys).rows.any()
        assert found.commit() >= 2 and not found.read(keys).rows.any()
        if at < 4:
            assert names - {s.name for s in found.segments}, (
                "files that were not synced are written once more"
            )
    with RowStore(tmp_path, WIDTH) as found:
        found.verify()
        assert not found.read(keys).rows.any()


def test_threads_read_while_one_writes_and_merges(tmp_path: Path) -> None:
    """A reader sees each key's row of before a write, or of after it."""
    from concurrent.futures import ThreadPoolExecutor

    keys = np.arange(4000, dtype=np.uint64)
    with RowStore(tmp_path, WIDTH) as found, ThreadPoolExecutor(2) as pool:
        found.write(keys, np.zeros((4000, WIDTH), np.uint8), step=0)

        def read(_: int) -> None:
            for _ in range(40):
                rows = found.read(keys).rows
                assert (rows == rows[:, :1]).all()

        readers = [pool.submit(read, k) for k in range(2)]
        for step in range(1, 30):
            found.write(keys[step::7], np.full((len(keys[step::7]), WIDTH), step, np.uint8), step=step)
        for reader in readers:
            reader.result()


def other(folder: Path) -> RowStore:
    """A store in a folder of something else."""
    (folder / "mine.txt").write_text("mine")
    return RowStore(folder, WIDTH)


def damaged_version(folder: Path) -> RowStore:
    """A store whose version was changed."""
    filled(folder).close()
    (path,) = folder.glob("version_*")
    path.write_text(path.read_text().replace("3000", "3001"))
    return RowStore(folder, WIDTH)


def without_a_file(folder: Path) -> RowStore:
    """A store of which a file is gone."""
    filled(folder).close()
    next(folder.glob("*.rows")).unlink()
    return RowStore(folder, WIDTH)


def opened_twice(folder: Path) -> RowStore:
    """A store that is open already."""
    first = RowStore(folder, WIDTH)
    try:
        return RowStore(folder, WIDTH)
    finally:
        first.close()


def of_format_two(folder: Path) -> RowStore:
    """A store of another version of the library."""
    found = filled(folder)
    found._put(2, {"format": 2, "width": WIDTH, "layout": "", "segments": []})
    found.close()
    return RowStore(folder, WIDTH)


def wrong_keys(folder: Path) -> None:
    """Keys that are not in order."""
    with RowStore(folder, WIDTH) as found:
        found.read(np.array([3, 1], np.uint64))


def wrong_rows(folder: Path) -> None:
    """Rows of another width."""
    with RowStore(folder, WIDTH) as found:
        found.write(np.array([1, 3], np.uint64), np.zeros((2, 8), np.uint8), step=1)


def wrong_type(folder: Path) -> None:
    """Keys of another type."""
    with RowStore(folder, WIDTH) as found:
        found.read(np.array([1, 3]))


def reopened(folder: Path, **given: Any) -> RowStore:
    """A store that is opened again."""
    filled(folder).close()
    return RowStore(folder, **{"width": WIDTH, **given})


SORTED = "keys in ascending order, each once, and a row of bytes for each"
WRITTEN = "the bytes that were written"
WRONG = "training must not go on with wrong rows"
COPY = "an older version, or a copy of this file"
MESSAGES: dict[str, tuple[Callable[[Path], object], str, str, str, str, str]] = {
    "keys": (
        wrong_keys,
        "rows for {folder}",
        "keys that are not in ascending order",
        SORTED,
        "files are sorted by key",
        "np.unique(keys)",
    ),
    "type": (
        wrong_type,
        "rows for {folder}",
        "keys of int64[2]",
        SORTED,
        "files are sorted by key",
        "np.unique(keys)",
    ),
    "rows": (
        wrong_rows,
        "rows for {folder}",
        "uint8[2, 8] for 2 keys, of 16 bytes each",
        SORTED,
        "files are sorted by key",
        "np.unique(keys)",
    ),
    "width": (
        lambda f: reopened(f, width=24),
        "{folder}",
        "a store of rows of 16 bytes",
        "rows of 24 bytes",
        "a row is a vector and its optimizer's state: another table or optimizer has written this store",
        "the tables and the optimizer that it was made with, or an empty folder",
    ),
    "layout": (
        lambda f: reopened(f, layout="w: float32[4]"),
        "{folder}",
        "a store of rows of 16 bytes",
        "rows of 16 bytes: w: float32[4]",
        "a row is a vector and its optimizer's state: another table or optimizer has written this store",
        "the tables and the optimizer that it was made with, or an empty folder",
    ),
    "odd width": (
        lambda f: RowStore(f, 12),
        "{folder}",
        "rows of 12 bytes",
        "a multiple of 8 bytes",
        "rows are checked by words of 8 bytes",
        "pad them",
    ),
    "folder": (
        other,
        "{folder}",
        "a folder with files, and no version of a store among them",
        "an empty folder, or one that a store has written",
        "a store removes files of its folder that no version names",
        "another folder",
    ),
    "version": (
        lambda f: reopened(f, version=7),
        "{folder}",
        "version 7",
        "one of 1",
        "versions that nobody keeps are removed",
        "a version that is kept",
    ),
    "no version": (
        lambda f: RowStore(f, WIDTH, version=7),
        "{folder}",
        "version 7",
        "none: it is empty",
        "versions that nobody keeps are removed",
        "a version that is kept",
    ),
    "damaged version": (
        damaged_version,
        "{folder}/version_000000000001.json",
        "other bytes than were written",
        WRITTEN,
        WRONG,
        COPY,
    ),
    "no file": (without_a_file, "{folder}/segment_000000000001.rows", "no such file", WRITTEN, WRONG, COPY),
    "format": (
        of_format_two,
        "{folder}/version_000000000002.json",
        "format 2",
        "a file of this format",
        "it was changed or written by another version",
        "a copy",
    ),
    "in use": (
        opened_twice,
        "{folder}",
        "a store that another process has open",
        "a store of one's own",
        "one process writes to a store: two would remove each other's files",
        "wait for it",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name: str, tmp_path: Path) -> None:
    call, *texts = MESSAGES[name]
    check_message(lambda: call(tmp_path), StoreError, *(t.replace("{folder}", str(tmp_path)) for t in texts))
