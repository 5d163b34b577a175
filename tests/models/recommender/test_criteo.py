"""Criteo's two layouts: what is read, and what is refused."""

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from models.recommender import columns, criteo
from models.recommender.batch import Batch, as_lists, concatenate
from models.recommender.columns import BLANK
from models.recommender.criteo import Skip
from models.recommender.layout import CRITEO, PREPARED, DataError, Layout, as_is

SMALL = Layout("label", ("I1", "I2"), ("C1", "C2"))
TEXT = "1\t3\t\t68fd1e64\t\n0\t-2\t100\t\tffffffff\n1\t\t0\t7fffffffffffffff\t00000001\n"
LABEL, NUMBERS = [1, 0, 1], [[3, 0], [-2, 100], [0, 0]]
KEYS = [[0x68FD1E64, BLANK], [BLANK, 0xFFFFFFFF], [2**63 - 1, 1]]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str | bytes | pa.Table, str], Path]:
    def write(content: str | bytes | pa.Table, name: str) -> Path:
        path = tmp_path / name
        if isinstance(content, pa.Table):
            pq.write_table(content, path, row_group_size=3)
            return path
        raw = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        return path

    return write


def read(path: Path, layout: Layout = SMALL, **options: criteo.BadLines) -> Batch:
    return concatenate(list(criteo.batches(path, 1000, layout=layout, **options)))


def check(batch: Batch) -> None:
    assert (batch.label.dtype, batch.dense.dtype) == (np.float32, np.float32)
    assert batch.label.tolist() == LABEL
    np.testing.assert_allclose(batch.dense, np.log1p(np.maximum(NUMBERS, 0)), rtol=1e-6)
    assert isinstance(batch.keys, np.ndarray)
    assert batch.keys.dtype == np.int64
    assert batch.keys.tolist() == KEYS


def small_table() -> pa.Table:
    """What TEXT says, with the columns in another order and one too many."""
    text = [[None if key == BLANK else f"{key:08x}" for key in column] for column in zip(*KEYS, strict=True)]
    return pa.table({"C2": text[1], "extra": [0, 0, 0], "label": LABEL, "I2": [None, 100, 0],
                     "I1": [3, -2, None], "C1": text[0]})  # fmt: skip


@pytest.mark.parametrize("name", ["day_0", "day_0.tsv", "day_0.gz"])
@pytest.mark.parametrize("ending", ["\n", "", "\r\n"])
@pytest.mark.parametrize("block_bytes", [1 << 20, 7])
def test_text_is_read(
    write: Callable[..., Path], name: str, ending: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo, "BLOCK_BYTES", block_bytes)
    text = TEXT.replace("\n", "\r\n") if ending == "\r\n" else TEXT.removesuffix("\n") + ending
    check(read(write(text, name)))


@pytest.mark.parametrize("block_rows", [1 << 10, 2])
def test_parquet_is_read(
    write: Callable[..., Path], block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo, "BLOCK_ROWS", block_rows)
    check(read(write(small_table(), "day_0.parquet")))


