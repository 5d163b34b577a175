"""Collections against a dictionary of tables in NumPy: every layout, values and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import S
from sbp.errors import EmbeddingError
from sbp.runtime.embedding.collection import Collection
from sbp.runtime.embedding.eviction import LeastRecentlyUsed
from sbp.runtime.embedding.features import Bags, KeyedBags, PaddedBags
from sbp.runtime.embedding.tables import (
    ColumnWise,
    FeatureConfig,
    QuotientRemainder,
    Replicated,
    RowWise,
    TableConfig,
    TableWise,
    Uncompressed,
)
from sbp.runtime.embedding.vocabulary import Vocabulary, initial_rows

KEY = jax.random.key(3)
BATCH = 6
LISTS = [[3, 1], [], [2, 2, 0], [4], [], [1, 1, 1]]
RAGGED = Bags.from_lists(LISTS, [[0.5] * len(bag) for bag in LISTS], capacity=12)
SHARED = {"colour": "sum", "taste": "mean", "shape": "sqrtn"}


def features(**table: Any) -> list[FeatureConfig]:
    """Four tables, one of them for two features, of two widths."""
    colour = TableConfig("colour", 5, 4, combiner="sum", **table)
    taste = TableConfig("taste", 11, 4, **table)
    shape = TableConfig("shape", 7, 8, combiner="sqrtn", **table)
    return [
        FeatureConfig("colour", colour, (BATCH,), (None, 4)),
        FeatureConfig("taste", taste, (None, 3)),
        FeatureConfig("taste before", taste),
        FeatureConfig("shape", shape),
    ]


def inputs() -> dict[str, Any]:
    """Single and several ids, weights, no id, and ids that are out of range (of which no row may be read)."""
    random = np.random.default_rng(1)
    return {
        "colour": np.array([0, 4, 5, -1, 2, 2**31 - 1], np.int32),
        "taste": random.integers(-1, 13, (BATCH, 3)).astype(np.uint8).view(np.int8),
        "taste before": PaddedBags(random.integers(-1, 11, (BATCH, 2)), random.normal(size=(BATCH, 2))),
        "shape": np.array([[0, -1], [6, 6], [7, 1], [-1, -1], [-5, 2], [3, 4]]),
    }


def start(c: Collection) -> dict[str, Any]:
    """Parameters without a compilation; rows of nobody are NaN-free but not zero, so reading one shows."""
    random = np.random.default_rng(7)
    shapes = jax.eval_shape(c.init, KEY)
    return {n: random.normal(size=a.shape).astype(np.float32) for n, a in shapes.items()}


def embedding(table: TableConfig, tables: dict[str, np.ndarray], i: int) -> np.ndarray:
    """One embedding, by hand."""
    if isinstance(table.compression, Uncompressed):
        return tables[table.name][i]
    q, r = divmod(i, table.compression.buckets)
    one, two = tables[table.name + ".quotient"][q], tables[table.name + ".remainder"][r]
    return one * two if table.compression.operation == "mult" else one + two


def bag(feature: FeatureConfig, tables: dict[str, np.ndarray], ids: Any, weights: Any) -> np.ndarray:
    """One bag, by hand."""
    table = feature.table
    pairs = [(i, w) for i, w in zip(ids, weights, strict=True) if 0 <= i < table.vocabulary_size]
    out = sum((w * embedding(table, tables, int(i)) for i, w in pairs), np.zeros(table.embedding_dim))
    by = {"sum": lambda w: 1, "mean": np.sum, "sqrtn": lambda w: np.sqrt(np.sum(np.square(w)))}
    return out / by[table.combiner]([w for _, w in pairs]) if pairs else out


def reference(c: Collection, tables: Any, given: Any) -> dict[str, np.ndarray]:
    """Feature by feature and bag by bag, in float64."""
    tables = {name: np.asarray(rows, np.float64) for name, rows in tables.items()}
    out = {}
    for f in c.features:
        padded = given[f.name]
        padded = padded.pad(4) if isinstance(padded, Bags) else padded
        padded = padded if isinstance(padded, PaddedBags) else PaddedBags(padded)
        ids = np.asarray(padded.ids).reshape(BATCH, -1)
        weights = np.ones(ids.shape) if padded.weights is None else padded.weights
        out[f.name] = np.stack([bag(f, tables, i, w) for i, w in zip(ids, weights, strict=True)])
    return out


LAYOUTS: dict[str, dict[str, Any]] = {
    "rows": {},
    "columns": {"placement": ColumnWise()},
    "replicated": {"placement": Replicated()},
    "tables": {"placement": TableWise(3)},
    "product": {"compression": QuotientRemainder(3)},
    "sum": {"compression": QuotientRemainder(2, "add"), "placement": RowWise()},
}


@pytest.mark.some(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_a_dictionary_of_tables(layout: str) -> None:
    c = Collection(features(**LAYOUTS[layout]), multiple=8)
    given = inputs()
    if layout == "rows":
        given["taste"] = RAGGED
        c = Collection(
            [c.features[0], FeatureConfig("taste", c.features[1].table), *c.features[2:]], multiple=8
        )
    params = start(c)
    directions = {
        f.name: np.random.default_rng(i).normal(size=(BATCH, f.table.embedding_dim))
        for i, f in enumerate(c.features)
    }

    @jax.jit
    def run(params: Any, given: Any) -> tuple[Any, ...]:
        def loss(params: Any) -> Any:
            out = c(params, given)
            return sum(jnp.sum(out[name] * d.astype(np.float32)) for name, d in directions.items()), out

        grads, out = jax.grad(loss, has_aux=True)(params)
        return out, grads, c.unstack(params), c.unstack(grads)

    out, grads, tables, slopes = run(params, given)
    wanted = reference(c, tables, given)
    assert set(out) == set(wanted)
    for name, rows in wanted.items():
        np.testing.assert_allclose(out[name], rows, rtol=2e-5, atol=1e-6, err_msg=name)
    for name, rows in slope(c, tables, given, directions).items():
        np.testing.assert_allclose(slopes[name], rows, rtol=2e-5, atol=1e-5, err_msg=name)
    padding = sum(float(np.abs(g).sum()) for g in grads.values())
    counted = sum(float(np.abs(g).sum()) for g in slopes.values())
    assert padding == pytest.approx(counted, rel=1e-5)  # rows of nobody have no gradient


def slope(c: Collection, tables: Any, given: Any, directions: Any) -> dict[str, np.ndarray]:
    """The derivative of the reference, entry by entry: it is linear or bilinear, so differences are exact."""
    tables = {name: np.array(rows, np.float64) for name, rows in tables.items()}

    def loss(changed: Any) -> float:
        return sum(float((rows * directions[n]).sum()) for n, rows in reference(c, changed, given).items())

    out = {}
    for name, rows in tables.items():
        g = np.zeros(rows.shape)
        for at in np.ndindex(rows.shape):
            up, down = rows.copy(), rows.copy()
            up[at] += 1
            down[at] -= 1
            g[at] = (loss({**tables, name: up}) - loss({**tables, name: down})) / 2
        out[name] = g
    return out


def test_rows_are_out_of_bounds_where_there_is_no_id() -> None:
    c = Collection(features(), multiple=8)
    rows = jax.jit(c.rows)(inputs())
    four, eight = c.stacks
    assert {n: r.shape for n, r in rows.items()} == {four: (BATCH, 6), eight: (BATCH, 2)}
    np.testing.assert_array_equal(np.asarray(rows[four])[:, 0] == 16, [0, 0, 1, 1, 0, 1])
    np.testing.assert_array_equal(rows[eight] == 8, [[0, 1], [0, 0], [1, 0], [1, 1], [1, 0], [0, 0]])
    assert all(int(r.min()) >= 0 for r in rows.values())


def test_keyed_bags_are_inputs() -> None:
    table = TableConfig("t", 5, 4, combiner="sum")
    c = Collection([FeatureConfig("a", table), FeatureConfig("b", table)], multiple=8)
    keyed = KeyedBags.from_bags({"a": RAGGED, "b": RAGGED})
    params = start(c)
    c.check(keyed)
    out, tables = jax.jit(lambda params, keyed: (c(params, keyed), c.unstack(params)))(params, keyed)
    wanted = reference(c, tables, {"a": RAGGED, "b": RAGGED})
    for name in ("a", "b"):
        np.testing.assert_allclose(out[name], wanted[name], rtol=2e-5, atol=1e-6)


def test_rows_can_be_kept() -> None:
    c = Collection([FeatureConfig("f", TableConfig("t", 5, 4, combiner=None))], multiple=5)
    ids = np.array([[1, -1], [4, 1]])
    out, (table,) = jax.jit(lambda p, i: (c(p, {"f": i})["f"], tuple(c.unstack(p).values())))(start(c), ids)
    np.testing.assert_array_equal(
        out, np.where(ids[..., None] >= 0, np.asarray(table)[np.maximum(ids, 0)], 0)
    )
    for given, shape in ((ids[:, 0], (2, 4)), (RAGGED, (12, 4))):
        assert jax.eval_shape(c.__call__, start(c), {"f": given})["f"].shape == shape


def test_check_gives_int32_and_names_every_wrong_feature() -> None:
    c = Collection(features())
    good = inputs() | {"colour": np.array([0] * BATCH), "taste": np.array([[1 << 3, -1, 0]] * BATCH)}
    good["shape"] = RAGGED
    checked = c.check(good)
    assert checked["taste"].dtype == checked["taste before"].ids.dtype == np.int32
    assert checked["shape"] is RAGGED
    bad = good | {"colour": [5], "taste": [[1 << 40]], "shape": Bags.from_lists([[1], [7]])}
    with pytest.raises(EmbeddingError) as caught:
        c.check(bad)
    assert [(p.where, p.got.split(",")[0]) for p in caught.value.problems] == [
        ("feature 'colour'", "5 at element [0]"),
        ("feature 'taste'", "1099511627776 at element [0"),
        ("feature 'shape'", "7 at bag 1"),
    ]


@pytest.mark.usefixtures("x64")
def test_wide_ids_are_not_cut_to_other_rows() -> None:
    c = Collection([FeatureConfig("f", TableConfig("t", 5, 4))])
    given = {"f": np.array([1, (1 << 32) + 1, -(1 << 32)])}
    out, rows = jax.jit(lambda p, given: (c(p, given)["f"], c.rows(given)))(start(c), given)
    assert out[0].any()
    assert not out[1:].any()
    assert all(r.dtype == np.int32 for r in rows.values())


def test_unsigned_ids_are_not_taken_for_negative_ones() -> None:
    c = Collection([FeatureConfig("f", TableConfig("t", 5, 4))])
    out = jax.jit(c.__call__)(start(c), {"f": np.array([4, 2**32 - 1], np.uint32)})["f"]
    assert out[0].any()
    assert not out[1].any()


@pytest.mark.parametrize("placement", [RowWise(), TableWise(2)], ids=["rows", "tables"])
def test_a_vocabulary_resets_what_it_reassigns(placement: Any) -> None:
    tables = [TableConfig(n, 3, 4, placement=placement) for n in ("a", "b")]
    c = Collection([FeatureConfig(t.name, t) for t in tables], multiple=8)
    params = before = start(c)
    words = Vocabulary(3, LeastRecentlyUsed())
    for keys in ([10, 20, 30], [20, 30], [40]):
        found = words.lookup(keys)
        params = c.write(params, "b", found.new_rows, initial_rows(0, found.new_keys, 4))
    out = c(params, {"a": words.find([20, 40]), "b": words.find([20, 40])})
    np.testing.assert_array_equal(out["b"], initial_rows(0, [20, 40], 4))
    np.testing.assert_array_equal(c.unstack(params)["a"], c.unstack(before)["a"])


@pytest.mark.parametrize("layout", ["rows", "tables"])
def test_compiled_on_eight_devices(layout: str) -> None:
    table = {"rows": RowWise(), "tables": TableWise(8)}[layout]
    c = Collection([FeatureConfig(n, TableConfig(n, 12, 4, placement=table)) for n in "abc"], multiple=8)
    line = sbp.placement("cpu", shape=(8,))
    params = start(c)
    given = {n: np.random.default_rng(0).integers(-1, 13, (16, 2)).astype(np.int32) for n in "abc"}

    def loss(params: Any, given: Any) -> Any:
        return sum(jnp.sum(out**2) for out in c(params, given).values())

    program = sbp.compile(jax.value_and_grad(loss), line, in_sbp=(c.in_sbp(line), [S(0)]))
    value, grads = program(params, given)
    wanted, slopes = jax.jit(jax.value_and_grad(loss))(params, given)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for name, g in slopes.items():
        np.testing.assert_allclose(grads[name], g, rtol=1e-5, atol=1e-6)
