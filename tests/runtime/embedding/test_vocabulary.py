"""Vocabularies: against a dictionary in plain Python, policies, saved state, initial rows."""

from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from sbp.errors import EmbeddingError
from sbp.runtime.embedding import vocabulary
from sbp.runtime.embedding.admission import Admission
from sbp.runtime.embedding.eviction import (
    EvictionHeap,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    Policy,
    Refuse,
)
from sbp.runtime.embedding.key_index import FEWEST_SLOTS, UNKNOWN, KeyIndex
from sbp.runtime.embedding.keys import NO_ID
from sbp.runtime.embedding.vocabulary import Vocabulary, initial_rows
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
    "half-life": (
        lambda: LeastFrequentlyUsed(half_life=0),
        EmbeddingError,
        "LeastFrequentlyUsed",
        "LeastFrequentlyUsed(half_life=0)",
        "1 batch or more",
        "counts of one batch must not grow without bound",
        "LeastFrequentlyUsed(half_life=1000)",
    ),
    "admission": (
        lambda: Admission(least=0),
        EmbeddingError,
        "Admission",
        f"Admission(least=0, slots={1 << 20})",
        "least of 1..65535, slots of 1 or more",
        "counts are of 16 bits",
        "Admission(least=3)",
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
    "state: of a larger capacity": (
        lambda: Vocabulary(2, name="words").set_state(full().get_state()),
        EmbeddingError,
        "words: a saved state",
        "capacity 3",
        "at most 2, its own",
        "keys would lose their rows",
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
def test_equals_a_dictionary(policy: Policy, leaves: Callable) -> None:
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


def test_an_index_equals_a_dictionary() -> None:
    """Through growth, and with keys that are removed from the middle of a run of slots."""
    random, index, wanted = np.random.default_rng(0), KeyIndex(), dict[int, int]()
    names = random.integers(-(1 << 62), 1 << 62, 700)
    for step in range(120):
        new = np.array(
            [k for k in random.choice(names, 30, replace=False).tolist() if k not in wanted], np.int64
        )
        index.add(new, (np.arange(new.size) + 1000 * step).astype(np.int32))
        wanted |= {k: 1000 * step + i for i, k in enumerate(new.tolist())}
        gone = random.choice(names, 20 if step % 40 > 10 else 0, replace=False)
        index.remove(gone)
        for key in gone.tolist():
            wanted.pop(key, None)
        assert index.find(names).tolist() == [wanted.get(k, UNKNOWN) for k in names.tolist()]
        assert index.count == len(wanted)
    assert index.keys.size > FEWEST_SLOTS


@pytest.mark.parametrize("seed", range(3))
def test_a_heap_takes_out_what_a_sort_would(seed: int) -> None:
    """Whatever was raised meanwhile, and whoever is held."""
    random, n = np.random.default_rng(seed), 200
    first, second = (random.integers(0, 9, n).astype(np.float64) for _ in range(2))
    heap = EvictionHeap.of(first[:150], second[:150], n)
    heap.put(np.arange(150, n, dtype=np.int32), first, second)
    for _ in range(40):
        raised = random.choice(n, 25, replace=False)
        first[raised] += random.integers(0, 3, 25)
        held = np.zeros(n, bool)
        held[random.choice(n, 30, replace=False)] = True
        leaves, aside = heap.take(12, first, second, held)
        order = [i for i in np.lexsort((np.arange(n), second, first)) if not held[i]]
        assert sorted(order[:12]) == leaves.tolist()
        first[leaves] = random.integers(0, 20, 12)  # other keys have these rows now
        heap.put(np.concatenate([leaves, aside]), first, second)


@pytest.mark.parametrize("epoch", [8, 512])
def test_lookups_of_long_ago_count_less(epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every count were halved after each batch; also when counts are made smaller on the way."""
    monkeypatch.setattr(vocabulary, "EPOCH", epoch)
    random = np.random.default_rng(3)
    v = Vocabulary(15, LeastFrequentlyUsed(half_life=1.0))
    count, used, row, evicted = dict[int, float](), dict[int, int](), dict[int, int](), 0
    for batch in range(40):
        keys = np.minimum(random.zipf(1.4, 12) - 1, 39)
        found, held = v.lookup(keys), {*keys.tolist()}
        others = sorted((k for k in row if k not in held), key=lambda k: (count[k], used[k], row[k]))
        gone = others[: found.evicted_keys.size]
        assert {*found.evicted_keys.tolist()} == {*gone}
        evicted += len(gone)
        row = {k: int(v.find([k])[0]) for k in [*(k for k in row if k not in gone), *held]}
        count = {k: (count.get(k, 0) if k not in gone else 0) / 2 for k in row}
        for key in keys.tolist():
            count[key], used[key] = count[key] + 1, batch
    assert evicted > 30


def test_a_key_gets_a_row_when_it_was_looked_up_often_enough() -> None:
    v = Vocabulary(2, admission=Admission(least=3, slots=1 << 12))
    assert v.lookup([7, 7, 8]).rows.tolist() == [NO_ID] * 3
    found = v.lookup([8, 7])
    assert (found.rows.tolist(), found.new_keys.tolist()) == ([NO_ID, 0], [7])
    assert v.find([7, 8]).tolist() == [0, NO_ID]
    w = Vocabulary.from_state(v.get_state(), admission=Admission(least=3, slots=1 << 12))
    for one in (v, w):
        assert one.lookup([8]).rows.tolist() == [1]  # its third lookup
        before = one.get_state()
        with pytest.raises(EmbeddingError, match="lets no key leave"):
            one.lookup([9, 9, 9])
        np.testing.assert_array_equal(one.get_state()["sketch"], before["sketch"])  # nothing has changed


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


def test_a_vocabulary_grows_where_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    v = Vocabulary(5, LeastRecentlyUsed(), name="words")
    with caplog.at_level("INFO", "sbp"):
        v.set_state(full().get_state())
    assert caplog.messages == ["words has grown from 3 to 5 rows"]
    assert v.find([10, 20, 30]).tolist() == [0, 1, 2]
    found = v.lookup([40, 50])
    assert (found.rows.tolist(), found.evicted_keys.size) == ([3, 4], 0)
    assert v.lookup([60]).evicted_keys.tolist() == [10]


def test_an_empty_vocabulary_can_be_saved(tmp_path: Path) -> None:
    Vocabulary(4).save(tmp_path / "v.npz")
    assert Vocabulary.load(tmp_path / "v.npz", Refuse()).lookup([3]).rows.tolist() == [0]


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