@pytest.mark.parametrize("skip", range(8))
def test_rows_are_skipped_without_parsing_them(
    write: Callable[..., Path], skip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over blocks, row groups and files; what is left are the same rows, with their numbers in the file."""
    monkeypatch.setattr(criteo, "BLOCK_BYTES", 7)
    monkeypatch.setattr(criteo, "BLOCK_ROWS", 2)
    twice = pa.concat_tables([small_table()] * 2).slice(0, 4)  # row groups of 3 and 1
    files = [write(TEXT, "day_0"), write(twice, "day_1.parquet")]
    blocks = criteo.blocks(files, layout=SMALL, skip=skip)
    left, found = [], 0
    try:
        while True:
            left.append(next(blocks))
    except StopIteration as end:
        found = end.value
    assert found == max(0, skip - 7)
    whole = [criteo.parse(block) for block in criteo.blocks(files, layout=SMALL)]
    assert sum(map(len, left)) == max(0, 7 - skip)
    wanted = concatenate(whole).rows_between(min(skip, 7), 7)
    if left:
        jax.tree.map(
            np.testing.assert_array_equal, concatenate([criteo.parse(block) for block in left]), wanted
        )
        assert left[0].first == (skip + 1 if skip < 3 else skip - 2)


def test_row_groups_that_are_skipped_are_not_read(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(pa.concat_tables([small_table()] * 3), "day.parquet")  # row groups of 3
    asked: list[list[int]] = []

    class ScheduleTimes(pq.ParquetFile):  # type: ignore[misc]
        def iter_batches(self, *args: Any, row_groups: list[int], **options: Any) -> Any:
            asked.append(row_groups)
            return super().iter_batches(*args, row_groups=row_groups, **options)

    monkeypatch.setattr(criteo.pyarrow.parquet, "ParquetFile", ScheduleTimes)
    blocks = list(criteo.blocks(path, layout=SMALL, skip=7))
    assert asked == [[2]]
    assert [(block.first, block.rows) for block in blocks] == [(8, 2)]


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.int32(), pa.uint8(), pa.float64(), pa.float32(), pa.bool_()], ids=str
)
def test_labels_and_numbers_of_any_type(write: Callable[..., Path], kind: pa.DataType) -> None:
    """pandas writes integers with blanks as floats, and blanks as NaN."""
    table = small_table().set_column(2, "label", pa.array(LABEL).cast(kind))
    numbers = pa.array([3, float("nan"), -2]) if pa.types.is_floating(kind) else pa.array([3, None, -2])
    batch = read(write(table.set_column(4, "I1", numbers), "a.parquet"))
    assert batch.label.tolist() == LABEL
    np.testing.assert_allclose(batch.dense[:, 0], np.log1p([3, 0, 0]), rtol=1e-6)


@pytest.mark.parametrize("kind", [pa.int32(), pa.uint64(), pa.dictionary(pa.int8(), pa.int64())], ids=str)
def test_keys_of_any_type(write: Callable[..., Path], kind: pa.DataType) -> None:
    plain = pa.array([5, None, 9])
    column = plain.dictionary_encode() if pa.types.is_dictionary(kind) else plain.cast(kind)
    batch = read(write(small_table().set_column(5, "C1", column), "a.parquet"))
    assert isinstance(batch.keys, np.ndarray)
    assert batch.keys[:, 0].tolist() == [5, BLANK, 9]


@pytest.mark.parametrize("values", [[[1, 2], [], [3]], [["1", "2"], [], ["3"]]], ids=["integers", "text"])
def test_lists_are_multi_hot(write: Callable[..., Path], values: list[list[object]]) -> None:
    batch = read(write(small_table().set_column(5, "C1", pa.array(values)), "a.parquet"))
    assert isinstance(batch.keys, tuple)
    assert batch.keys[0].values.tolist() == [1, 2, 3]
    assert batch.keys[0].offsets.tolist() == [0, 2, 2, 3]
    assert as_lists(batch.keys)[1].values.tolist() == [BLANK, 0xFFFFFFFF, 1]


def test_blanks_in_lists(write: Callable[..., Path]) -> None:
    """A list that is null is empty, whatever it owns in the file; a null in a list is a blank."""
    column = pa.array([[1, None], None, [3]])
    batch = read(write(small_table().set_column(5, "C1", column), "a.parquet"))
    assert isinstance(batch.keys, tuple)
    assert batch.keys[0].values.tolist() == [1, BLANK, 3]
    assert batch.keys[0].offsets.tolist() == [0, 2, 2, 3]
    owning = pa.ListArray.from_arrays(
        [0, 1, 3, 4], pa.array([7, 8, 8, 9]), mask=pa.array([False, True, False])
    )
    lists = columns._keys(pa.table({"C1": owning}), "C1")
    assert lists.values.tolist() == [7, 9]
    assert lists.offsets.tolist() == [0, 1, 1, 2]


def test_prepared_numbers_are_taken_as_they_are(write: Callable[..., Path]) -> None:
    table = small_table().set_column(4, "I1", pa.array([-1.5, None, 2.0]))
    batch = read(write(table, "a.parquet"), replace(SMALL, scale=as_is))
    assert batch.dense[:, 0].tolist() == [-1.5, 0, 2]


def test_criteo_has_its_columns(write: Callable[..., Path]) -> None:
    line = "\t".join(["1", *map(str, range(13)), *(f"{i:08x}" for i in range(26))])
    batch = read(write(line, "train.txt"), CRITEO)
    assert (batch.dense.shape, batch.keys.tolist()) == ((1, 13), [list(range(26))])
    assert PREPARED.names == CRITEO.names


def test_files_follow_each_other_in_batches_of_one_size(write: Callable[..., Path]) -> None:
    paths = [write(TEXT, "a.tsv"), write(small_table(), "b.parquet"), write(TEXT, "c.gz")]
    parts = list(criteo.batches(paths, 4, layout=SMALL))
    assert [len(part) for part in parts] == [4, 4, 1]
    assert concatenate(parts).label.tolist() == LABEL * 3
    assert [len(part) for part in criteo.batches(paths, 4, layout=SMALL, drop_last=True)] == [4, 4]


# What is wrong -> a line, and what the message says of it.
BAD = {
    "too few columns": ("1\t3\t0\tab", "Expected 5 columns, got 4"),
    "too many columns": ("1\t3\t0\tab\tcd\tef", "Expected 5 columns, got 6"),
    "no line": ("", "Expected 5 columns|neither 0 nor 1"),
    "a blank label": ("\t3\t0\tab\tcd", "column label: neither 0 nor 1"),
    "a label of 2": ("2\t3\t0\tab\tcd", "column label: neither 0 nor 1"),
    "no integer": ("1\tz\t0\tab\tcd", "column I1: CSV conversion error to int64: invalid value 'z'"),
    "a fraction": ("1\t3\t0.5\tab\tcd", "column I2: CSV conversion error"),
    "an integer of 65 bits": ("1\t3\t18446744073709551616\tab\tcd", "column I2: CSV conversion error"),
    "a hexadecimal integer": ("1\t0x10\t0\tab\tcd", "a number with an x"),
    "no key": ("1\t3\t0\tab\txyz", "a number with an x"),
    "no hexadecimal key": ("1\t3\t0\tag\tcd", "column C1: Failed to parse string: '0xag'"),
    "a key of 64 bits": ("1\t3\t0\tffffffffffffffff\tcd", "column C1: a key of more than 63 bits"),
    "a key of 68 bits": ("1\t3\t0\t11112222333344445\tcd", "column C1: Failed to parse string"),
    "the key of blanks": ("1\t3\t0\tffffffffffff\tcd", "column C1: the key 0xffffffffffff stands for blanks"),
    "bytes that are no text": (
        "1\t3\t0\t\udcff\tcd",
        "column C1: CSV conversion error to string: invalid UTF8",
    ),
    "two lines in one": ("1\t3\t0\tab\tcd\r1\t3\t0\tab\tcd", "2 lines, where 1 end with a newline"),
    "a lone carriage return": ("1\t3\t0\ta\rb\tcd", "Expected 5 columns, got 4|lines, where"),
}


@pytest.mark.parametrize(("line", "says"), BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("block_bytes", [1 << 20, 100])
def test_a_bad_line_is_an_error_with_its_number(
    write: Callable[..., Path], line: str, says: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo, "BLOCK_BYTES", block_bytes)
    raw = (TEXT * 20 + line + "\n" + TEXT).encode(errors="surrogateescape")
    path = write(raw, "day_0")
    with pytest.raises(DataError, match=says) as caught:
        read(path)
    assert f"{path}, line 61\n" in str(caught.value)


@pytest.mark.parametrize(("line", "says"), BAD.values(), ids=BAD.keys())
def test_bad_lines_are_skipped_and_counted_when_asked(
    write: Callable[..., Path], line: str, says: str
) -> None:
    raw = "".join([TEXT, line, "\n", TEXT, line, "\n", line, "\n"]).encode(errors="surrogateescape")
    path, skip = write(raw, "day_0.gz"), Skip()
    batch = read(path, bad_lines=skip)
    assert batch.label.tolist() == LABEL * 2
    assert isinstance(batch.keys, np.ndarray)
    assert batch.keys.tolist() == KEYS * 2
    assert [problem.where for problem in skip.problems] == [f"{path}, line {line}" for line in (4, 8, 9)]
    assert skip.count == 3


def test_a_file_with_nothing_but_bad_lines_is_given_up(write: Callable[..., Path], tmp_path: Path) -> None:
    skip = Skip(most=5)
    with pytest.raises(DataError, match="5 bad lines were skipped before it: another layout") as caught:
        read(write("no clicks\n" * 1000, "day_0"), bad_lines=skip)
    assert f"{tmp_path / 'day_0'}, line 6\n  got    'no clicks'" in str(caught.value)
    assert skip.count == 5


@pytest.mark.parametrize(
    ("name", "column", "says"),
    [
        ("C1", pa.array(["ab", "cd", "xy"]), "column C1: Failed to parse string: '0xxy'"),
        ("C1", pa.array([1, 2, 2**64 - 1], pa.uint64()), "not in range"),
        ("C1", pa.array([[1], [2], [BLANK]]), "column C1: the key 0xffffffffffff stands for blanks"),
        ("I1", pa.array([1, 2, float("inf")]), "column I1: no finite number after scaling"),
        ("label", pa.array([1, 0, None]), "column label: neither 0 nor 1"),
        ("label", pa.array([1, 0, 0.5]), "column label: neither 0 nor 1"),
    ],
)
@pytest.mark.parametrize("block_rows", [1 << 10, 2])
def test_a_bad_row_of_parquet_is_an_error_or_skipped(
    write: Callable[..., Path],
    name: str,
    column: pa.Array,
    says: str,
    block_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(criteo, "BLOCK_ROWS", block_rows)
    good = small_table().drop_columns(["extra"])
    bad = good.set_column(good.schema.get_field_index(name), name, column)
    path, skip = write(pa.concat_tables([bad, bad]), "a.parquet"), Skip()
    with pytest.raises(DataError, match=says) as caught:
        read(path)
    assert f"{path}, row 3\n" in str(caught.value)
    assert len(read(path, bad_lines=skip)) == 4
    assert [problem.where for problem in skip.problems] == [f"{path}, row 3", f"{path}, row 6"]


def test_columns_that_are_missing_or_of_a_wrong_type_are_named_together(write: Callable[..., Path]) -> None:
    table = small_table().drop_columns(["C2"]).rename_columns(["extra", "label", "I2", "i1", "C1"])
    path = write(table.set_column(4, "C1", pa.array([1.0, 2.0, 3.0])), "a.parquet")
    with pytest.raises(DataError, match="3 problems") as caught:
        read(path)
    said = str(caught.value)
    assert "the layout has a column I1" in said
    assert "the layout has a column C2" in said
    assert "column C1 of type double" in said
    with pytest.raises(DataError, match="column I1 of type string"):
        read(write(small_table().set_column(4, "I1", pa.array(["1", "2", "3"])), "b.parquet"))


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_a_truncated_parquet_file_is_named(write: Callable[..., Path], keep: int) -> None:
    path = write(small_table(), "day_0.parquet")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="ends too early or is damaged") as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}\n")


def test_a_truncated_gzip_file_is_named(write: Callable[..., Path]) -> None:
    path = write("".join(f"1\t{i}\t\t{i * i:x}\t\n" for i in range(5000)), "day_0.gz")
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError, match="ends too early or is damaged") as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}\n")


def test_gzip_members_follow_each_other(write: Callable[..., Path]) -> None:
    path = write(TEXT, "day_0.gz")
    path.write_bytes(path.read_bytes() * 2)
    assert read(path).label.tolist() == LABEL * 2


def test_a_file_that_is_not_there() -> None:
    for name in ("absent.tsv", "absent.parquet"):
        with pytest.raises(FileNotFoundError):
            next(criteo.batches(name, 4))
