"""Tables over three tiers train as one device that holds everything, also where a run is cut off."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import sbp
from sbp import embedding as em
from sbp.errors import ArgumentError, EmbeddingError, StoreError
from sbp.placement import placement
from sbp.signature import S
from tests.runtime.embedding.tiers.clicks import (
    DEVICE,
    FEATURES,
    HOST,
    KEY,
    PLACEMENT,
    STEPS,
    TABLES,
    TX,
    alone,
    clicks,
    narrow,
    program,
    start,
    step_of,
    tiered,
    train,
)


def check_rows(tables: em.Tiered, state: Any) -> None:
    """All rows, and what the optimizer has of them, wherever they are."""
    plain, trained, _ = alone()
    for table in TABLES:
        ids = np.arange(table.vocabulary_size)
        wanted = plain.read(trained, table.name, ids)
        found = tables.read(state, table.name, ids)
        for x, y in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(y, x, rtol=0, atol=1e-9)


@pytest.fixture(autouse=True)
def _wide() -> Any:
    with jax.enable_x64(True):
        yield


def seen(first: int, last: int) -> dict[str, set[int]]:
    """The ids of each table that some steps look up."""
    found: dict[str, set[int]] = {}
    for batch, _ in clicks()[first:last]:
        for name, ids in batch.items():
            given = ids.ids if isinstance(ids, em.PaddedBags) else ids
            found.setdefault(name, set()).update({int(i) for i in given.reshape(-1)} - {em.NO_ID})
    return found


def test_equal_to_one_device_that_holds_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = tiered(tmp_path)
    done = train(tables, STEPS, progress=True)
    assert re.search(
        r"step 24/24: .* \d+ passes of \d+ rows: \d+% there, the rest \d+% host, \d+% disk",
        capsys.readouterr().err,
    )
    losses = [row["loss"] for row in done.history]
    np.testing.assert_allclose(losses, alone()[2], rtol=0, atol=1e-9)
    moved = tables.rates
    assert moved.passes >= 16 and moved.written_rows > 500 and moved.device > 500
    assert moved.sources.host and moved.sources.disk and moved.sources.new
    check_rows(tables, done.state)
    # What is on the disk alone is all of it, and it says what was changed when.
    tables.save(done.state)
    since = {n: seen(n, STEPS) for n in (0, 20)}
    for table in TABLES:
        every, late = (
            {
                int(i): int(s)
                for ids, steps, _ in tables.changed_rows(done.state, table.name, n)
                for i, s in zip(ids, steps, strict=True)
            }
            for n in (-1, 20)
        )
        assert every.keys() == since[0][table.name] and since[20][table.name] <= late.keys() < every.keys()
        assert max(every.values()) == STEPS
    tables.close()
    again = tiered(tmp_path)
    again.open()
    check_rows(again, start(again))
    again.close()


def test_a_run_goes_on_from_rows_arrays_and_batches_of_one_step(tmp_path: Path) -> None:
    """The steps behind the last save are done again, with the rows as they were then."""
    where = {"checkpoint": tmp_path / "steps", "save_every": 4}
    first = tiered(tmp_path / "rows")
    train(first, 14, **where)
    train(first, 3)  # rows go on changing, and nobody saves them
    first.close()
    again = tiered(tmp_path / "rows")
    done = train(again, STEPS, **where)
    assert done.start_step == 14
    np.testing.assert_allclose([r["loss"] for r in done.history], alone()[2][14:], rtol=0, atol=1e-9)
    check_rows(again, done.state)
    # Stores keep what kept steps name, and the version that is open.
    kept = [*tmp_path.glob("rows/*/part_0000*/version_*.json")]
    assert len(kept) <= 2 * 5
    again.close()


@pytest.mark.full
def test_a_run_goes_back_to_its_last_good_step(tmp_path: Path) -> None:
    bad = [*clicks()]
    bad[9] = (bad[9][0], np.full(32, np.nan))
    tables = tiered(tmp_path / "rows")
    policy = sbp.training.NonFinitePolicy(max_rollbacks=3, skip_batch=True)
    done = sbp.fit(
        program(),
        start(tables),
        em.TierFeed(tables, bad),
        steps=STEPS,
        progress=False,
        checkpoint=tmp_path / "steps",
        save_every=4,
        on_nonfinite=policy,
    )
    assert done.left_out == (10,)
    plain = em.Collection(FEATURES)
    params = plain.init(jax.random.key(KEY))
    state, once = TX.init(params), jax.jit(step_of(plain))
    for n, (ids, y) in enumerate(clicks()):
        if n != 9:
            params, state, _ = once(params, state, (jax.tree.map(narrow, ids), y))
    ids = np.arange(700)
    for x, y in zip(
        jax.tree.leaves(plain.read((params, state), "item", ids)),
        jax.tree.leaves(tables.read(done.state, "item", ids)),
        strict=True,
    ):
        np.testing.assert_allclose(y, x, rtol=0, atol=1e-9)
    tables.close()


# -- what bad input gets


def test_budgets_and_tables_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(EmbeddingError, match=r"(?s)device=.*384 B or more"):
        tiered(tmp_path, device=100)
    with pytest.raises(ArgumentError, match=r"(?s)host=.*unit"):
        tiered(tmp_path, host="many")
    with pytest.raises(EmbeddingError, match=r"(?s)host=1.00 kB.*10.2 kB or more.*fewer rows"):
        tiered(tmp_path, host="1kB")
    fewer = tiered(tmp_path, host="100kB").own.passes
    assert 80 < sum(p.slots for p in fewer) <= 156, "as many as the host has the keys of"
    with pytest.raises(EmbeddingError, match="batches=0"):
        tiered(tmp_path, batches=0)
    odd = em.TableConfig("odd", 9, 8, placement=em.ColumnWise())
    small = em.TableConfig("small", 9, 8, compression=em.QuotientRemainder(3))
    features = em.FeatureConfig("odd", odd), em.FeatureConfig("small", small)
    with pytest.raises(EmbeddingError, match=r"(?s)'odd'.*ColumnWise.*'small'.*QuotientRemainder"):
        em.Tiered(features, TX, PLACEMENT, device="1MB", host="1MB", ssd=tmp_path)


def test_a_state_that_is_not_of_these_tables(tmp_path: Path) -> None:
    tables = tiered(tmp_path)
    with pytest.raises(EmbeddingError, match="no key"):
        tables.read(
            start(em.Tiered(FEATURES, TX, PLACEMENT, device=DEVICE, host=HOST, ssd=tmp_path)), "tag", [1]
        )
    params, state = start(tables)
    with pytest.raises(EmbeddingError, match=r"(?s)arrays with a line per row.*\.mu.*\.nu"):
        tables.read((params, params, state), "tag", [1])
    with pytest.raises(EmbeddingError, match="another sharding"):
        tables.read(jax.device_put((params, state), jax.devices()[0]), "tag", [1])
    with pytest.raises(EmbeddingError, match=r"(?s)'word'.*'user'"):
        tables.read((params, state), "word", [1])
    with pytest.raises(EmbeddingError, match=r"0\.\.499"):
        tables.read((params, state), "tag", [500])
    tables.close()


def test_rows_of_a_run_that_has_saved_nothing_are_none(tmp_path: Path) -> None:
    """It was cut off between the commit of its rows and the end of its first save."""
    tables = tiered(tmp_path)
    train(tables, 3)
    tables.commit()
    tables.close()
    with tiered(tmp_path) as again:
        losses = [row["loss"] for row in train(again, 6).history]
        np.testing.assert_allclose(losses, alone()[2][:6], rtol=0, atol=1e-9)


def test_a_store_with_rows_of_another_training(tmp_path: Path) -> None:
    tables = tiered(tmp_path)
    tables.save(train(tables, 3).state)
    tables.close()
    other = tiered(tmp_path)
    with pytest.raises(StoreError, match="an empty one for a training that begins"):
        train(other, 3)
    larger = tiered(tmp_path / "other", device="40kB", host="4MB")
    with pytest.raises(EmbeddingError, match=r"(?s)checkpoint with tiers.*slots"):
        larger.open(other.slots, {})


def test_batches_that_cannot_be_read_ahead(tmp_path: Path) -> None:
    tables = tiered(tmp_path)
    with pytest.raises(EmbeddingError, match="an iterator"):
        em.TierFeed(tables, iter(clicks()))
    with pytest.raises(EmbeddingError, match="both, or neither"):
        em.TierFeed(tables, clicks(), ids=lambda batch: batch[0])


@pytest.mark.full
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("axes", [None, ("b",)])
def test_on_a_mesh_of_two_axes_and_with_keys_ahead(
    axes: tuple[str, ...] | None, prefetch: bool, tmp_path: Path
) -> None:
    """Rows are split over both axes, or over one, with copies along the other."""
    both = placement("cpu", shape=(2, 4), axes=("a", "b"))
    with em.Tiered(
        FEATURES, TX, both, device="20kB", host="400kB", ssd=tmp_path, batches=3, axes=axes
    ) as tables:
        params, state = start(tables)
        lies = tables.tables.in_sbp(both, axes), tables.tables.in_sbp(both, axes, like=state), [S(0), S(0)]
        options = sbp.Options(exchange=sbp.options.ExchangeOptions(prefetch=prefetch))
        once = sbp.compile(step_of(tables.tables), both, in_sbp=lies, donate_argnums=(0, 1), options=options)
        done = sbp.fit(once, (params, state), em.TierFeed(tables, clicks()[:16]), steps=16, progress=False)
        losses = [row["loss"] for row in done.history]
        np.testing.assert_allclose(losses, alone()[2][:16], rtol=0, atol=1e-9)
