"""Keys and ids on the host: what is refused, every message, and that no bits are lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbp.errors import EmbeddingError
from sbp.runtime.embedding.keys import NO_ID, as_keys, check_ids, separate, uncut, unify
from tests.errors.messages import Messages, check_message

WIDE = np.array([1, 1 << 40])
MAP = "map keys to ids with a Vocabulary, or hash them into the table"
CUT = "with 64-bit types off, JAX would silently cut it to 32 bits, the id of another row"

MESSAGES: Messages = {
    "out of range": (
        lambda: check_ids([[0, 1], [7, 9]], 4, "colours"),
        EmbeddingError,
        "colours",
        "7 at element [1, 0], and 1 more out of range",
        "0..3",
        "the table has 4 rows",
        "map keys to ids with a Vocabulary, or hash them into the table",
    ),
    "negative": (
        lambda: check_ids([0, -1], 4, "colours"),
        EmbeddingError,
        "colours",
        "-1 at element [1]",
        "0..3",
        "the table has 4 rows",
        "map keys to ids with a Vocabulary, or hash them into the table",
    ),
    "below no id": (
        lambda: check_ids([-2, -1], 4, "colours", padding=True),
        EmbeddingError,
        "colours",
        "-2 at element [0]",
        "0..3, and -1 for no id",
        "the table has 4 rows",
        "map keys to ids with a Vocabulary, or hash them into the table",
    ),
    "would be cut": (
        lambda: check_ids(WIDE, 4, "colours"),
        EmbeddingError,
        "colours",
        "1099511627776 at element [1]",
        "0..3",
        "with 64-bit types off, JAX would silently cut it to 32 bits, the id of another row",
        "map keys to ids with a Vocabulary, or hash them into the table",
    ),
    "larger than int64": (
        lambda: check_ids([1 << 70], 4, "colours"),
        EmbeddingError,
        "colours",
        "object[1]",
        "integers of up to 64 bits",
        "a float holds only the first 53 bits of a key (float32: 24), other types hold none",
        "read the column as int64; hash what is text",
    ),
    "floats": (
        lambda: check_ids(np.ones((2, 3)), 4, "colours"),
        EmbeddingError,
        "colours",
        "float64[2, 3]",
        "integers of up to 64 bits",
        "a float holds only the first 53 bits of a key (float32: 24), other types hold none",
        "read the column as int64; hash what is text",
    ),
    "words": (
        lambda: check_ids(["red"], 4, "colours"),
        EmbeddingError,
        "colours",
        "<U3[1]",
        "integers of up to 64 bits",
        "a float holds only the first 53 bits of a key (float32: 24), other types hold none",
        "read the column as int64; hash what is text",
    ),
    "a table of too many rows": (
        lambda: check_ids([1], 1 << 32, "colours"),
        EmbeddingError,
        "colours",
        "a table of 4294967296 rows",
        "at most 2147483648 rows, or JAX with 64-bit types",
        "with 64-bit types off an id has 32 bits, which cannot name every row",
        "jax.config.update('jax_enable_x64', True), or several tables",
    ),
    "traced": (
        lambda: jax.eval_shape(lambda ids: check_ids(ids, 4, "colours"), jnp.array([1])),
        EmbeddingError,
        "colours",
        "a value that is being traced: int32[1]",
        "integers on the host",
        "values are checked before the traced program; inside it they are not known",
        "check the batch where it is read; in the program an id out of range counts as no id",
    ),
    "uncut: would be cut": (
        lambda: uncut(WIDE, "colours"),
        EmbeddingError,
        "colours",
        "1099511627776 at element [1]",
        "-2147483648..2147483647, or JAX with 64-bit types",
        "with 64-bit types off, JAX would silently cut it to 32 bits, the id of another row",
        "map keys to ids with a Vocabulary, or hash them into the table",
    ),
    "uncut: floats on a device": (
        lambda: uncut(jnp.ones(3), "colours"),
        EmbeddingError,
        "colours",
        "float32[3]",
        "integers",
        "an id is a position in a table",
        "cast where the ids are made",
    ),
    "uncut: floats": (
        lambda: uncut([0.5], "colours"),
        EmbeddingError,
        "colours",
        "float64[1]",
        "integers of up to 64 bits",
        "a float holds only the first 53 bits of a key (float32: 24), other types hold none",
        "read the column as int64; hash what is text",
    ),
    "unsigned key": (
        lambda: as_keys(np.array([1 << 63], np.uint64), "keys"),
        EmbeddingError,
        "keys",
        "9223372036854775808 at element [0]",
        "at most 9223372036854775807",
        "keys are kept as int64, and this one would become another, negative one",
        "keys.view(np.int64), if the bits are what counts",
    ),
    "unify: table": (
        lambda: unify([1, 65536], 0),
        EmbeddingError,
        "unify(table_id, ...)",
        "65536 at element [1]",
        "0..65535",
        "a unified key has 16 bits for the table and 48 for the key",
        "number the tables from 0",
    ),
    "unify: key": (
        lambda: unify(3, 1 << 48),
        EmbeddingError,
        "unify(..., key)",
        "281474976710656",
        "0..281474976710655",
        "a unified key has 16 bits for the table and 48 for the key",
        "a Vocabulary per table takes keys of 64 bits",
    ),
    "unify: negative": (
        lambda: unify(3, -1),
        EmbeddingError,
        "unify(..., key)",
        "-1",
        "0..281474976710655",
        "a unified key has 16 bits for the table and 48 for the key",
        "a Vocabulary per table takes keys of 64 bits",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str) -> None:
    check_message(*MESSAGES[name])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_ids_of_every_width_become_int32(dtype: str) -> None:
    ids = check_ids(np.array([[0, 3], [2, 1]], dtype), 4, "ids")
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, [[0, 3], [2, 1]])


def test_lists_scalars_and_device_arrays_are_ids() -> None:
    assert check_ids([], 4, "ids").shape == (0,)
    assert check_ids(3, 4, "ids") == 3
    np.testing.assert_array_equal(check_ids(jnp.array([1, 2]), 4, "ids"), [1, 2])
    np.testing.assert_array_equal(check_ids([NO_ID, 3], 4, "ids", padding=True), [-1, 3])


@pytest.mark.usefixtures("x64")
def test_with_64_bit_types_wide_values_pass() -> None:
    assert check_ids([1 << 40], 1 << 41, "ids").dtype == np.int64
    np.testing.assert_array_equal(uncut(WIDE, "ids"), WIDE)


def test_uncut_narrows_only_what_fits() -> None:
    assert uncut(np.array([5, -(1 << 31)]), "ids").dtype == np.int32
    given = jnp.array([5])
    assert uncut(given, "ids") is given
    assert uncut(np.array([5], np.int8), "ids").dtype == np.int8


def test_unify_and_separate_are_inverse() -> None:
    tables = np.array([0, 1, 32767, 32768, 65535])[:, None]
    keys = np.array([0, 1, (1 << 48) - 1])
    unified = unify(tables, keys)
    assert unified.dtype == np.int64
    assert np.unique(unified).size == 15
    for given, back in zip(np.broadcast_arrays(tables, keys), separate(unified), strict=True):
        np.testing.assert_array_equal(given, back)


def test_unify_names_both_that_overflow() -> None:
    with pytest.raises(EmbeddingError) as caught:
        unify(-1, 1 << 48)
    assert [p.where for p in caught.value.problems] == ["unify(table_id, ...)", "unify(..., key)"]


def test_keys_keep_their_value() -> None:
    largest = np.iinfo(np.int64).max
    np.testing.assert_array_equal(as_keys(np.array([largest], np.uint64), "keys"), [largest])


def test_a_traced_id_is_told_from_a_host_one() -> None:
    with pytest.raises(EmbeddingError, match="being traced"):
        jax.eval_shape(lambda ids: check_ids(ids, 4, "ids"), jnp.array([1]))
