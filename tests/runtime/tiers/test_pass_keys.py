"""The keys of a pass, its slots, and the ladder of its sizes."""

import numpy as np
import pytest

from sbp.errors import EmbeddingError
from sbp.runtime.embedding.keys import unify
from sbp.runtime.tiers.pass_keys import capacity_of, pass_keys

TABLES = {"user": 0, "item": 3, "last": 3, "far": 40000}


def batch(rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    """Ids of several shapes and types, some absent, some of 48 bits."""
    return {
        "user": rng.integers(-1, 50, size),
        "item": rng.integers(-1, 9, (size, 3), np.int32),
        "last": rng.integers(0, 1 << 48, (size, 2)),
        "far": rng.integers(0, 4, size),
    }


@pytest.mark.parametrize("size", [0, 1, 200])
def test_every_id_has_the_slot_of_its_key(size: int) -> None:
    rng = np.random.default_rng(size)
    batches = [batch(rng, size) for _ in range(3)]
    found = pass_keys(batches, TABLES)
    assert (np.diff(found.keys.astype(object)) > 0).all() and found.keys.dtype == np.uint64
    used = np.zeros(len(found), bool)
    for ids, slots in zip(batches, found.batches, strict=True):
        assert ids.keys() == slots.keys()
        for name, given in ids.items():
            assert slots[name].dtype == np.int32 and slots[name].shape == given.shape
            for i, slot in zip(given.reshape(-1), slots[name].reshape(-1), strict=True):
                assert slot == -1 if i == -1 else int(found.keys[slot]) == int(unify(TABLES[name], i)) % 2**64
                used[slot] |= i != -1
    assert used.all()


def test_what_two_passes_share_is_found_on_both_sides() -> None:
    rng = np.random.default_rng(0)
    one, two = (pass_keys([batch(rng, 40)], TABLES) for _ in range(2))
    here, there = one.shared(two)
    assert one.keys[here].tolist() == two.keys[there].tolist()
    assert set(one.keys[here].tolist()) == set(one.keys.tolist()) & set(two.keys.tolist()) != set()


@pytest.mark.parametrize("wrong", [-2, 1 << 48])
def test_ids_that_are_no_keys_are_refused(wrong: int) -> None:
    with pytest.raises(EmbeddingError):
        pass_keys([{"user": np.array([3, wrong])}], TABLES)


@pytest.mark.parametrize("multiple", [1, 8, 256])
def test_few_rungs_hold_all_sizes_and_little_is_empty(multiple: int) -> None:
    rungs = {capacity_of(n, multiple) for n in range(1, 100_000, 7)}
    assert len(rungs) < 60 and all(r % multiple == 0 for r in rungs)
    for n in range(1, 100_000, 997):
        assert n <= capacity_of(n, multiple) <= 1.25 * n + 2 * multiple
