"""Vocabularies: against a dictionary in plain Python, policies, saved state, initial rows."""

from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from sbp.errors import EmbeddingError
from sbp.runtime.embedding import sorted_keys
from sbp.runtime.embedding.keys import NO_ID
from sbp.runtime.embedding.vocabulary import (
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    Policy,
    Refuse,
    Vocabulary,
    initial_rows,
    lowest,
)
from tests.errors.messages import Messages, check_message

MESSAGES: Messages = {
    "capacity": (
        lambda: Vocabulary(0),
        EmbeddingError,
        "Vocabulary",
        "capacity=0",
        "1..2147483647",
        "a row is an int32",
        "several vocabularies",
    ),
    "full": (
        lambda: full().lookup([10, 40, 50]),
        EmbeddingError,
        "Vocabulary",
        "2 new keys, with 3 of 3 rows taken",
        "at most 0 new keys",
        "the vocabulary is full, and Refuse() lets no key leave",
        "a larger capacity, or policy=LeastRecentlyUsed()",
    ),
    "too many for one batch": (
        lambda: full(LeastRecentlyUsed()).lookup([1, 2, 3, 4]),
        EmbeddingError,
        "Vocabulary",
        "4 distinct keys in one batch",
        "at most 3: the capacity",
        "two keys of one batch cannot share a row",
        "a larger capacity, or smaller batches",
    ),
    "keys are floats": (
        lambda: Vocabulary(3, name="words").lookup([1.5]),
        EmbeddingError,
        "words",
        "float64[1]",
        "integers of up to 64 bits",
        "a float holds only the first 53 bits of a key (float32: 24), other types hold none",
        "read the column as int64; hash what is text",
    ),
    "state: incomplete": (
        lambda: Vocabulary.from_state({"capacity": 3}),
        EmbeddingError,
        "Vocabulary: a saved state",
        "arrays {'capacity': ()}",
        "capacity, batches; keys, used and count of one length, no longer than the capacity",
        "it is not a result of get_state(): an array is missing, or a key is there twice",
        "save it again",
    ),
    "state: a key twice": (
        lambda: Vocabulary.from_state(full().get_state() | {"keys": np.array([1, 1, 2])}),
        EmbeddingError,
        "Vocabulary: a saved state",
        "arrays {'capacity': (), 'batches': (), 'keys': (3,), 'used': (3,), 'count': (3,)}",
        "capacity, batches; keys, used and count of one length, no longer than the capacity",
        "it is not a result of get_state(): an array is missing, or a key is there twice",
        "save it again",
    ),
    "state: of another capacity": (
        lambda: Vocabulary(4, name="words").set_state(full().get_state()),
        EmbeddingError,
        "words: a saved state",
        "capacity 3",
        "4, its own",
        "the rows of a table are as many as its vocabulary gives away",
        "Vocabulary(3), and a table of as many rows",
    ),
    "no file": (
        lambda: Vocabulary.load("nowhere.npz", name="words"),
        EmbeddingError,
        "words: nowhere.npz",
        "FileNotFoundError: [Errno 2] No such file or directory: 'nowhere.npz'",
        "a file of save",
        "it was not written by Vocabulary.save, or cannot be read",
        "another copy of it",
    ),
    "a folder that is not there": (
        lambda: full().save("nowhere/v.npz"),
        EmbeddingError,
        "Vocabulary: nowhere/v.npz",
        "[Errno 2] No such file or directory: 'nowhere/.v.npz.{hex}.tmp'",
        "a file",
        "the file cannot be written; the old one is unchanged",
        "space on the disk, or another path",
    ),
}


def full(policy: Policy | None = None) -> Vocabulary:
    """Three rows, all taken: 10 is oldest but frequent, 20 is rare, 30 is new."""
    v = Vocabulary(3, policy)
    v.lookup([10, 10, 10])
    v.lookup([20])
    v.lookup([30, 30])
    return v


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str) -> None:
    check_message(*MESSAGES[name])


