"""Configurations of tables and features, and how tables are stacked."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbp import B, S, placement
from sbp.errors import EmbeddingError
from sbp.runtime.embedding.collection import Collection
from sbp.runtime.embedding.groups import pack_tables
from sbp.runtime.embedding.row_map import spread_over
from sbp.runtime.embedding.tables import (
    ColumnWise,
    FeatureConfig,
    QuotientRemainder,
    Replicated,
    TableConfig,
    TableWise,
)
from tests.errors.messages import Messages, check_message

GRID = placement("cpu", shape=(2, 4), axes=("data", "model"))
KEY = jax.random.key(0)


def one(
    name: str = "t", rows: int = 10, dim: int = 4, shape: Any = None, out: Any = None, **table: Any
) -> Any:
    """A collection of one feature `f`."""
    feature = FeatureConfig("f", TableConfig(name, rows, dim, **table), shape, out)
    return Collection([feature], multiple=8)


def two(second: FeatureConfig) -> Collection:
    return Collection([FeatureConfig("f", TableConfig("t", 10, 4)), second])


MESSAGES: Messages = {
    "no rows": (
        lambda: TableConfig("t", 0, 4),
        EmbeddingError,
        "TableConfig('t')",
        "0 ids of width 4",
        "1..281474976710656 ids, width 1 or more",
        "an id has 48 bits at most",
        "map keys to fewer ids with a Vocabulary",
    ),
    "too many rows": (
        lambda: two(FeatureConfig("g", TableConfig("u", 1 << 31, 4))),
        EmbeddingError,
        "table 'u'",
        "2147483648 ids",
        "at most 2147483647 ids",
        "ids are int32 on a device",
        "map keys to fewer ids with a Vocabulary; or Tiered, for tables larger than memory",
    ),
    "combiner": (
        lambda: TableConfig("t", 4, 4, combiner="max"),
        EmbeddingError,
        "TableConfig('t')",
        "combiner='max'",
        "'sum', 'mean', 'sqrtn', or None to keep the rows",
        "a combiner says how the rows of a bag become one vector",
        "with combiner=None any other one can be written in JAX",
    ),
    "placement": (
        lambda: TableConfig("t", 4, 4, placement="auto"),
        EmbeddingError,
        "TableConfig('t')",
        "placement='auto'",
        "RowWise(), ColumnWise(), TableWise(groups) or Replicated()",
        "the placement says how a table is split over devices",
        "RowWise() for large tables, Replicated() for tiny ones",
    ),
    "table-wise rows": (
        lambda: TableConfig("t", 4, 4, combiner=None, placement=TableWise(2)),
        EmbeddingError,
        "TableConfig('t')",
        "combiner=None with TableWise(groups=2)",
        "'sum', 'mean' or 'sqrtn'",
        "of whole tables only pooled vectors are exchanged",
        "placement=RowWise()",
    ),
    "table-wise factors": (
        lambda: TableConfig("t", 4, 4, placement=TableWise(2), compression=QuotientRemainder(2)),
        EmbeddingError,
        "TableConfig('t')",
        "QuotientRemainder(buckets=2, operation='mult') with TableWise(groups=2)",
        "Uncompressed()",
        "of whole tables only pooled vectors are exchanged",
        "placement=RowWise()",
    ),
    "no groups": (
        lambda: TableConfig("t", 4, 4, placement=TableWise(0)),
        EmbeddingError,
        "TableConfig('t')",
        "no groups with TableWise(groups=0)",
        "1 group or more",
        "groups are dealt out to devices",
        "placement=RowWise()",
    ),
    "no buckets": (
        lambda: QuotientRemainder(0),
        EmbeddingError,
        "QuotientRemainder(...)",
        "QuotientRemainder(buckets=0, operation='mult')",
        "1 bucket or more, and 'mult' or 'add'",
        "an id is split into a quotient and a remainder, whose rows are multiplied or added",
        "buckets near the root of the vocabulary size takes the fewest rows",
    ),
    "operation": (
        lambda: QuotientRemainder(2, "concat"),
        EmbeddingError,
        "QuotientRemainder(...)",
        "QuotientRemainder(buckets=2, operation='concat')",
        "1 bucket or more, and 'mult' or 'add'",
        "an id is split into a quotient and a remainder, whose rows are multiplied or added",
        "buckets near the root of the vocabulary size takes the fewest rows",
    ),
    "rank": (
        lambda: one(shape=(2, 3, 4)),
        EmbeddingError,
        "FeatureConfig('f')",
        "input_shape=(2, 3, 4)",
        "(batch,) or (batch, hotness)",
        "a feature has one bag of ids per example",
        "merge dims, or use several features",
    ),
    "no features": (
        lambda: Collection([]),
        EmbeddingError,
        "Collection(features)",
        "no features",
        "one or more FeatureConfigs",
        "a collection looks features up",
        "add one",
    ),
    "a feature twice": (
        lambda: two(FeatureConfig("f", TableConfig("t", 10, 4))),
        EmbeddingError,
        "Collection(features)",
        "2 features 'f'",
        "one",
        "inputs and results are named by feature",
        "give each its own name",
    ),
    "different tables of one name": (
        lambda: two(FeatureConfig("g", TableConfig("t", 11, 4))),
        EmbeddingError,
        "Collection(features)",
        "different tables 't'",
        "one",
        "a shared table has one configuration",
        "pass the same TableConfig, or another name",
    ),
    "multiple": (
        lambda: Collection([FeatureConfig("f", TableConfig("t", 1, 1))], multiple=0),
        EmbeddingError,
        "Collection(...)",
        "multiple=0",
        "1..32768",
        "positions are spread over so many chunks in int32 arithmetic",
        "a multiple of the number of devices, such as 256",
    ),
    "a stack of too many rows": (
        lambda: two(FeatureConfig("g", TableConfig("u", 2**31 - 5, 4))),
        EmbeddingError,
        "stack 'dim4'",
        "2147483904 rows in one stack",
        "at most 2147483647",
        "rows are counted in int32 on a device",
        "tables of different optimizers or placements are in different stacks; or two collections",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str) -> None:
    check_message(*MESSAGES[name])


@pytest.mark.parametrize(("size", "chunks"), [(24, 1), (24, 8), (96, 12), (64, 64), (2048, 256), (35, 7)])
def test_spread_is_a_bijection(size: int, chunks: int) -> None:
    spread, positions = spread_over(size, chunks), jnp.arange(size, dtype=jnp.int32)
    rows = np.asarray(spread.row(positions))
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(np.sort(rows), positions)
    np.testing.assert_array_equal(spread.position(jnp.asarray(rows)), positions)


def test_spread_of_the_largest_stack_does_not_overflow() -> None:
    spread = spread_over((2**31 - 1) // 2**15 * 2**15, 2**15)
    positions = np.unique(np.random.default_rng(0).integers(0, spread.size, 5000)).astype(np.int32)
    positions[-1] = spread.size - 1
    rows = np.asarray(spread.row(jnp.asarray(positions)))
    assert rows.min() >= 0
    assert rows.max() < spread.size
    np.testing.assert_array_equal(spread.position(jnp.asarray(rows)), positions)


@pytest.mark.parametrize("devices", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("tables", [1, 8, 26])
def test_spread_balances_sorted_ids(tables: int, devices: int) -> None:
    """Tables of one size, their ids sorted by frequency: the n-th comes 1 / n as often as the first."""
    size = tables * 1024
    frequency = np.tile(1 / np.arange(1, 1025), tables)
    row = np.asarray(spread_over(size, 256).row(jnp.arange(size, dtype=jnp.int32)))
    load = np.bincount(row // (size // devices), frequency)
    # One id cannot be shared out: the most frequent one of a table is more than another device's mean.
    assert load.max() < load.mean() + (1 if tables == 1 else 2.5)
    if tables == 1:
        assert frequency.reshape(devices, -1).sum(1).max() > 1.8 * load.mean()


@pytest.mark.parametrize("devices", [2, 8, 16, 64])
def test_strides_are_spread_over_all_owners(devices: int) -> None:
    """As ids that have their kind in their low bits, or that leave gaps for those to come."""
    size = 2**31 - 256
    spread, owned = spread_over(size, 256), size // devices
    for stride in [2**k for k in range(21)] + [3, 10, 255, 257, 1000, 10**6, 65537]:
        positions = (np.arange(min(1 << 14, -(-size // stride))) * stride).astype(np.int32)
        load = np.bincount(np.asarray(spread.row(positions)) // owned, minlength=devices)
        assert load.max() <= 1.3 * len(positions) / devices, stride


def test_tables_are_packed_evenly() -> None:
    rows = [7, 100, 3, 50, 60, 90, 1]
    groups = pack_tables(rows, 3)
    assert sorted(i for group in groups for i in group) == list(range(7))
    assert max(sum(rows[i] for i in group) for group in groups) <= 110
    assert pack_tables([4], 2) == ((0,), ())


def test_what_is_stacked_together() -> None:
    wide = TableConfig("wide", 5, 8)
    tables = [
        TableConfig("a", 5, 4),
        wide,
        TableConfig("b", 6, 4, combiner="sum"),
        TableConfig("c", 5, 4, optimizer="adagrad"),
        TableConfig("d", 5, 4, placement=Replicated()),
        TableConfig("e", 5, 4, dtype=jnp.bfloat16),
        TableConfig("g", 5, 8, placement=ColumnWise()),
        TableConfig("h", 7, 4, placement=TableWise(4)),
    ]
    features = [FeatureConfig(t.name, t) for t in tables] + [FeatureConfig("again", wide)]
    c = Collection(features, multiple=8)
    assert [tuple(t.name for t in s.tables) for s in c.stacks.values()] == [
        ("a", "b"),
        ("wide",),
        ("c",),
        ("d",),
        ("e",),
        ("g",),
        ("h",),
    ]
    params = jax.eval_shape(c.init, KEY)
    assert [(params[n].shape, params[n].dtype.name) for n in c.stacks] == [
        ((16, 4), "float32"),
        ((8, 8), "float32"),
        ((8, 4), "float32"),
        ((5, 4), "float32"),
        ((8, 4), "bfloat16"),
        ((5, 8), "float32"),
        ((4, 7, 4), "float32"),
    ]
    widths = [n.partition("_")[0] for n in c.stacks]
    assert widths == ["dim4", "dim8", "dim4", "dim4", "dim4", "dim8", "dim4"]
    first, _, _, whole, _, columns, _ = c.stacks
    split = {whole: [B], columns: [S(1)]}
    assert c.in_sbp(placement("cpu", shape=(4,))) == {n: split.get(n, [S(0)]) for n in params}
    assert c.in_sbp(GRID, ("model",)) == {n: [B, *split.get(n, [S(0)])] for n in params}
    assert c.in_sbp(GRID, ())[first] == [B, B]
    assert hash(c) == hash(Collection(features, multiple=8))


def test_every_table_has_a_place_and_its_lookups() -> None:
    shared, whole = TableConfig("a", 5, 4), TableConfig("b", 5, 4, placement=Replicated())
    c = Collection(
        [FeatureConfig("f", shared), FeatureConfig("g", whole), FeatureConfig("h", shared)], multiple=8
    )
    first, second = c.stacks
    assert [str(place) for place in c.places(GRID, ("model",))] == [
        f"a in {first} [B, S(0)], looked up by f, h",
        f"b in {second} [B, B], looked up by g",
    ]


def test_initial_rows_are_those_of_the_table_alone() -> None:
    a, b = TableConfig("a", 5, 4), TableConfig("b", 9, 4)
    features = [FeatureConfig("f", a), FeatureConfig("g", b)]
    whole = Collection(features, multiple=8)
    others = Collection(features[1:], spread=False), Collection(features[::-1], multiple=3)

    @jax.jit
    def initial(key: Any) -> Any:
        again = whole.stack(whole.unstack(whole.init(key)))
        return whole.init(key), again, *(c.unstack(c.init(key)) for c in (whole, *others))

    params, again, tables, *same = initial(KEY)
    for other in same:
        np.testing.assert_array_equal(other["b"], tables["b"])
    assert abs(float(np.std(np.concatenate(list(tables.values())))) - 0.5) < 0.15
    for name, array in again.items():
        np.testing.assert_array_equal(array, params[name])


def test_remainders_start_near_one() -> None:
    def initial(compression: QuotientRemainder) -> Any:
        c = one(initializer=jax.nn.initializers.zeros, compression=compression)
        return c.unstack(c.init(KEY))

    product, total = initial(QuotientRemainder(4)), initial(QuotientRemainder(4, "add"))
    assert {n: a.shape for n, a in product.items()} == {"t.quotient": (3, 4), "t.remainder": (4, 4)}
    assert not product["t.quotient"].any()
    assert (product["t.remainder"] == 1).all()
    assert not total["t.remainder"].any()


def test_other_compressions_can_be_written() -> None:
    class Hashed:
        def parts(self, size: int) -> dict[str, int]:
            return {".small": 3}

        def ids(self, ids: Any) -> tuple[Any, ...]:
            return (ids % 3,)

        def join(self, rows: Any) -> Any:
            return rows[0]

        def initial(self, part: str, values: Any) -> Any:
            return values

    c = one(compression=Hashed())
    out = c(c.init(KEY), {"f": np.array([1, 4, 10])})["f"]
    np.testing.assert_array_equal(out[0], out[1])
    assert not out[2].any()
