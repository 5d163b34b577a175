"""Slots that fit a budget, and what is measured."""

from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import sbp
from sbp import embedding as em
from sbp.errors import EmbeddingError
from sbp.placement import placement
from sbp.runtime.embedding.tiers.budgets import memory_now, rows_within, step_bytes
from sbp.runtime.embedding.tiers.pass_tables import pass_tables, remember, with_old_slots, with_slots

TX = sbp.rows(optax.adagrad(0.1))
FEATURES = (
    em.FeatureConfig("word", em.TableConfig("word", 1 << 40, 16, combiner="sum"), (None, 3)),
    em.FeatureConfig("tag", em.TableConfig("tag", 1 << 40, 16, combiner="mean"), (None,)),
    em.FeatureConfig("kind", em.TableConfig("kind", 100, 8), (None,)),
)


def slots(device: float, shards: int = 8, multiple: int = 8) -> dict[str, int]:
    """By the first feature of each table."""
    found = with_slots(pass_tables(FEATURES, TX), device, 1 << 30, shards, multiple)
    return {t.tables[0].name: t.slots for t in found}


def test_slots_take_the_budget_in_parts_of_their_lookups() -> None:
    found = slots(1 << 20)
    assert found["kind"] == 104, "no more than it has rows, rounded up"
    assert all(n % 8 == 0 for n in found.values())
    assert found["word"] == pytest.approx(3 * found["tag"], rel=0.01)
    width = 2 * 4 * 16
    taken = (found["word"] + found["tag"]) * width + found["kind"] * 2 * 4 * 8
    assert 0.99 * 8 * 2**20 < taken <= 8 * 2**20
    with pytest.raises(EmbeddingError, match="or more"):
        slots(300)


def test_slots_are_those_of_the_run_before_where_they_are_about_as_many(tmp_path: Path) -> None:
    first = with_slots(pass_tables(FEATURES, TX), 1 << 20, 1 << 30, 8, 8)
    remember(tmp_path, first)
    assert (
        with_old_slots(tmp_path, with_slots(pass_tables(FEATURES, TX), 1.005 * 2**20, 1 << 30, 8, 8), 8)
        == first
    )
    for other in (with_slots(pass_tables(FEATURES, TX), 2 << 20, 1 << 30, 8, 8), first[:1]):
        assert with_old_slots(tmp_path / "nothing", other, 8) == other
    larger = with_slots(pass_tables(FEATURES, TX), 2 << 20, 1 << 30, 8, 8)
    assert with_old_slots(tmp_path, larger, 8) == larger
    assert (
        with_old_slots(tmp_path, with_slots(pass_tables(FEATURES, TX), 1 << 20, 1 << 30, 8, 24), 24) != first
    )
    (tmp_path / "slots.json").write_text("[1, 2")
    assert with_old_slots(tmp_path, larger, 8) == larger


def test_rows_take_what_a_step_leaves() -> None:
    asked = list[float]()

    def needed(rows: float) -> float:
        asked.append(rows)
        return 1000 + 1.25 * rows + 64 * (rows // 512)  # no straight line

    rows = rows_within(10_000, 100, needed)
    assert 9_500 < needed(rows) <= 10_000 and len(asked) <= 6
    assert rows_within(10_000, 100, lambda rows: 500 + min(rows, 1_000)) == 10_000, (
        "something else holds them"
    )
    with pytest.raises(EmbeddingError, match=r"(?s)10.0 kB of each device.*12.0 kB or more.*smallest pass"):
        rows_within(10_000, 8_000, needed)


def test_what_is_taken_is_measured() -> None:
    device = placement("cpu", shape=(8,)).mesh.devices.flat[3]
    kept = jax.block_until_ready(jax.device_put(np.ones((64, 1 << 16), np.float32), device))
    before = memory_now()
    assert before.device >= kept.nbytes == 16 << 20
    own = np.ones(4 << 20)
    now = memory_now()
    if now.host:  # where the system says it
        assert now.host - before.host == pytest.approx(own.nbytes, rel=0.1)
    assert now.device == before.device and "on the host" in str(now)
    compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(jax.ShapeDtypeStruct((1024,), np.float32))
    assert step_bytes(compiled.compile()) == 4096
