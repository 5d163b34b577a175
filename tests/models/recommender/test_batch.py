"""Batches, multi-hot lists, and the rows that keys are hashed to."""

import jax
import numpy as np
import pytest

from models.recommender import batch as module
from models.recommender.batch import Batch, Lists, as_lists, concatenate, hash_keys, mix, rebatch


def one_hot(rows: int, start: int = 0) -> Batch:
    number = np.arange(start, start + rows)
    return Batch(
        (number % 2).astype(np.float32),
        np.stack([number, -number], 1).astype(np.float32),
        np.stack([number, number * 2**40, number + 7], 1),
    )


def multi_hot(rows: int, start: int = 0) -> Batch:
    """Row r has r % 3 keys."""
    plain = one_hot(rows, start)
    number = np.arange(start, start + rows)
    offsets = np.concatenate([[0], np.cumsum(number % 3)])
    lists = (Lists(np.repeat(number, number % 3), offsets), *as_lists(plain.keys)[1:])
    return Batch(plain.label, plain.dense, lists)


def content(batch: Batch) -> list[list[list[int]]]:
    """The keys of each feature and row."""
    return [[part.tolist() for part in np.split(f.values, f.offsets[1:-1])] for f in as_lists(batch.keys)]


@pytest.mark.parametrize("made", [one_hot, multi_hot])
@pytest.mark.parametrize("pieces", [[10], [3, 0, 4, 1, 2], [1] * 10, [0, 9, 1]])
@pytest.mark.parametrize("size", [1, 4, 5, 10, 11])
def test_rows_survive_another_batch_size(made: type, pieces: list[int], size: int) -> None:
    begin = np.cumsum([0, *pieces[:-1]])
    parts = [made(rows, start) for rows, start in zip(pieces, begin, strict=True)]
    cut = list(rebatch(parts, size))
    assert [len(part) for part in cut] == [size] * (10 // size) + [10 % size] * (10 % size > 0)
    assert [len(part) for part in rebatch(parts, size, drop_last=True)] == [size] * (10 // size)
    whole, expected = concatenate(cut), made(10)
    np.testing.assert_array_equal(whole.label, expected.label)
    np.testing.assert_array_equal(whole.dense, expected.dense)
    assert content(whole) == content(expected)


def test_one_hot_and_multi_hot_batches_join_as_lists() -> None:
    joined = concatenate([one_hot(2), multi_hot(3, start=2)])
    assert isinstance(joined.keys, tuple)
    assert content(joined)[0] == [[0], [1], [2, 2], [], [4]]


def test_batches_of_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="batches of 0: at least one row"):
        next(rebatch([one_hot(2)], 0))


def test_batch_is_a_pytree() -> None:
    doubled = jax.tree.map(lambda x: 2 * x, one_hot(2))
    np.testing.assert_array_equal(doubled.dense, [[0, 0], [2, -2]])


def test_padding_a_slice_of_lists() -> None:
    lists = Lists(np.arange(6), np.array([0, 3, 3, 4, 6]))
    assert lists.rows_between(1, 4).pad(3, fill=9).tolist() == [[9, 9, 9], [3, 9, 9], [4, 5, 9]]
    with pytest.raises(ValueError, match="row 0 has a list of 3: at most 2"):
        lists.pad(2)


def test_the_mixer_is_splitmix64() -> None:
    """The first two numbers of the generator with seed 0, as its authors' program prints them."""
    seeds = np.array([0, 0x9E3779B97F4A7C15 - 2**64])
    assert mix(seeds).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_hashed_rows_use_all_bits_and_fill_the_table_evenly() -> None:
    keys = (np.arange(4000) << 50)[:, None]
    rows = hash_keys(keys, [100])
    assert isinstance(rows, np.ndarray)
    assert rows.dtype == np.int32
    counts = np.bincount(rows[:, 0], minlength=100)
    # Chi-squared with 99 degrees of freedom exceeds 160 once in ten thousand seeds, and this one is fixed.
    assert ((counts - 40) ** 2 / 40).sum() < 160


def test_hashing_is_per_feature_and_the_same_for_lists() -> None:
    batch = one_hot(50)
    rows, lists = (
        hash_keys(batch.keys, [10, 20, 2**31 - 1]),
        hash_keys(as_lists(batch.keys), [10, 20, 2**31 - 1]),
    )
    assert isinstance(rows, np.ndarray)
    assert isinstance(lists, tuple)
    for feature in range(3):
        np.testing.assert_array_equal(lists[feature].values, rows[:, feature])
        np.testing.assert_array_equal(
            rows[:, feature], mix(batch.keys[:, feature]) % [10, 20, 2**31 - 1][feature]
        )


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ([10, 20], "2 table sizes for 3 features"),
        ([10, 0, 5], "a table of 0 rows"),
        ([10, 5, 2**31], "a table of 2147483648 rows: between 1 and 2147483647"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: list[int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        hash_keys(one_hot(2).keys, sizes)
    with pytest.raises(ValueError, match=complaint):
        hash_keys(as_lists(one_hot(2).keys), sizes)


def test_largest_table_is_what_int32_names() -> None:
    assert np.iinfo(np.int32).max == module.MOST_ROWS
