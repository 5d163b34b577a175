"""Keys and ids on the host: checked before a device sees them, never cut to fewer bits.

A *key* names something in the world and has up to 64 bits. An *id* is a position in a table, from 0. Keys
become ids by a `Vocabulary` or by hashing; only ids go to devices.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from sbp.errors import EmbeddingError, Problem, raise_all

NO_ID = -1
"""Stands in the place of an id where a bag of fixed hotness has fewer ids than places."""

TABLE_BITS, KEY_BITS = 16, 48
LIMITS = np.iinfo(np.int32)

Place: TypeAlias = Callable[[tuple[int, ...]], str]
"""Says in words where an element is, given its indices."""


def problem(where: str, got: str, legal: str, why: str, fix: str) -> Problem:
    """A problem of sparse embeddings."""
    return Problem("embedding", where, got, legal, why, fix)


def element(position: tuple[int, ...]) -> str:
    """Where an element of an array is; of a scalar nothing.

    >>> element((3, 1))
    'element [3, 1]'
    """
    return f"element {list(position)}" if position else ""


def is_wide(dtype: DTypeLike) -> bool:
    """Whether JAX, as it is set now, would cut values of this integer type."""
    return bool(np.dtype(jax.dtypes.canonicalize_dtype(dtype)).itemsize < np.dtype(dtype).itemsize)


def as_integers(values: ArrayLike, where: str) -> NDArray[Any] | Problem:
    """The values as a host array of integers, or why they are none."""
    if isinstance(values, jax.core.Tracer):
        return problem(
            where,
            f"a value that is being traced: {jax.typeof(values).str_short()}",
            "integers on the host",
            "values are checked before the traced program; inside it they are not known",
            "check the batch where it is read; in the program an id out of range counts as no id",
        )
    array = np.asarray(values)
    if array.size == 0 and not hasattr(values, "dtype"):
        return array.astype(np.int32)
    if np.issubdtype(array.dtype, np.integer):
        return array
    return problem(
        where,
        f"{array.dtype}{list(array.shape)}",
        "integers of up to 64 bits",
        "a float holds only the first 53 bits of a key (float32: 24), other types hold none",
        "read the column as int64; hash what is text",
    )


def _first(wrong: NDArray[np.bool_], array: NDArray[Any], place: Place) -> str:
    """The first wrong element, where it is, and how many there are."""
    flat = int(np.argmax(wrong))
    position = tuple(int(i) for i in np.unravel_index(flat, array.shape))
    count = int(wrong.sum())
    more = f", and {count - 1} more out of range" if count > 1 else ""
    at = place(position)
    return f"{int(array[position])}" + (f" at {at}{more}" if at else "")


def find_problem(
    ids: ArrayLike, size: int, where: str, *, padding: bool = False, place: Place = element
) -> Problem | None:
    """What keeps `ids` from being ids of a table of `size` rows: the first thing that is wrong, or None."""
    array = as_integers(ids, where)
    if isinstance(array, Problem):
        return array
    if size - 1 > LIMITS.max and is_wide(np.int64):
        return problem(
            where,
            f"a table of {size} rows",
            f"at most {LIMITS.max + 1} rows, or JAX with 64-bit types",
            "with 64-bit types off an id has 32 bits, which cannot name every row",
            "jax.config.update('jax_enable_x64', True), or several tables",
        )
    return range_problem(array, size, where, padding=padding, place=place)


def range_problem(
    array: NDArray[Any], size: int, where: str, *, padding: bool = False, place: Place = element
) -> Problem | None:
    """The first integer that is no id of a table of `size` rows, or None."""
    wrong = (array < (NO_ID if padding else 0)) | (array > size - 1)
    if not wrong.any():
        return None
    cut = array.size and max(abs(int(array.min())), abs(int(array.max()))) > LIMITS.max and is_wide(np.int64)
    return problem(
        where,
        _first(wrong, array, place),
        f"0..{size - 1}" + (f", and {NO_ID} for no id" if padding else ""),
        "with 64-bit types off, JAX would silently cut it to 32 bits, the id of another row"
        if cut
        else f"the table has {size} rows",
        "map keys to ids with a Vocabulary, or hash them into the table",
    )


def check_ids(
    ids: ArrayLike, size: int, where: str, *, padding: bool = False, place: Place = element
) -> NDArray[Any]:
    """The ids as int32 (int64 where `size` needs it), all of them rows of a table.

    Arguments:
      ids: integers of any width and shape, on the host.
      size: how many rows the table has.
      where: what the ids are, for the message.
      padding: whether `NO_ID` (-1) is legal.
      place: says where an element is, given its indices.

    Raises:
      EmbeddingError: if an id is negative or too large, if ids are not integers, or if JAX would cut them.

    >>> check_ids(np.array([3, 0]), 4, "colours")
    array([3, 0], dtype=int32)
    """
    found = find_problem(ids, size, where, padding=padding, place=place)
    raise_all([found] if found else [])
    return np.asarray(ids).astype(np.int32 if size - 1 <= LIMITS.max else np.int64)


def uncut(ids: ArrayLike, where: str) -> ArrayLike:
    """Ids as JAX can take them without cutting bits: a host array of wide integers is checked and narrowed.

    What is a JAX array or is being traced has its type already and is left as it is.

    Raises:
      EmbeddingError: if a value does not fit 32 bits and 64-bit types are off, or if ids are not integers.
    """
    if isinstance(ids, jax.Array):
        if not np.issubdtype(ids.dtype, np.integer):
            shown = f"{ids.dtype}{list(ids.shape)}"
            why = "an id is a position in a table"
            raise EmbeddingError(problem(where, shown, "integers", why, "cast where the ids are made"))
        return ids
    array = as_integers(ids, where)
    if isinstance(array, Problem):
        raise EmbeddingError(array)
    if not is_wide(array.dtype):
        return array
    wrong = (array < LIMITS.min) | (array > LIMITS.max)
    if wrong.any():
        raise EmbeddingError(
            problem(
                where,
                _first(wrong, array, element),
                f"{LIMITS.min}..{LIMITS.max}, or JAX with 64-bit types",
                "with 64-bit types off, JAX would silently cut it to 32 bits, the id of another row",
                "map keys to ids with a Vocabulary, or hash them into the table",
            )
        )
    return array.astype(np.int32)


def as_keys(keys: ArrayLike, where: str) -> NDArray[np.int64]:
    """Keys as int64 of the same value.

    Raises:
      EmbeddingError: if keys are not integers, or if an unsigned one does not fit.
    """
    array = as_integers(keys, where)
    if isinstance(array, Problem):
        raise EmbeddingError(array)
    largest = np.iinfo(np.int64).max
    if array.dtype == np.uint64 and array.size and int(array.max()) > largest:
        raise EmbeddingError(
            problem(
                where,
                _first(array > largest, array, element),
                f"at most {largest}",
                "keys are kept as int64, and this one would become another, negative one",
                "keys.view(np.int64), if the bits are what counts",
            )
        )
    return array.astype(np.int64)


def _too_large(values: NDArray[np.int64], bits: int, where: str, fix: str) -> Problem | None:
    wrong = (values < 0) | (values >= 1 << bits)
    if not wrong.any():
        return None
    why = f"a unified key has {TABLE_BITS} bits for the table and {KEY_BITS} for the key"
    return problem(where, _first(wrong, values, element), f"0..{(1 << bits) - 1}", why, fix)


def unify(table_id: ArrayLike, key: ArrayLike) -> NDArray[np.int64]:
    """One key space for many tables: the table in the high 16 bits, the key in the low 48.

    Tables from 32768 on make negative numbers, as their highest bit is the sign. No bits are lost: `separate`
    is the inverse.

    Arguments:
      table_id: 0..65535, one or as many as keys (NumPy broadcasting).
      key: 0..2**48 - 1.

    Raises:
      EmbeddingError: if either does not fit.

    >>> int(unify(1, 5)) == (1 << 48) + 5
    True
    """
    tables, keys = as_keys(table_id, "unify(table_id, ...)"), as_keys(key, "unify(..., key)")
    checks: Sequence[Problem | None] = (
        _too_large(tables, TABLE_BITS, "unify(table_id, ...)", "number the tables from 0"),
        _too_large(keys, KEY_BITS, "unify(..., key)", "a Vocabulary per table takes keys of 64 bits"),
    )
    raise_all(p for p in checks if p is not None)
    return np.asarray((tables.astype(np.uint64) << np.uint64(KEY_BITS)) | keys.astype(np.uint64)).view(
        np.int64
    )


def separate(unified: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tables and keys of unified keys.

    >>> [int(part) for part in separate(unify(40000, 5))]
    [40000, 5]
    """
    bits = np.asarray(as_keys(unified, "separate(...)")).view(np.uint64)
    table, key = bits >> np.uint64(KEY_BITS), bits & np.uint64((1 << KEY_BITS) - 1)
    return table.astype(np.int64), key.astype(np.int64)
