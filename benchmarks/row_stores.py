"""Embedded stores as the home of table rows that no memory holds: rates of reading and writing by key.

    pip install rocksdict lmdb plyvel-ci duckdb tiledb zarr pylance pyarrow
    python -m benchmarks.row_stores [NAME ...] [--rows 4e6] [--folder DIR]

Keys are unsigned 64-bit integers, rows 256 bytes. Every store is filled in batches of sorted keys that are
spread over all rows, is then read and written again in such batches, and gives single rows at the end. A
write counts until it is on the disk. A store that knows positions alone (`memmap`, `zarr`, `lance`) is given
an index of sorted keys in memory. Each runs in a process of its own, and what it has written is thrown away.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

WIDTH, BATCHES, POINTS = 256, 8, 2000
Array = np.ndarray[Any, Any]


class Store:
    """A store of rows by key.

    Arguments:
      folder: that is its own.
      keys: all that it will ever hold, sorted.
    """

    def __init__(self, folder: Path, keys: Array) -> None:
        self.folder, self.keys = folder, keys

    def at(self, keys: Array) -> Array:
        """Positions of keys."""
        return np.searchsorted(self.keys, keys)

    def write(self, keys: Array, rows: Array) -> None:
        """Writes rows of sorted keys, and waits for the disk."""
        raise NotImplementedError

    def read(self, keys: Array) -> Array:
        """Reads rows of sorted keys."""
        raise NotImplementedError


def texts(keys: Array) -> list[bytes]:
    """Keys as bytes that sort as the numbers do."""
    return [bytes(x) for x in keys.astype(">u8").view("V8")]


def lines(rows: Array) -> list[bytes]:
    """Rows as bytes."""
    return [bytes(x) for x in rows.view(f"V{WIDTH}")[:, 0]]


def joined(found: Any) -> Array:
    """Rows of their bytes."""
    return np.frombuffer(b"".join(found), np.uint8).reshape(-1, WIDTH)


class Memmap(Store):
    """One file of rows that NumPy maps."""

    def __init__(self, folder: Path, keys: Array) -> None:
        super().__init__(folder, keys)
        self.map = np.memmap(folder / "rows", np.uint8, "w+", shape=(len(keys), WIDTH))

    def write(self, keys: Array, rows: Array) -> None:
        self.map[self.at(keys)] = rows
        self.map.flush()

    def read(self, keys: Array) -> Array:
        return self.map[self.at(keys)]


class Segments(Store):
    """This project's own."""

    def __init__(self, folder: Path, keys: Array) -> None:
        from sbp.runtime.embedding.tiers.store import RowStore

        super().__init__(folder, keys)
        self.db = RowStore(folder / "store", WIDTH)

    def write(self, keys: Array, rows: Array) -> None:
        self.db.write(keys, rows, step=1)
        self.db.commit()
        self.db.keep(())

    def read(self, keys: Array) -> Array:
        return self.db.read(keys).rows


class Rocks(Store):
    """RocksDB by `rocksdict`."""

    def __init__(self, folder: Path, keys: Array) -> None:
        import rocksdict

        super().__init__(folder, keys)
        self.rocks, self.db = rocksdict, rocksdict.Rdict(str(folder / "db"), rocksdict.Options(raw_mode=True))

    def write(self, keys: Array, rows: Array) -> None:
        batch = self.rocks.WriteBatch(raw_mode=True)
        for key, row in zip(texts(keys), lines(rows), strict=True):
            batch.put(key, row)
        self.db.write(batch)
        self.db.flush()

    def read(self, keys: Array) -> Array:
        return joined(self.db.get(texts(keys)))


class Level(Store):
    """LevelDB by `plyvel`."""

    def __init__(self, folder: Path, keys: Array) -> None:
        import plyvel

        super().__init__(folder, keys)
        self.db = plyvel.DB(str(folder / "db"), create_if_missing=True, write_buffer_size=1 << 27)

    def write(self, keys: Array, rows: Array) -> None:
        with self.db.write_batch(sync=True) as batch:
            for key, row in zip(texts(keys), lines(rows), strict=True):
                batch.put(key, row)

    def read(self, keys: Array) -> Array:
        return joined(map(self.db.get, texts(keys)))


class Lmdb(Store):
    """LMDB."""

    def __init__(self, folder: Path, keys: Array) -> None:
        import lmdb

        super().__init__(folder, keys)
        self.db = lmdb.open(str(folder), map_size=16 * WIDTH * len(keys), writemap=False)

    def write(self, keys: Array, rows: Array) -> None:
        with self.db.begin(write=True) as t:
            t.cursor().putmulti(list(zip(texts(keys), lines(rows), strict=True)))

    def read(self, keys: Array) -> Array:
        with self.db.begin(buffers=True) as t:
            return joined(row for _, row in t.cursor().getmulti(texts(keys)))


class Duck(Store):
    """DuckDB: a table with a primary key, given and read as Arrow."""

    def __init__(self, folder: Path, keys: Array) -> None:
        import duckdb
        import pyarrow

        super().__init__(folder, keys)
        self.arrow, self.db = pyarrow, duckdb.connect(str(folder / "db"))
        self.db.execute("create table rows (key ubigint primary key, row blob)")

    def write(self, keys: Array, rows: Array) -> None:
        given = self.arrow.table({"key": keys, "row": self.arrow.array(lines(rows), self.arrow.binary())})
        self.db.register("given", given)
        self.db.execute("insert or replace into rows select * from given")
        self.db.execute("checkpoint")

    def read(self, keys: Array) -> Array:
        self.db.register("asked", self.arrow.table({"key": keys}))
        found = self.db.execute("select row from rows join asked using (key) order by key").to_arrow_table()
        return joined(found["row"].to_pylist())


