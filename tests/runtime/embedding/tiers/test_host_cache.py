"""Rows of a store that the host holds: random histories against a dict, and what they cost."""

from pathlib import Path

import numpy as np
import pytest

from sbp.errors import StoreError
from sbp.runtime.embedding.tiers.host_cache import INDEX_BYTES, SLOT_BYTES, HostCache, RowSources, cached_rows
from sbp.runtime.embedding.tiers.store import RowStore
from tests.errors.messages import check_message
from tests.runtime.embedding.tiers.test_store import WIDTH, Model, some, written


def agrees(cache: HostCache, model: Model, keys: np.ndarray) -> None:
    """Asserts that a cache and its store have what a model has."""
    read = cache.read(keys)
    for key, is_there, step, row in zip(keys, read.has_row, read.steps, read.rows, strict=True):
        expected = model.get(int(key))
        assert (int(step), bytes(row)) == ((0, bytes(WIDTH)) if expected is None else expected)
        assert is_there == (expected is not None)


@pytest.mark.some(10)
@pytest.mark.parametrize("seed", range(200))
def test_any_history_leaves_what_a_dict_has(seed: int, tmp_path: Path) -> None:
    """With room for a few rows, for some and for all; what was committed is there in a new process."""
    rng = np.random.default_rng(seed)
    now, kept = dict[int, tuple[int, bytes]](), dict[int, tuple[int, bytes]]()
    room = int(rng.choice([200, 5_000, 60_000, 1_000_000]))
    store = RowStore(tmp_path, WIDTH)
    cache = HostCache(store, room)
    for step in range(1, 25):
        kind = rng.choice(["write", "write", "read", "flush", "open"])
        if kind == "write":
            keys, rows = some(rng, int(rng.choice([4, 300, 3000])))
            cache.write(keys, rows, step=step)
            now = written(now, keys, rows, step)
        elif kind == "read":
            agrees(cache, now, some(rng, int(rng.choice([4, 500, 3000])))[0])
        elif kind == "flush":
            cache.flush()
            store.commit()
            assert cache.dirty_rows == 0
            kept = now
        elif rng.random() < 0.3:
            store.close()
            store = RowStore(tmp_path, WIDTH)
            cache, now = HostCache(store, room), kept
        assert len(cache) <= cache.slots
    agrees(cache, now, np.array(sorted({*now, 1, 4998}), np.uint64))
    store.close()


def test_rows_that_were_used_last_stay(tmp_path: Path) -> None:
    """Others are read from the disk again; what nobody has written is new."""
    keys = np.arange(100, dtype=np.uint64)
    with RowStore(tmp_path, WIDTH) as store:
        store.write(keys, np.ones((100, WIDTH), np.uint8), step=1)
        cache = HostCache(store, 3600)
        assert cache.slots == 50
        cache.read(keys[:30])
        cache.read(keys[30:50])
        cache.read(keys[20:30])
        cache.read(keys[50:60])
        begun = cache.sources
        assert begun == RowSources(10, 60, 0)
        cache.read(np.concatenate([keys[20:60], np.array([900], np.uint64)]))
        assert cache.sources == begun + RowSources(40, 0, 1)


def test_rows_without_room_go_to_the_store_at_once(tmp_path: Path) -> None:
    keys = np.arange(1000, dtype=np.uint64)
    with RowStore(tmp_path, WIDTH) as store:
        cache = HostCache(store, 3000)
        cache.write(keys, np.ones((1000, WIDTH), np.uint8), step=1)
        assert len(cache) == cache.slots and len(store) == 1000 - cache.slots
        cache.flush()
        assert store.read(keys).has_row.all()


@pytest.mark.parametrize("width", [8, 256, 1024])
@pytest.mark.parametrize("host_bytes", [100, 5_000, 123_456, 1 << 26])
def test_a_cache_keeps_to_its_bytes(width: int, host_bytes: int) -> None:
    """And another row would not fit, or would need an index of twice the size."""
    rows = cached_rows(host_bytes, width)

    def size(rows: int) -> int:
        return rows * (width + SLOT_BYTES) + INDEX_BYTES * (1 << (2 * rows - 1).bit_length())

    assert not rows or size(rows) <= host_bytes
    assert size(rows + 1) > host_bytes


def test_a_cache_of_less_than_a_row_is_refused(tmp_path: Path) -> None:
    with RowStore(tmp_path, WIDTH) as store:
        check_message(
            lambda: HostCache(store, 50),
            StoreError,
            f"a cache of {tmp_path}",
            "50 B",
            "65 B or more",
            "a row and what is held for it",
            "more of the host's memory",
        )
