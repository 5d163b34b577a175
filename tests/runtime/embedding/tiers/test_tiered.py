"""Tables over three tiers train as one device that holds everything, also where a run is cut off."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp import embedding as em
from sbp.errors import ArgumentError, EmbeddingError, StoreError
from sbp.placement import placement
from sbp.signature import S

STEPS = 24
KEY = 3
TABLES = (
    em.TableConfig("user", 900, 8, combiner="sum", dtype=np.float64),
    em.TableConfig(
        "item", 700, 8, initializer=jax.nn.initializers.normal(0.3), combiner="sum", dtype=np.float64
    ),
    em.TableConfig("tag", 500, 8, combiner="mean", dtype=np.float64),
)
FEATURES = (
    em.FeatureConfig("user", TABLES[0], (None,)),
    em.FeatureConfig("item", TABLES[1], (None, 3)),
    em.FeatureConfig("tag", TABLES[2], (None, 2)),
)
TX = sbp.rows(optax.adam(0.01))


@functools.cache
def clicks() -> list[tuple[dict[str, Any], np.ndarray]]:
    """Ids with a long tail: few keys come often, many seldom."""
    rng = np.random.default_rng(0)

    def ids(size: int, shape: tuple[int, ...]) -> np.ndarray:
        return np.minimum(rng.pareto(0.25, shape) * 5, size - 1).astype(np.int64)

    def one() -> dict[str, Any]:
        tags = ids(500, (32, 2))
        tags[::3, 1] = em.NO_ID
        weights = rng.uniform(0.5, 2, tags.shape)
        return {"user": ids(900, (32,)), "item": ids(700, (32, 3)), "tag": em.PaddedBags(tags, weights)}

    return [(one(), rng.normal(size=32)) for _ in range(STEPS)]


def step_of(tables: em.Collection) -> Any:
    def train_step(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            vectors = tables(params, batch[0])
            return jnp.mean(
                (jnp.tanh(vectors["user"] * vectors["item"] + vectors["tag"]).sum(1) - batch[1]) ** 2
            )

        value, slopes = jax.value_and_grad(loss)(params)
        added, state = TX.update(slopes, state, params)
        return optax.apply_updates(params, added), state, value

    return train_step


@functools.cache
def alone() -> tuple[em.Collection, Any, list[float]]:
    """A collection, the state, and the losses of one device that holds everything."""
    tables = em.Collection(FEATURES)
    params = tables.init(jax.random.key(KEY))
    state, losses, once = TX.init(params), list[float](), jax.jit(step_of(tables))
    for ids, y in clicks():
        params, state, loss = once(params, state, (jax.tree.map(narrow, ids), y))
        losses.append(float(loss))
    return tables, (params, state), losses


def narrow(x: np.ndarray) -> np.ndarray:
    return x.astype(np.int32) if x.dtype == np.int64 else x


def tiered(folder: Path, **given: Any) -> em.Tiered:
    budgets = {"device": "9kB", "host": "60kB", "batches": 3} | given
    return em.Tiered(FEATURES, TX, PLACEMENT, ssd=folder, **budgets)


PLACEMENT = placement("cpu", shape=(8,))


@functools.cache
def program() -> Any:
    """The step on eight devices; all tests have tables of one size, so it is compiled once."""
    tables = em.Tiered(FEATURES, TX, PLACEMENT, device="9kB", host="60kB", ssd="nowhere").tables
    params = jax.eval_shape(tables.init, jax.random.key(0))
    in_sbp = tables.in_sbp(PLACEMENT), tables.in_sbp(PLACEMENT, like=jax.eval_shape(TX.init, params)), [S(0)]
    return sbp.compile(step_of(tables), PLACEMENT, in_sbp=in_sbp, donate_argnums=(0, 1))


def start(tables: em.Tiered) -> tuple[Any, Any]:
    params = tables.init(jax.random.key(KEY))
    return params, TX.init(params)


def train(tables: em.Tiered, steps: int, **options: Any) -> Any:
    return sbp.fit(
        program(), start(tables), em.TierFeed(tables, clicks()), steps=steps, progress=False, **options
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


def test_equal_to_one_device_that_holds_everything(tmp_path: Path) -> None:
    tables = tiered(tmp_path)
    done = train(tables, STEPS)
    losses = [row["loss"] for row in done.history]
    np.testing.assert_allclose(losses, alone()[2], rtol=0, atol=1e-9)
    moved = tables.rates
    assert moved.passes >= 16 and moved.written > 500 and moved.device > 500
    assert moved.sources.host and moved.sources.disk and moved.sources.new
    check_rows(tables, done.state)
    # What is on the disk alone is all of it.
    tables.save(done.state)
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
            start(em.Tiered(FEATURES, TX, PLACEMENT, device="9kB", host="60kB", ssd=tmp_path)), "tag", [1]
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


def test_a_store_with_rows_of_another_training(tmp_path: Path) -> None:
    tables = tiered(tmp_path)
    tables.save(train(tables, 3).state)
    tables.close()
    other = tiered(tmp_path)
    with pytest.raises(StoreError, match="an empty one for a training that begins"):
        train(other, 3)
    larger = tiered(tmp_path / "other", device="40kB")
    with pytest.raises(EmbeddingError, match=r"(?s)checkpoint with tiers.*slots"):
        larger.open({name: x.keys for name, x in other.slots.items()}, {})


def test_batches_that_cannot_be_read_ahead(tmp_path: Path) -> None:
    tables = tiered(tmp_path)
    with pytest.raises(EmbeddingError, match="an iterator"):
        em.TierFeed(tables, iter(clicks()))
    with pytest.raises(EmbeddingError, match="both, or neither"):
        em.TierFeed(tables, clicks(), ids=lambda batch: batch[0])
