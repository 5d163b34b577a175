"""Batches cut into passes: what fits, and slots in the place of ids."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sbp.errors import EmbeddingError
from sbp.runtime.embedding import Bags, FeatureConfig, PaddedBags, TableConfig, unify
from sbp.runtime.embedding.tiers import passes
from sbp.runtime.embedding.tiers.passes import IdsInBatch, PassCutter, TierPass
from sbp.runtime.embedding.tiers.slots import NOBODY, SlotTable, part_of

SIZES = {"user": 1000, "item": 1 << 40}
TABLES = {name: TableConfig(name, size, 4) for name, size in SIZES.items()}
FEATURES = {"user": "user", "last": "item", "bag": "item"}


def cutter(slots: int, most: int = 3, parts: int = 2) -> PassCutter:
    features = {f: (FeatureConfig(f, TABLES[t]), "all", [*SIZES].index(t)) for f, t in FEATURES.items()}
    where = IdsInBatch.mapping([feature for feature, _, _ in features.values()])
    return PassCutter(
        features, {"all": SlotTable(np.full(slots, NOBODY), parts)}, where, most, 1000.0, 1e6, 16e6
    )


def batch(rng: np.random.Generator, size: int) -> dict[str, Any]:
    lengths = rng.integers(0, 3, size)
    ids = np.where(rng.random((size, 2)) < 0.2, -1, rng.integers(0, 1 << 40, (size, 2)))
    return {
        "x": rng.normal(size=size),
        "ids": {
            "user": rng.integers(-1, 1000, size),
            "last": PaddedBags(ids, np.ones(ids.shape)),
            "bag": Bags.from_lengths(rng.integers(0, 1000, lengths.sum()), lengths, capacity=2 * size),
        },
    }


def ids_of(given: Any) -> np.ndarray:
    """The ids of one feature, one after the other, without padding."""
    if isinstance(given, Bags):
        return np.asarray(given.values)[given.offsets[0] : given.offsets[-1]]
    return np.asarray(given.ids if isinstance(given, PaddedBags) else given).reshape(-1)


def checked(found: TierPass, given: Iterator[dict[str, Any]]) -> int:
    """Compares the batches of a pass with those that were given; how many there are."""
    count = 0
    keys = found.slots["all"]
    for changed in found:
        old = next(given)
        count += 1
        assert changed["x"] is old["x"]
        for name, ids in old["ids"].items():
            before, slots = ids_of(ids), ids_of(changed["ids"][name])
            assert slots.dtype == np.int32 and type(changed["ids"][name]) is type(ids)
            assert (slots[before == -1] == -1).all()
            wanted = unify([*SIZES].index(FEATURES[name]), before[before != -1]).view(np.uint64)
            assert (keys[slots[before != -1]] == wanted).all()
    return count


@pytest.mark.parametrize("slots", [32, 40, 4096])
def test_every_id_becomes_the_slot_of_its_key(slots: int) -> None:
    rng = np.random.default_rng(slots)
    given = [batch(rng, int(rng.integers(1, 6))) for _ in range(20)]
    made = cutter(slots)
    left, first, counts = iter(given), 7, list[int]()
    for found in made.passes(given, 7):
        assert found.first == first
        assert np.bincount(part_of(found.slots["all"][found.slots["all"] != NOBODY], 2)).max() <= slots // 2
        counts.append(checked(found, left))
        first += counts[-1]
    assert sum(counts) == 20 and max(counts) <= 3
    if slots == 4096:
        assert counts == [3] * 6 + [2]
    else:
        assert len(counts) > 7, "passes are shorter where rows do not fit"


def test_a_batch_that_does_not_fit_names_the_budget_that_would_do() -> None:
    made = cutter(8, parts=1)
    many = {"user": np.arange(9), "last": np.full(9, -1), "bag": np.full(9, -1)}
    with pytest.raises(EmbeddingError, match=r"(?s)step 6.*9 rows.*about 8.*device='1.14 kB'.*9 slots"):
        list(made.passes([many], 5))


def test_a_pass_ends_where_its_batches_would_take_too_much_of_the_host() -> None:
    ids = {"user": np.arange(8), "last": np.full(8, -1), "bag": np.full(8, -1)}
    small = replace(cutter(64, most=10), batch_bytes=500.0)  # of 192 each
    assert [p.first for p in small.passes([ids] * 5, 0)] == [0, 2, 4]
    with pytest.raises(EmbeddingError, match=r"(?s)step 1.*192 B of arrays.*100 B.*host='30.7 MB'"):
        list(replace(small, batch_bytes=100.0).passes([ids], 0))


def test_ids_that_are_none_of_their_table() -> None:
    with pytest.raises(EmbeddingError, match=r"(?s)'user'.*1000.*0\.\.999.*'last'.*float"):
        ids = {"user": np.array([3, 1000]), "last": np.array([0.5, 1]), "bag": np.array([0, 1])}
        list(cutter(64).passes([ids], 0))


@pytest.mark.parametrize("wrong", [[1, 2], [{"user": 1}, {"bag": 1}]])
def test_a_batch_without_ids(wrong: Any) -> None:
    with pytest.raises(EmbeddingError, match=r"(?s)0 dicts with the features 'bag', 'last', 'user'"):
        list(cutter(64).passes([wrong], 0))


class Others:
    """Another process, which has other keys in a pass."""

    def gather(self, name: str, value: list[Any]) -> list[Any]:
        return [value, [value[0], "another digest"]]


def test_processes_have_the_same_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = cutter(64, parts=1).passes([{"user": [1], "last": [2], "bag": [3]}], 4)
    passes.check_alike(found)
    monkeypatch.setattr(passes, "process_group", Others)
    with pytest.raises(EmbeddingError, match=r"(?s)behind step 4.*process 1 with other.*without own_rows"):
        passes.check_alike(found)
