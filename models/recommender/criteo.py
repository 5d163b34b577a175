"""Readers of Criteo's two layouts, tab-separated text and Parquet, as streams of blocks.

`blocks` reads and decompresses, `parse` turns one block into a batch; they are apart so that several threads
can parse what one thread reads (`stages`). `batches` does both, in one thread.

Source of the layout: Criteo, "Display Advertising Challenge", 2014, and "Terabyte Click Logs", 2015.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from models.recommender.batch import Batch, concatenate, drop_rows, rebatch
from models.recommender.columns import BadField, convert, unreadable
from models.recommender.layout import CRITEO, DataError, Layout
from sbp.errors import Problem

BLOCK_BYTES = 8 << 20
BLOCK_ROWS = 1 << 15
SHOWN = 80
PARQUET = (".parquet", ".pq")


def refuse(problem: Problem) -> None:
    """What is done with a bad line unless you say otherwise: it is an error."""
    raise DataError(problem)


@dataclass(slots=True)
class Skip:
    """Bad lines are left out and counted: pass it as `bad_lines`.

    Arguments:
      most: bad lines after which one more is an error; a file of another layout has nothing else.

    Attributes:
      problems: what was left out, in the order in which it was found.
    """

    most: int = 1000
    problems: list[Problem] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __call__(self, problem: Problem) -> None:
        """Takes note of one bad line; several threads may do so."""
        with self._lock:
            if len(self.problems) >= self.most:
                fix = f"{self.most:,} bad lines were skipped before it: another layout, or Skip(most=...)"
                raise DataError(replace(problem, fix=fix))
            self.problems.append(problem)

    @property
    def count(self) -> int:
        """How many lines were left out."""
        return len(self.problems)


BadLines: TypeAlias = Callable[[Problem], None]


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of a file, not parsed yet.

    Arguments:
      path: of the file.
      first: the number of the first line (row of a Parquet file), from 1.
      rows: how many.
      body: whole lines of text, or columns.
      layout: what the columns are.
    """

    path: str
    first: int
    rows: int
    body: bytes | pa.RecordBatch
    layout: Layout

    def __len__(self) -> int:
        return self.rows

    def drop(self, rows: int) -> Block:
        """What is behind the first rows."""
        return self.cut(rows)[1]

    def halves(self) -> tuple[Block, Block]:
        """The first and the second half of the rows."""
        return self.cut(self.rows // 2)

    def cut(self, cut: int) -> tuple[Block, Block]:
        """The first rows, and what is behind them."""
        parts: tuple[bytes, bytes] | tuple[pa.RecordBatch, pa.RecordBatch]
        if isinstance(self.body, bytes):
            lines = _lines(self.body)
            parts = b"".join(lines[:cut]), b"".join(lines[cut:])
        else:
            parts = self.body.slice(0, cut), self.body.slice(cut)
        return (
            replace(self, rows=cut, body=parts[0]),
            replace(self, first=self.first + cut, rows=self.rows - cut, body=parts[1]),
        )


def batches(
    paths: str | Path | Iterable[str | Path],
    size: int,
    *,
    layout: Layout = CRITEO,
    bad_lines: BadLines = refuse,
    drop_last: bool = False,
) -> Iterator[Batch]:
    """The rows of files in batches of `size`: read, parsed and cut in one thread, never a whole file at once.

    Arguments:
      paths: of files, read one after the other: `.parquet` and `.pq` are Parquet, all others tab-separated
        text, compressed if the name ends so (`.gz`, `.bz2`, `.zst`).
      bad_lines: called with each line that cannot be read: `refuse`, or a `Skip()`.

    Raises:
      DataError: for a bad line, a missing column, or a file that is truncated.
    """
    parsed = (parse(block, bad_lines) for block in blocks(paths, layout=layout))
    return rebatch(parsed, size, drop_last=drop_last)


def blocks(
    paths: str | Path | Iterable[str | Path], *, layout: Layout = CRITEO, skip: int = 0
) -> Generator[Block, None, int]:
    """The files piece by piece; for `parse`.

    Arguments:
      skip: rows at the beginning that are left out. Text is read up to there and not parsed; of Parquet files
        row groups that lie before are not read.

    Returns:
      How many rows are still to be left out, where the files have fewer.

    Raises:
      DataError: for a missing column, or a file that is truncated.
    """
    for path in [paths] if isinstance(paths, str | Path) else paths:
        if Path(path).suffix in PARQUET:
            skip = yield from _columns(str(path), layout, skip)
        else:
            skip = yield from drop_rows(_text(str(path), layout), skip)
    return skip


def parse(block: Block, bad_lines: BadLines = refuse) -> Batch:
    """The batch of a block; of several threads each may parse another block.

    Raises:
      DataError: from `refuse`, for a bad line.
    """
    try:
        return convert(_table(block), block.layout)
    except (pa.ArrowInvalid, BadField) as error:
        # The same parser finds the line, on ever smaller halves: there is no second one to disagree with it.
        if block.rows > 1:
            return concatenate([parse(half, bad_lines) for half in block.halves()])
        bad_lines(_problem(block, error))
        return _nothing(block.layout)


def _text(path: str, layout: Layout) -> Iterator[Block]:
    """The blocks of tab-separated text, cut after whole lines."""
    first, rest = 1, b""
    with _reading(path), pa.input_stream(path, compression="detect") as stream:
        while piece := stream.read(BLOCK_BYTES):
            end = piece.rfind(b"\n") + 1
            body, rest = (rest + piece[:end], piece[end:]) if end else (b"", rest + piece)
            if body:
                rows = body.count(b"\n")
                yield Block(path, first, rows, body, layout)
                first += rows
    if rest:
        yield Block(path, first, 1, rest, layout)


def _columns(path: str, layout: Layout, skip: int) -> Generator[Block, None, int]:
    """The blocks of a Parquet file behind the first rows; returns how many are left of these."""
    with _reading(path), pyarrow.parquet.ParquetFile(path) as file:
        _check(path, file.schema_arrow, layout)
        ends = np.cumsum([file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)], dtype=int)
        group = int(np.searchsorted(ends, skip, side="right"))  # of the first row that is wanted
        before = int(ends[group - 1]) if group else 0
        return (yield from drop_rows(_records(file, group, before, path, layout), skip - before))


