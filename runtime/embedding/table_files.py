"""A table as a file that others read: Parquet with its ids and every array, or NumPy with one array."""

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from sbp.compat.untyped import PyTree, partition_spec
from sbp.errors import EmbeddingError
from sbp.runtime.embedding.collection import Collection
from sbp.runtime.embedding.keys import problem

PIECE_ROWS = 1 << 16
"""That are on the host at once."""
ID, ROW = "id", "row"
Lines = Mapping[str, NDArray[Any]]
"""Of each array, its lines for some ids."""


def export_table(tables: Collection, tree: PyTree, table: str, path: str | os.PathLike[str]) -> None:
    """Writes one table to a file, piece by piece; an old file is replaced in one step.

    All processes call it; process 0 writes.

    Arguments:
      tree, table: as of `Collection.read`.
      path: "....parquet" gets a column `id` and one for each array, named by its path without the stack
        (`row` if that is all of it); "....npy" gets the rows of the only array. bfloat16 becomes float32.

    Raises:
      EmbeddingError: for another kind of file, several arrays for NumPy, or without pyarrow for Parquet.

    >>> import tempfile
    >>> from sbp.runtime import embedding as em
    >>> tables = em.Collection([em.FeatureConfig("f", em.TableConfig("t", 3, 2))])
    >>> params = tables.init(jax.random.key(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_table(tables, params, "t", f"{folder}/t.npy")
    ...     again = import_table(tables, tables.init(jax.random.key(1)), "t", f"{folder}/t.npy")
    >>> bool((tables.unstack(again)["t"] == tables.read(params, "t", range(3))[tables.stack_of("t")]).all())
    True
    """
    file, write = Path(path), _kind(path, {".parquet": _write_parquet, ".npy": _write_numpy})
    rows = tables.rows_of(table)

    def pieces() -> Iterator[tuple[NDArray[np.int32], Lines]]:
        for begin in range(0, rows, PIECE_ROWS):
            ids = np.arange(begin, min(begin + PIECE_ROWS, rows), dtype=np.int32)
            yield ids, _columns(tables, table, jax.tree.map(_on_host, tables.read(tree, table, ids)))

    unfinished = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        if jax.process_index() == 0:
            write(unfinished, rows, pieces())
            os.replace(unfinished, file)
        else:
            for _ in pieces():
                pass
    finally:
        unfinished.unlink(missing_ok=True)


def import_table(tables: Collection, tree: PyTree, table: str, path: str | os.PathLike[str]) -> PyTree:
    """The tree with rows of one table from a file, piece by piece; its arrays of the stack are donated.

    Arguments:
      tree, table: as of `Collection.write`.
      path: as of `export_table`; Parquet may have some of the ids, or no column `id` but all rows in order,
        and some of the arrays.

    Raises:
      EmbeddingError: for another kind of file, columns or rows that the table has not, or without pyarrow.
    """
    read = _kind(path, {".parquet": _read_parquet, ".npy": _read_numpy})
    empty = tables.read(tree, table, np.zeros(0, np.int32))
    known, begin = _columns(tables, table, empty), 0
    for given in read(Path(path)):
        lines = dict(given)
        if lines.keys() == {ROW} and len(known) == 1:
            lines = dict.fromkeys(known, lines[ROW])
        count = len(next(iter(lines.values())))
        ids = lines.pop(ID, np.arange(begin, begin + count))
        begin += count
        if unknown := sorted(lines.keys() - known.keys()):
            why, fix = "a column is written to the array of its name", "columns that export_table has named"
            got, legal = ", ".join(map(repr, unknown)), ", ".join(map(repr, known))
            raise EmbeddingError(problem(f"{path}", got, legal, why, fix))
        values = jax.tree.map_with_path(lambda at, _, lines=lines: lines.get(_name(tables, table, at)), empty)
        tree = tables.write(tree, table, ids, values)
    return tree


# -- inside


