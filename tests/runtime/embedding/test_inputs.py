"""Every message about the inputs and parameters of a collection."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbp import placement
from sbp.errors import EmbeddingError
from sbp.runtime.embedding.collection import Collection
from sbp.runtime.embedding.features import Bags, PaddedBags
from sbp.runtime.embedding.inputs import Entry
from sbp.runtime.embedding.tables import ColumnWise, FeatureConfig, TableConfig, TableWise
from tests.errors.messages import Messages, check_message
from tests.runtime.embedding.test_tables import GRID, KEY, one, two

IDS = np.zeros((2, 3), np.int32)


def call(collection: Collection, **inputs: Any) -> Any:
    """Only shapes are computed."""
    params = jax.eval_shape(collection.init, KEY)
    return jax.eval_shape(lambda p: collection(p, inputs), params)


(STACK,) = one().stacks
MESSAGES: Messages = {
    "missing input": (
        lambda: call(one()),
        EmbeddingError,
        "inputs",
        "no 'f'",
        "'f'",
        "every feature of the collection is looked up",
        "a batch of -1 has no ids",
    ),
    "another input": (
        lambda: call(one(), f=IDS, g=IDS),
        EmbeddingError,
        "inputs",
        "also 'g'",
        "'f'",
        "no feature of the collection has this name",
        "leave it out",
    ),
    "input shape": (
        lambda: call(one(shape=(None, 2)), f=IDS),
        EmbeddingError,
        "feature 'f', input",
        "shape (2, 3)",
        "(None, 2)",
        "the feature was given with input_shape=(None, 2)",
        "None in place of a size leaves it open",
    ),
    "output shape": (
        lambda: call(one(out=(2, 8)), f=IDS),
        EmbeddingError,
        "feature 'f', output",
        "shape (2, 4)",
        "(2, 8)",
        "the feature was given with output_shape=(2, 8)",
        "None in place of a size leaves it open",
    ),
    "output shape of pooled groups": (
        lambda: call(one(out=(3, 4), placement=TableWise(2)), f=IDS),
        EmbeddingError,
        "feature 'f', output",
        "shape (2, 4)",
        "(3, 4)",
        "the feature was given with output_shape=(3, 4)",
        "None in place of a size leaves it open",
    ),
    "ids of three dims": (
        lambda: call(one(), f=IDS[None]),
        EmbeddingError,
        "feature 'f'",
        "ids [1, 2, 3]",
        "[batch], [batch, hotness], PaddedBags or Bags",
        "a feature has one bag of ids per example",
        "merge dims, or use several features",
    ),
    "ids are floats": (
        lambda: call(one(), f=jnp.ones(3)),
        EmbeddingError,
        "feature 'f'",
        "float32[3]",
        "integers",
        "an id is a position in a table",
        "cast where the ids are made",
    ),
    "ids would be cut": (
        lambda: call(one(), f=np.array([1 << 33])),
        EmbeddingError,
        "feature 'f'",
        "8589934592 at element [0]",
        "-2147483648..2147483647, or JAX with 64-bit types",
        "with 64-bit types off, JAX would silently cut it to 32 bits, the id of another row",
        "map keys to ids with a Vocabulary, or hash them into the table",
    ),
    "weights": (
        lambda: call(one(), f=PaddedBags(IDS, np.ones(2))),
        EmbeddingError,
        "feature 'f'",
        "weights [2]",
        "[2, 3]",
        "each id has one weight",
        "shape them as the ids",
    ),
    "other batch": (
        lambda: call(two(FeatureConfig("g", TableConfig("u", 5, 4))), f=IDS, g=IDS[:1]),
        EmbeddingError,
        "feature 'g'",
        "1 examples",
        "2, as 'f' has",
        "the features of one batch belong to the same examples",
        "pad with -1, or empty bags",
    ),
    "ragged bags of whole tables": (
        lambda: call(one(placement=TableWise(2)), f=Bags.from_lists([[1]])),
        EmbeddingError,
        "feature 'f'",
        "ragged Bags",
        "bags of fixed hotness",
        "TableWise(groups=2) pools on the device of the table, where all bags have one shape",
        "Bags.pad(max_hotness), or placement=RowWise()",
    ),
    "check: id": (
        lambda: one().check({"f": [[1, 10], [-2, 0]]}),
        EmbeddingError,
        "feature 'f'",
        "10 at element [0, 1], and 1 more out of range",
        "0..9, and -1 for no id",
        "the table has 10 rows",
        "map keys to ids with a Vocabulary, or hash them into the table",
    ),
    "check: weight": (
        lambda: one().check({"f": PaddedBags(IDS, np.full((2, 3), np.nan))}),
        EmbeddingError,
        "feature 'f'",
        "weight nan at element [0, 0]",
        "finite weights",
        "one such weight makes the whole table NaN in a few steps",
        "clean the column, or leave the id out",
    ),
    "check: weights": (
        lambda: one().check({"f": PaddedBags(IDS, np.ones(3))}),
        EmbeddingError,
        "feature 'f'",
        "weights float64[3]",
        "real numbers [2, 3]",
        "each id has one weight",
        "shape them as the ids",
    ),
    "check: a bag": (
        lambda: one().check({"f": Bags.from_lists([[], [10]])}),
        EmbeddingError,
        "feature 'f'",
        "10 at bag 1, place 0",
        "0..9",
        "the table has 10 rows",
        "map keys to ids with a Vocabulary, or hash them into the table",
    ),
    "check: weight of a bag": (
        lambda: one().check({"f": Bags(np.ones(3, int), np.array([1, 1, 3]), np.array([1, 1, np.inf]))}),
        EmbeddingError,
        "feature 'f'",
        "weight inf at bag 1, place 1",
        "finite weights",
        "one such weight makes the whole table NaN in a few steps",
        "clean the column, or leave the id out",
    ),
    "check: offsets": (
        lambda: one().check({"f": Bags(np.ones(3, int), np.array([0, 4]))}),
        EmbeddingError,
        "feature 'f'",
        "offsets from 0 to 4",
        "0..3",
        "there are 3 values",
        "build bags with Bags.from_values",
    ),
    "check: offsets decrease": (
        lambda: one().check({"f": Bags(np.ones(3, int), np.array([2, 1]))}),
        EmbeddingError,
        "feature 'f', bag 0",
        "offsets 2, 1",
        "offsets that never decrease",
        "a bag cannot end before it begins",
        "check the column; lengths go to from_lengths",
    ),
    "no parameters": (
        lambda: one()({}, {"f": IDS}),
        EmbeddingError,
        f"params[{STACK!r}]",
        "nothing",
        "(16, 4)",
        "these are the parameters of another collection, or of another spread or multiple",
        "params from init(key); tables of another collection go through unstack and stack",
    ),
    "other parameters": (
        lambda: one()({STACK: np.ones((8, 4))}, {"f": IDS}),
        EmbeddingError,
        f"params[{STACK!r}]",
        "shape (8, 4)",
        "(16, 4)",
        "these are the parameters of another collection, or of another spread or multiple",
        "params from init(key); tables of another collection go through unstack and stack",
    ),
    "stack: no table": (
        lambda: one().stack({}),
        EmbeddingError,
        "table 't'",
        "nothing",
        "(10, 4)",
        "every table has its rows",
        "as unstack(params) gives it",
    ),
    "stack: another shape": (
        lambda: one().stack({"t": np.ones((11, 4))}),
        EmbeddingError,
        "table 't'",
        "shape (11, 4)",
        "(10, 4)",
        "every table has its rows",
        "as unstack(params) gives it",
    ),
    "no such axis": (
        lambda: one().in_sbp(GRID, ("batch",)),
        EmbeddingError,
        "in_sbp(...)",
        "axis 'batch'",
        "'data', 'model'",
        "tables are split over axes of the placement",
        "name axes of the placement",
    ),
    "uneven rows": (
        lambda: one().in_sbp(placement("cpu", shape=(3,))),
        EmbeddingError,
        f"stack {STACK!r}",
        "16 rows over 3 devices",
        "a multiple of 3",
        "a jax.Array has no uneven split; the stack would be whole on every device",
        "Collection(..., multiple=3) or a multiple of it",
    ),
    "uneven columns": (
        lambda: one(placement=ColumnWise()).in_sbp(placement("cpu", shape=(8,))),
        EmbeddingError,
        f"stack {next(iter(one(placement=ColumnWise()).stacks))!r}",
        "4 columns over 8 devices",
        "a multiple of 8",
        "a jax.Array has no uneven split; the stack would be whole on every device",
        "another embedding_dim, or placement=RowWise()",
    ),
    "uneven groups": (
        lambda: one(placement=TableWise(3)).in_sbp(placement("cpu", shape=(8,))),
        EmbeddingError,
        f"stack {next(iter(one(placement=TableWise(3)).stacks))!r}",
        "3 groups over 8 devices",
        "a multiple of 8",
        "a jax.Array has no uneven split; the stack would be whole on every device",
        "TableWise(groups=8)",
    ),
    "no such table": (
        lambda: one().write({}, "u", [0], 0),
        EmbeddingError,
        "Collection",
        "table 'u'",
        "'t'",
        "a collection has the tables of its features",
        "the name in its TableConfig",
    ),
    "write: no such row": (
        lambda: one().write({}, "t", [10], 0),
        EmbeddingError,
        "write(..., 't', ids)",
        "10 at element [0]",
        "0..9",
        "the table has 10 rows",
        "map keys to ids with a Vocabulary, or hash them into the table",
    ),
    "write: an id twice": (
        lambda: one().write({}, "t", [3, 1, 3], 0),
        EmbeddingError,
        "write(..., 't', ids)",
        "1 ids more than once",
        "distinct ids",
        "of two rows for one id it is not defined which one stays",
        "each id once",
    ),
    "write: rows of nothing": (
        lambda: one().write(one().init(KEY), "t", [3], {"mu": np.zeros((1, 4))}),
        EmbeddingError,
        f"write(...): rows of stack {STACK!r}",
        "['mu']",
        f"[{STACK!r}]",
        "lines are written to the arrays at their paths",
        "a tree like that of read(...)",
    ),
    "write: rows of another width": (
        lambda: one().write(one().init(KEY), "t", [3, 4], np.zeros((2, 3))),
        EmbeddingError,
        f"write(...): [{STACK!r}]",
        "rows of shape (2, 3)",
        "(2, 4)",
        "there is a line for each id",
        "the rows in the order of the ids",
    ),
    "an initializer of whole tables": (
        lambda: one(initializer=lambda key, shape, dtype: np.zeros((10, 4))).init(KEY),
        EmbeddingError,
        "the initializer of 't'",
        "(10, 4)",
        "(1, 4)",
        "every row is made by itself, of its own key, on the device that has it",
        "an initializer of jax.nn.initializers; rows that are known go through write",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str) -> None:
    check_message(*MESSAGES[name])


def test_entries_tell_what_is_present() -> None:
    feature = FeatureConfig("f", TableConfig("t", 10, 4))
    e = Entry(feature, jnp.array([[0, 9, 10, -1, -2]]), None, None, False)
    np.testing.assert_array_equal(e.present(), [[True, True, False, False, False]])
