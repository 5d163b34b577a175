"""From the columns of a file to a batch: how each is read, what is refused."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from models.recommender.batch import Batch, Keys, Lists, as_lists
from models.recommender.layout import Layout

BLANK = 2**48 - 1
"""The key of a blank field. It fits 48 bits, and a file that has it as a key is refused."""


class BadField(ValueError):
    """A field that cannot be read; the message says which column, and why."""


def convert(table: pa.Table, layout: Layout) -> Batch:
    """The rows of a table as a batch.

    Raises:
      BadField, pyarrow.ArrowInvalid: if a field cannot be read.
    """
    dense = np.empty((table.num_rows, len(layout.dense)))
    for at, name in enumerate(layout.dense):
        dense[:, at] = _floats(table, name)
    keys = [_keys(table, name) for name in layout.categorical]
    return Batch(_label(table, layout.label), _scaled(dense, layout), _together(keys, table.num_rows))


def unreadable(kind: pa.DataType, *, categorical: bool) -> str | None:
    """What a column's type would have to be instead; None if it can be read."""
    if not categorical:
        number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        return None if number else "numbers"
    if _is_list(kind) or pa.types.is_dictionary(kind):
        kind = kind.value_type
    key = pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return None if key else "integers, hexadecimal text, or lists of them"


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _column(table: pa.Table, name: str) -> pa.Array:
    joined = table.column(name).combine_chunks()
    return pa.concat_arrays(joined.chunks) if isinstance(joined, pa.ChunkedArray) else joined


def _floats(table: pa.Table, name: str) -> NDArray[np.float64]:
    """A column as float64, blanks as NaN (which is how pandas writes them)."""
    numbers = pc.cast(_column(table, name), pa.float64(), safe=False)
    return pc.fill_null(numbers, np.nan).to_numpy(zero_copy_only=False)


def _label(table: pa.Table, name: str) -> NDArray[np.float32]:
    label = _floats(table, name)
    if not ((label == 0) | (label == 1)).all():
        raise BadField(f"column {name}: neither 0 nor 1")
    return label.astype(np.float32)


def _scaled(dense: NDArray[np.float64], layout: Layout) -> NDArray[np.float32]:
    blank = np.isnan(dense)
    scaled = np.where(blank, 0, layout.scale(np.where(blank, 0, dense))).astype(np.float32)
    if not np.isfinite(scaled).all():
        at = int(np.argwhere(~np.isfinite(scaled))[0, 1])
        raise BadField(f"column {layout.dense[at]}: no finite number after scaling")
    return scaled


def _keys(table: pa.Table, name: str) -> NDArray[np.int64] | Lists:
    column = _column(table, name)
    if not _is_list(column.type):
        return _numbers(column, name)
    # Not `column.offsets`: a null may own values that are not in the list.
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return Lists(_numbers(column.flatten(), name), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))


def _numbers(column: pa.Array, name: str) -> NDArray[np.int64]:
    """Integers or hexadecimal text as int64 keys."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_integer(column.type):
        keys = pc.cast(column, pa.int64())
    else:
        text = pc.if_else(pc.equal(column, ""), None, column)
        try:
            keys = pc.cast(pc.binary_join_element_wise("0x", text, ""), pa.int64())
        except pa.ArrowInvalid as error:
            raise BadField(f"column {name}: {error}") from error
        if pc.any(pc.less(keys, 0)).as_py():
            raise BadField(f"column {name}: a key of more than 63 bits")
    if pc.any(pc.equal(keys, BLANK)).as_py():
        raise BadField(f"column {name}: the key {BLANK:#x} stands for blanks here")
    return pc.fill_null(keys, BLANK).to_numpy(zero_copy_only=False)


def _together(keys: list[NDArray[np.int64] | Lists], rows: int) -> Keys:
    """One array if all features are one-hot, else lists."""
    arrays = [key for key in keys if not isinstance(key, Lists)]
    if len(arrays) == len(keys):
        return np.stack(arrays, axis=1) if arrays else np.empty((rows, 0), np.int64)
    return tuple(key if isinstance(key, Lists) else as_lists(key[:, None])[0] for key in keys)