def _columns(tables: Collection, table: str, read: PyTree) -> dict[str, Any]:
    """The lines of a tree that `read` gave, by their names in a file."""
    return {_name(tables, table, path): x for path, x in jax.tree.leaves_with_path(read)}


def _on_host(x: jax.Array) -> NDArray[Any]:
    """Lines as every process has them: their columns may be on devices of others."""
    if isinstance(x.sharding, NamedSharding):
        x = jax.device_put(x, NamedSharding(x.sharding.mesh, partition_spec()))
    return np.asarray(x)


def _name(tables: Collection, table: str, path: Any) -> str:
    stack = tables.stack_of(table)
    return jax.tree_util.keystr(tuple(key for key in path if getattr(key, "key", None) != stack)) or ROW


def _kind(path: str | os.PathLike[str], known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    suffix = Path(path).suffix
    if suffix not in known:
        why, fix = "the end of the name says what the file is", "Parquet, which holds every array and its ids"
        got, legal = f"a file *{suffix}", " or ".join(f"*{s}" for s in known)
        raise EmbeddingError(problem(f"{path}", got, legal, why, fix))
    return known[suffix]


def _plain(lines: NDArray[Any]) -> NDArray[Any]:
    """Numbers that files have a type for."""
    return lines if lines.dtype.kind in "iufb" else lines.astype(np.float32)


def _write_numpy(file: Path, rows: int, pieces: Iterator[tuple[NDArray[np.int32], Lines]]) -> None:
    out: Any = None
    for ids, lines in pieces:
        if len(lines) != 1:
            why, got = "a file of NumPy is one array", f"{len(lines)} arrays: {', '.join(lines)}"
            fix = "*.parquet, or the tree of the parameters alone"
            raise EmbeddingError(problem("*.npy", got, "one array", why, fix))
        (values,) = map(_plain, lines.values())
        if out is None:
            out = np.lib.format.open_memmap(file, "w+", values.dtype, (rows, *values.shape[1:]))
        out[ids] = values
    out.flush()


def _read_numpy(file: Path) -> Iterator[Lines]:
    whole = np.load(file, mmap_mode="r", allow_pickle=False)
    for begin in range(0, len(whole), PIECE_ROWS):
        yield {ROW: np.asarray(whole[begin : begin + PIECE_ROWS])}


def _write_parquet(file: Path, rows: int, pieces: Iterator[tuple[NDArray[np.int32], Lines]]) -> None:
    with _needs_pyarrow():
        pa, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    writer = None
    try:
        for ids, lines in pieces:
            piece = pa.table({ID: ids, **{name: _to_arrow(pa, _plain(x)) for name, x in lines.items()}})
            writer = writer or parquet.ParquetWriter(file, piece.schema)
            writer.write_table(piece)
    finally:
        if writer is not None:
            writer.close()


def _to_arrow(pa: Any, lines: NDArray[Any]) -> Any:
    if lines.ndim == 1:
        return pa.array(lines)
    return pa.FixedSizeListArray.from_arrays(pa.array(lines.reshape(-1)), int(np.prod(lines.shape[1:])))


def _read_parquet(file: Path) -> Iterator[Lines]:
    with _needs_pyarrow():
        parquet = import_module("pyarrow.parquet")
    with parquet.ParquetFile(file) as found:
        for batch in found.iter_batches(PIECE_ROWS):
            yield {name: _from_arrow(batch.column(name)) for name in batch.schema.names}


def _from_arrow(column: Any) -> NDArray[Any]:
    """A column of numbers, or of lists of one length."""
    if not hasattr(column, "flatten") or not hasattr(column.type, "value_type"):
        return np.asarray(column)
    return np.asarray(column.flatten()).reshape(len(column), -1)


@contextmanager
def _needs_pyarrow() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as e:
        why, fix = "Parquet is read and written by it", "pip install 'sbp-jax[recommender]', or *.npy"
        raise EmbeddingError(problem("*.parquet", "no pyarrow", "pyarrow", why, fix)) from e