class Slow:
    """The same vocabulary, a key at a time; `leaves` orders (last use, count, row) of what may leave."""

    def __init__(self, capacity: int, leaves: Callable[[int, int, int], Sequence[int]]) -> None:
        self.capacity, self.leaves = capacity, leaves
        self.row: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.count: dict[int, int] = {}
        self.batches = 0

    def lookup(self, keys: list[int]) -> tuple[list[int], dict[int, int], set[int]]:
        new = sorted(set(keys) - set(self.row))
        others = [k for k in self.row if k not in keys]
        others.sort(key=lambda k: self.leaves(self.used[k], self.count[k], self.row[k]))
        evicted = others[: max(0, len(self.row) + len(new) - self.capacity)]
        rows = [self.row.pop(k) for k in evicted]
        rows += [r for r in range(self.capacity) if r not in rows and r not in self.row.values()]
        given = dict(zip(new, sorted(rows[: len(new)]), strict=True))
        self.row |= given
        self.batches += 1
        self.count |= dict.fromkeys(new, 0)
        for key in keys:
            self.used[key] = self.batches
            self.count[key] += 1
        return [self.row[k] for k in keys], given, set(evicted)


@pytest.mark.parametrize(
    ("policy", "leaves"),
    [
        (LeastRecentlyUsed(), lambda used, count, row: (used, count, row)),
        (LeastFrequentlyUsed(), lambda used, count, row: (count, used, row)),
    ],
    ids=["lru", "lfu"],
)
@pytest.mark.parametrize("few", [2, 4096], ids=["merged often", "merged never"])
def test_equals_a_dictionary(
    policy: Policy, leaves: Callable, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorted_keys, "FEW", few)
    random = np.random.default_rng(5)
    names = random.integers(-(1 << 62), 1 << 62, 60)
    v, slow = Vocabulary(25, policy), Slow(25, leaves)
    evicted = 0
    for _ in range(60):
        keys = names[np.minimum(random.zipf(1.3, 18) - 1, 59)]
        found = v.lookup(keys.reshape(6, 3))
        rows, given, gone = slow.lookup(keys.tolist())
        assert found.rows.shape == (6, 3)
        assert found.rows.reshape(-1).tolist() == rows
        assert dict(zip(found.new_keys.tolist(), found.new_rows.tolist(), strict=True)) == given
        assert set(found.evicted_keys.tolist()) == gone
        np.testing.assert_array_equal(v.find(names), [slow.row.get(k, NO_ID) for k in names.tolist()])
        evicted += len(gone)
    assert evicted > 50


@pytest.mark.parametrize(("policy", "gone"), [(LeastRecentlyUsed(), 10), (LeastFrequentlyUsed(), 20)])
def test_who_leaves(policy: Policy, gone: int) -> None:
    v = full(policy)
    row = int(v.find([gone])[0])
    found = v.lookup([40])
    assert found.evicted_keys.tolist() == [gone]
    assert (found.rows.tolist(), found.new_rows.tolist()) == ([row], [row])
    assert v.find([gone]) == NO_ID
    assert v.keys[row] == 40


def test_keys_of_the_batch_stay() -> None:
    v = full(LeastRecentlyUsed())
    found = v.lookup([10, 20, 40])  # 10 and 20 are the oldest
    assert found.evicted_keys.tolist() == [30]
    assert (v.find([10, 20, 40]) >= 0).all()


def test_a_refused_batch_changes_nothing() -> None:
    for v, keys in ((full(), [10, 40]), (full(LeastRecentlyUsed()), [1, 2, 3, 4])):
        before = v.get_state()
        with pytest.raises(EmbeddingError):
            v.lookup(keys)
        for name, array in v.get_state().items():
            np.testing.assert_array_equal(array, before[name])
        assert v.find([10, 40, 1]).tolist() == [0, -1, -1]


def test_find_changes_nothing_and_padding_is_no_key() -> None:
    v = Vocabulary(3)
    found = v.lookup([[7, 0], [0, 9]], padding=0)
    assert found.rows.tolist() == [[0, -1], [-1, 1]]
    assert found.new_keys.tolist() == [7, 9]
    assert v.find([9, 0]).tolist() == [1, NO_ID]
    assert len(v) == 2


def test_empty_batches() -> None:
    v = Vocabulary(3)
    assert v.find([5]).tolist() == [-1]
    assert v.lookup(np.empty((0, 4), np.int64)).rows.shape == (0, 4)
    assert len(v) == 0