class Tile(Store):
    """TileDB: a sparse array."""

    def __init__(self, folder: Path, keys: Array) -> None:
        import tiledb

        super().__init__(folder, keys)
        self.tile, self.path = tiledb, str(folder / "array")
        most = np.iinfo(np.uint64).max - 1_000_000
        domain = tiledb.Domain(tiledb.Dim("key", domain=(0, most), tile=1 << 40, dtype=np.uint64))
        attribute = tiledb.Attr("row", dtype=f"S{WIDTH}")
        tiledb.Array.create(self.path, tiledb.ArraySchema(domain=domain, attrs=[attribute], sparse=True))

    def write(self, keys: Array, rows: Array) -> None:
        with self.tile.open(self.path, "w") as array:
            array[keys] = rows.view(f"S{WIDTH}")[:, 0]

    def read(self, keys: Array) -> Array:
        with self.tile.open(self.path) as array:
            return joined(bytes(x).ljust(WIDTH, b"\0") for x in array.multi_index[list(keys)]["row"])


class Zarr(Store):
    """Zarr: a dense array in chunks, without compression."""

    def __init__(self, folder: Path, keys: Array) -> None:
        import zarr

        super().__init__(folder, keys)
        shape, chunks = (len(keys), WIDTH), (4096, WIDTH)
        where = str(folder / "array")
        self.array = zarr.create_array(where, shape=shape, chunks=chunks, dtype="uint8", compressors=None)

    def write(self, keys: Array, rows: Array) -> None:
        self.array.oindex[self.at(keys)] = rows
        os.sync()

    def read(self, keys: Array) -> Array:
        return np.asarray(self.array.oindex[self.at(keys)])


class Lance(Store):
    """Lance: rows that are written again are new rows; an index in memory says which counts."""

    def __init__(self, folder: Path, keys: Array) -> None:
        import lance
        import pyarrow

        super().__init__(folder, keys)
        self.lance, self.arrow, self.path = lance, pyarrow, str(folder / "rows")
        self.place, self.count = np.zeros(len(keys), np.int64), 0

    def write(self, keys: Array, rows: Array) -> None:
        flat = self.arrow.FixedSizeListArray.from_arrays(self.arrow.array(rows.reshape(-1)), WIDTH)
        table = self.arrow.table({"row": flat})
        self.data = self.lance.write_dataset(table, self.path, mode="append" if self.count else "create")
        os.sync()
        self.place[self.at(keys)] = self.count + np.arange(len(keys))
        self.count += len(keys)

    def read(self, keys: Array) -> Array:
        place = self.place[self.at(keys)]
        order = np.argsort(place)
        found = self.data.take(place[order])["row"].combine_chunks().flatten().to_numpy().reshape(-1, WIDTH)
        out = np.empty_like(found)
        out[order] = found
        return out


STORES: Mapping[str, Callable[[Path, Array], Store]] = {
    "segments": Segments,
    "memmap": Memmap,
    "rocksdb": Rocks,
    "leveldb": Level,
    "lmdb": Lmdb,
    "duckdb": Duck,
    "tiledb": Tile,
    "zarr": Zarr,
    "lance": Lance,
}


def rates(name: str, rows: int, folder: str) -> dict[str, float]:
    """Rows a second of a store: filled, written again, read in batches, one by one; and its bytes for each
    byte of rows."""
    rng, seconds = np.random.default_rng(0), dict[str, float]()
    keys = np.unique(rng.integers(0, 1 << 48, rows, np.uint64))
    data = rng.integers(1, 255, (len(keys), WIDTH), np.uint8)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        store, began = STORES[name](Path(own), keys), time.perf_counter()
        for at in (np.arange(k, len(keys), BATCHES) for k in range(BATCHES)):
            store.write(keys[at], data[at])
        seconds["fill"] = len(keys) / (time.perf_counter() - began)
        again = np.sort(rng.choice(len(keys), len(keys) // BATCHES, replace=False))
        data[again] ^= 1
        began = time.perf_counter()
        store.write(keys[again], data[again])
        seconds["write again"] = len(again) / (time.perf_counter() - began)
        asked = np.sort(rng.choice(len(keys), len(keys) // BATCHES, replace=False))
        began = time.perf_counter()
        found = store.read(keys[asked])
        seconds["read"] = len(asked) / (time.perf_counter() - began)
        assert np.array_equal(found, data[asked]), name
        singles = rng.choice(len(keys), POINTS)
        began = time.perf_counter()
        for i in singles:
            store.read(keys[i : i + 1])
        seconds["read one"] = POINTS / (time.perf_counter() - began)
        size = sum(f.stat().st_blocks * 512 for f in Path(own).rglob("*") if f.is_file())
        seconds["bytes"] = size / data.nbytes
    return seconds


def main() -> None:
    """Prints the rates."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("names", nargs="*", default=list(STORES), help=", ".join(STORES))
    options.add_argument("--rows", type=float, default=4e6)
    options.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk that is measured")
    asked = options.parse_args()
    print(f"{int(asked.rows):,} rows of {WIDTH} bytes\n")
    print("| store | fill, rows/s | write again | read sorted | read one | bytes on disk |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in asked.names:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            try:
                found = pool.apply(rates, (name, int(asked.rows), asked.folder))
            except ImportError as missing:
                print(f"| {name} | not installed: {missing.name} |", flush=True)
                continue
        fill, again, read, one, size = found.values()
        print(f"| {name} | {fill:,.0f} | {again:,.0f} | {read:,.0f} | {one:,.0f} | {size:.2f} |", flush=True)


if __name__ == "__main__":
    main()