def _records(
    file: pyarrow.parquet.ParquetFile, group: int, before: int, path: str, layout: Layout
) -> Iterator[Block]:
    """The blocks of the row groups from one on, which has so many rows before it."""
    groups, first = list(range(group, file.num_row_groups)), 1 + before
    for record in file.iter_batches(BLOCK_ROWS, row_groups=groups, columns=layout.names):
        yield Block(path, first, record.num_rows, record, layout)
        first += record.num_rows


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """What goes wrong inside is a fault of the file."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, PermissionError):
        raise
    except (pa.ArrowInvalid, OSError) as error:
        got = f"{Path(path).stat().st_size:,} bytes; {_line(str(error))}"
        why = "it ends too early or is damaged"
        problem = Problem("data", path, got, "a whole file", why, "download or write it again")
        raise DataError(problem) from error


def _check(path: str, schema: pa.Schema, layout: Layout) -> None:
    """Refuses a Parquet file that lacks a column, or has it with another type."""
    problems = []
    for name in layout.names:
        legal = "a column of that name"
        got = f"columns {', '.join(schema.names)}"
        if schema.names.count(name) == 1:
            kind = schema.field(name).type
            got = f"column {name} of type {kind}"
            legal = unreadable(kind, categorical=name in layout.categorical) or ""
        if legal:
            why, fix = f"the layout has a column {name}", "give the names as layout=Layout(...)"
            problems.append(Problem("data", path, got, legal, why, fix))
    if problems:
        raise DataError(*problems)


def _table(block: Block) -> pa.Table:
    """The columns of a block, text as integers and strings."""
    if not isinstance(block.body, bytes):
        return pa.Table.from_batches([block.body])
    if b"x" in block.body or b"X" in block.body:
        raise BadField("a number with an x")  # Arrow would take 0x10 for 16
    layout = block.layout
    types = {name: pa.string() if name in layout.categorical else pa.int64() for name in layout.names}
    table = pyarrow.csv.read_csv(
        pa.BufferReader(block.body),
        pyarrow.csv.ReadOptions(column_names=layout.names, use_threads=False, block_size=len(block.body) + 1),
        pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
        pyarrow.csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
    )
    if table.num_rows != block.rows:
        raise BadField(f"{table.num_rows} lines, where {block.rows} end with a newline")
    return table


def _problem(block: Block, error: Exception) -> Problem:
    got, kind = str(block.body), "row"
    legal = "a label of 0 or 1, numbers or blanks, keys or blanks"
    if isinstance(block.body, bytes):
        got, kind = repr(block.body.decode(errors="replace").rstrip("\r\n")), "line"
        numbers, keys = len(block.layout.dense), len(block.layout.categorical)
        legal = f"0 or 1, {numbers} integers or blanks, {keys} hexadecimal keys or blanks; tabs between"
    else:
        got = str(block.body.to_pylist()[0])
    # Arrow counts columns from 0, and the one line that it was given is its row 1.
    numbered = re.sub(
        r"In CSV column #(\d+): ", lambda at: f"column {block.layout.names[int(at[1])]}: ", str(error)
    )
    why, fix = _line(re.sub(r"Row #1: ", "", numbered)), "bad_lines=Skip() leaves out such lines"
    return Problem("data", f"{block.path}, {kind} {block.first}", _line(got), legal, why, fix)


def _line(text: str) -> str:
    """A text on one short line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= SHOWN else flat[: SHOWN - 3] + "..."


def _lines(text: bytes) -> list[bytes]:
    """The lines of a text, cut at newlines only (`bytes.splitlines` cuts at a lone carriage return too)."""
    return [line + b"\n" for line in text.removesuffix(b"\n").split(b"\n")]


def _nothing(layout: Layout) -> Batch:
    keys = np.empty((0, len(layout.categorical)), np.int64)
    return Batch(np.empty(0, np.float32), np.empty((0, len(layout.dense)), np.float32), keys)