@pytest.mark.parametrize("policy", [LeastRecentlyUsed(), LeastFrequentlyUsed()], ids=["lru", "lfu"])
def test_goes_on_after_saving(policy: Policy, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    batches = random.zipf(1.5, (20, 8)) % 40
    v = Vocabulary(12, policy)
    for keys in batches[:10]:
        v.lookup(keys)
    v.save(tmp_path / "vocabulary")
    w = Vocabulary.load(tmp_path / "vocabulary", policy)
    assert (len(w), w.capacity) == (len(v), 12)
    for keys in batches[10:]:
        one, two = v.lookup(keys), w.lookup(keys)
        np.testing.assert_array_equal(one.rows, two.rows)
        np.testing.assert_array_equal(one.evicted_keys, two.evicted_keys)


@pytest.mark.parametrize("harm", ["cut", "flipped", "empty", "text"])
def test_a_damaged_file_is_said_in_words(harm: str, tmp_path: Path) -> None:
    path = tmp_path / "v.npz"
    full().save(path)
    data = bytearray(path.read_bytes())
    at = data.index(np.int64(30).tobytes())
    data[at] ^= 1
    harmed = {"cut": data[: len(data) // 2], "flipped": data, "empty": b"", "text": b"no archive"}
    path.write_bytes(bytes(harmed[harm]))
    with pytest.raises(EmbeddingError, match=r"not written by Vocabulary\.save|is not a result of get_state"):
        Vocabulary.load(path)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, v = tmp_path / "v.npz", full(LeastRecentlyUsed())
    v.save(path)
    v.lookup([40])

    def full_disk(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(EmbeddingError, match="the old one is unchanged"):
        v.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["v.npz"]
    assert Vocabulary.load(path).keys.tolist() == [10, 20, 30]


def test_a_state_is_set_in_place() -> None:
    v, w = full(LeastRecentlyUsed()), Vocabulary(3, LeastRecentlyUsed())
    w.set_state(v.get_state())
    assert w.lookup([40]).evicted_keys.tolist() == v.lookup([40]).evicted_keys.tolist() == [10]
    assert w.batches == v.batches == 4


def test_an_empty_vocabulary_can_be_saved(tmp_path: Path) -> None:
    Vocabulary(4).save(tmp_path / "v.npz")
    assert Vocabulary.load(tmp_path / "v.npz", Refuse()).lookup([3]).rows.tolist() == [0]


@pytest.mark.parametrize("k", [0, 1, 7, 30])
def test_lowest_equals_a_sort(k: int) -> None:
    random = np.random.default_rng(k)
    first, second = random.integers(0, 4, (2, 30))
    wanted = np.sort(np.lexsort((np.arange(30), second, first))[:k])
    np.testing.assert_array_equal(lowest([first, second], k), wanted)


def test_initial_rows_depend_on_seed_and_key_alone() -> None:
    keys = np.array([[5, -3], [1 << 50, 0]])
    rows = initial_rows(1, keys, 6, scale=0.5)
    assert (rows.shape, rows.dtype) == ((2, 2, 6), np.float32)
    np.testing.assert_array_equal(rows[1, 0], initial_rows(1, 1 << 50, 6, scale=0.5))
    np.testing.assert_array_equal(rows[..., :4], initial_rows(1, keys, 4, scale=0.5))
    assert np.unique(np.concatenate([rows, initial_rows(2, keys, 6, scale=0.5)])).size == 48


def test_initial_rows_are_uniform() -> None:
    rows = initial_rows(0, np.arange(20_000), 8, np.float64, 2.0)
    assert np.abs(rows).max() <= 2
    assert abs(rows.mean()) < 0.01
    assert abs(rows.std() - 2 / 3**0.5) < 0.01
    # Neither neighbours nor columns have anything to do with each other.
    assert np.abs(np.corrcoef(rows.T) - np.eye(8)).max() < 0.03
    assert abs(np.corrcoef(rows[1:, 0], rows[:-1, 0])[0, 1]) < 0.03
    assert initial_rows(0, [1], 2, jnp.bfloat16).dtype == jnp.bfloat16
