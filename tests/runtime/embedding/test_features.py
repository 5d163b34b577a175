"""Bags and pooling: against loops in NumPy, every message, and what has a gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbp.errors import EmbeddingError
from sbp.runtime.embedding.features import Bags, KeyedBags, PaddedBags
from sbp.runtime.embedding.pooling import COMBINERS, pool
from tests.errors.messages import Messages, check_message

LISTS = [[3, 1], [], [2, 2, 0], [4]]
WEIGHTS = [[0.5, 2.0], [], [1.0, -1.0, 3.0], [0.0]]
TABLE = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)

MESSAGES: Messages = {
    "offsets do not add up": (
        lambda: Bags.from_values([1, 2, 3], [0, 2], feature="colour"),
        EmbeddingError,
        "feature 'colour'",
        "offsets from 0 to 2 for 3 values",
        "offsets from 0 to 3",
        "every value belongs to one bag",
        "of a slice of an Arrow column take its own values, and subtract its first offset",
    ),
    "offsets do not begin at 0": (
        lambda: Bags.from_values([1, 2], [1, 2], feature="colour"),
        EmbeddingError,
        "feature 'colour'",
        "offsets from 1 to 2 for 2 values",
        "offsets from 0 to 2",
        "every value belongs to one bag",
        "of a slice of an Arrow column take its own values, and subtract its first offset",
    ),
    "values of two dims": (
        lambda: Bags.from_values([[1]], [0, 1], feature="colour"),
        EmbeddingError,
        "feature 'colour'",
        "values of shape [1, 1]",
        "one dim",
        "bags stand in a row",
        "reshape the values",
    ),
    "offsets decrease": (
        lambda: Bags.from_values([1, 2, 3], [0, 2, 1, 3], feature="colour"),
        EmbeddingError,
        "feature 'colour', bag 1",
        "offsets 2, 1",
        "offsets that never decrease",
        "a bag cannot end before it begins",
        "check the column; lengths go to from_lengths",
    ),
    "no offsets": (
        lambda: Bags.from_values([], [], feature="colour"),
        EmbeddingError,
        "feature 'colour'",
        "no offsets",
        "one more offset than bags",
        "bag i ends at i + 1",
        "[0] for no bag, or from_lengths",
    ),
    "wide offsets": (
        lambda: Bags.from_values([1], [0, 1 << 31], feature="colour"),
        EmbeddingError,
        "feature 'colour'",
        "offset 2147483648",
        "at most 2147483647",
        "a device counts positions in 32 bits",
        "smaller batches",
    ),
    "offsets are floats": (
        lambda: Bags.from_values([1], [0.0, 1.0], feature="colour"),
        EmbeddingError,
        "feature 'colour', offsets",
        "float64[2]",
        "integers of up to 64 bits",
        "a float holds only the first 53 bits of a key (float32: 24), other types hold none",
        "read the column as int64; hash what is text",
    ),
    "offsets of two dims": (
        lambda: Bags.from_values([1], [[0, 1]], feature="colour"),
        EmbeddingError,
        "feature 'colour'",
        "offsets of shape [1, 2]",
        "one dim",
        "bags stand in a row",
        "reshape the offsets",
    ),
    "negative length": (
        lambda: Bags.from_lengths([1], [2, -1], feature="colour"),
        EmbeddingError,
        "feature 'colour', bag 1",
        "length -1",
        "0 or more",
        "a length is how many ids a bag has",
        "check the column",
    ),
    "negative id": (
        lambda: Bags.from_lists([[1], [2, -7]], feature="colour"),
        EmbeddingError,
        "feature 'colour'",
        "-7 at bag 1, place 1",
        "0..2147483647",
        "an id is a position in a table",
        "map keys to ids with a Vocabulary, or hash them into the table",
    ),
    "wide id": (
        lambda: Bags.from_lists([[1], [1 << 40]], feature="colour"),
        EmbeddingError,
        "feature 'colour'",
        "1099511627776 at bag 1, place 0",
        "0..2147483647",
        "with 64-bit types off, JAX would silently cut it to 32 bits, the id of another row",
        "map keys to ids with a Vocabulary, or hash them into the table",
    ),
    "ids are floats": (
        lambda: Bags.from_lists([[1.5]], feature="colour"),
        EmbeddingError,
        "feature 'colour', values",
        "float64[1]",
        "integers of up to 64 bits",
        "a float holds only the first 53 bits of a key (float32: 24), other types hold none",
        "read the column as int64; hash what is text",
    ),
    "capacity": (
        lambda: Bags.from_lists([[1, 2]], capacity=1, feature="colour"),
        EmbeddingError,
        "feature 'colour'",
        "2 values",
        "at most capacity=1",
        "values are padded to the capacity, never cut",
        "a larger capacity, or fewer bags per batch",
    ),
    "NaN": (
        lambda: Bags.from_lists([[1], [2, 3]], [[1.0], [0.5, np.nan]], feature="colour"),
        EmbeddingError,
        "feature 'colour'",
        "weight nan at bag 1, place 1",
        "finite weights",
        "one such weight makes the whole table NaN in a few steps",
        "clean the column, or leave the id out",
    ),
    "infinite in float32": (
        lambda: Bags.from_lists([[1]], [[1e300]], feature="colour"),
        EmbeddingError,
        "feature 'colour'",
        "weight inf at bag 0, place 0",
        "finite weights",
        "one such weight makes the whole table NaN in a few steps",
        "clean the column, or leave the id out",
    ),
    "weights of another shape": (
        lambda: Bags.from_values([1, 2], [0, 2], [1.0], feature="colour"),
        EmbeddingError,
        "feature 'colour'",
        "weights float32[1]",
        "real numbers [2]",
        "each id has one weight",
        "shape them as the ids",
    ),
    "weights are words": (
        lambda: Bags.from_values([1], [0, 1], ["a"], feature="colour"),
        EmbeddingError,
        "feature 'colour'",
        "weights <U1[1]",
        "real numbers [1]",
        "each id has one weight",
        "shape them as the ids",
    ),
    "weights of a bag": (
        lambda: Bags.from_lists([[1], [2, 3]], [[1.0], [1.0]], feature="colour"),
        EmbeddingError,
        "feature 'colour', bag 1",
        "1 weights",
        "2",
        "each id has one weight",
        "weights shaped as the ids",
    ),
    "fewer bags of weights": (
        lambda: Bags.from_lists([[1], [2]], [[1.0]], feature="colour"),
        EmbeddingError,
        "feature 'colour', bag 2",
        "1 bags of weights",
        "2 bags",
        "each id has one weight",
        "weights shaped as the ids",
    ),
    "more bags of weights": (
        lambda: Bags.from_lists([[1]], [[1.0], [2.0]], feature="colour"),
        EmbeddingError,
        "feature 'colour', bag 1",
        "1 weights",
        "1 bags",
        "each id has one weight",
        "weights shaped as the ids",
    ),
    "too hot": (
        lambda: Bags.from_lists(LISTS).pad(2, feature="colour"),
        EmbeddingError,
        "feature 'colour', bag 2",
        "3 ids",
        "at most max_hotness=2",
        "ids are never left out silently",
        "max_hotness=3, or truncate=True",
    ),
    "keyed: other batch": (
        lambda: KeyedBags.from_bags({"a": Bags.from_lists([[1]]), "b": Bags.from_lists([])}),
        EmbeddingError,
        "feature 'b'",
        "0 bags",
        "1, as 'a' has",
        "there is one bag per example and feature",
        "an empty bag where an example has no id",
    ),
    "keyed: only some weights": (
        lambda: KeyedBags.from_bags({"a": Bags.from_lists([[1]]), "b": Bags.from_lists([[1]], [[1.0]])}),
        EmbeddingError,
        "feature 'b'",
        "weights",
        "as 'a'",
        "the weights of all features are one array",
        "weights of 1 where there are none",
    ),
    "keyed: no features": (
        lambda: KeyedBags.from_bags({}),
        EmbeddingError,
        "KeyedBags.from_bags(bags)",
        "no features",
        "1 or more",
        "the number of bags is that of the first feature",
        "one Bags per feature",
    ),
    "keyed: no such feature": (
        lambda: KeyedBags.from_bags({"a": Bags.from_lists(LISTS)})["b"],
        EmbeddingError,
        "KeyedBags[...]",
        "'b'",
        "'a'",
        "bags are named by feature",
        "the name of a feature",
    ),
    "combiner": (
        lambda: pool(np.ones((1, 1, 3)), np.zeros((1, 1)), "max"),
        EmbeddingError,
        "pool(...)",
        "combiner='max'",
        "'sum', 'mean', 'sqrtn', or None to keep the rows",
        "a combiner says how the rows of a bag become one vector",
        "with combiner=None any other one can be written in JAX",
    ),
    "rows and ids": (
        lambda: pool(np.ones((1, 2, 3)), np.zeros((1, 3), int)),
        EmbeddingError,
        "pool(...)",
        "rows [1, 2, 3] for ids [1, 3]",
        "rows [batch, hotness, dim] for ids [batch, hotness]",
        "there is one row per place of a bag",
        "look up bags.values, or the padded ids",
    ),
    "rows and bags": (
        lambda: pool(np.ones((2, 3)), Bags.from_lists([[1, 2, 3]])),
        EmbeddingError,
        "pool(...)",
        "rows [2, 3] for ids [3]",
        "rows [capacity, dim]",
        "there is one row per place of a bag",
        "look up bags.values, or the padded ids",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str) -> None:
    check_message(*MESSAGES[name])


def reference(lists: Any, weights: Any, combiner: str) -> np.ndarray:
    """Bag by bag, in float64."""
    out = np.zeros((len(lists), 3))
    for i, bag in enumerate(lists):
        w = np.ones(len(bag)) if weights is None else np.array(weights[i])
        total = {"sum": 1.0, "mean": w.sum(), "sqrtn": np.sqrt((w * w).sum())}[combiner]
        if total:
            out[i] = (
                sum((a * TABLE[j].astype(float) for a, j in zip(w, bag, strict=True)), np.zeros(3)) / total
            )
    return out


@jax.jit
def pooled(table: Any, flat: Bags, padded: PaddedBags) -> dict[str, Any]:
    """Both layouts and all combiners, in one program."""
    rows = table.at[flat.values].get(mode="fill", fill_value=np.nan)
    dense = table[padded.ids]  # -1 reads the last row: pooling must not count it
    return {c: (pool(rows, flat, c), pool(dense, padded, c)) for c in COMBINERS}


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
def test_pooling(weights: Any) -> None:
    flat = Bags.from_lists(LISTS, weights, capacity=9)
    flat = Bags(flat.values.copy(), flat.offsets, flat.weights)
    flat.values[6:] = 99  # padding is anything
    for combiner, both in pooled(TABLE, flat, flat.pad(4)).items():
        for got in both:
            np.testing.assert_allclose(got, reference(LISTS, weights, combiner), rtol=1e-5, atol=1e-6)


def test_gradients_are_finite_and_right() -> None:
    flat = Bags.from_lists(LISTS, WEIGHTS, capacity=9)
    padded = flat.pad(3)
    direction = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)

    def loss(table: Any, weights: Any) -> Any:
        one = pool(table[flat.values], Bags(flat.values, flat.offsets, weights), "sqrtn")
        two = pool(table[padded.ids], padded, "mean")
        return jnp.sum((one + two) * direction)

    table, weights = jax.jit(jax.grad(loss, argnums=(0, 1)))(TABLE, flat.weights)
    wanted = np.zeros((5, 3))
    for bag, w, d in zip(LISTS, WEIGHTS, direction, strict=True):
        for i, a in zip(bag, w, strict=True):
            if sum(w):
                wanted[i] += a * d * (1 / sum(w) + 1 / np.sqrt(sum(x * x for x in w)))
    np.testing.assert_allclose(table, wanted, rtol=1e-5, atol=1e-6)
    assert np.isfinite(weights).all()
    assert not np.asarray(weights)[5:].any()


def test_no_combiner_keeps_the_rows() -> None:
    rows = np.ones((2, 2, 3), np.float32)
    np.testing.assert_array_equal(pool(rows, np.array([[1, -1], [0, 2]]), None)[..., 0], [[1, 0], [1, 1]])


def test_low_precision_is_added_up_in_float32() -> None:
    rows = jnp.full((1, 300, 1), 1.0078125, jnp.bfloat16)
    out = pool(rows, np.zeros((1, 300), np.int32), "mean")
    assert (out.dtype, float(out[0, 0])) == (jnp.bfloat16, 1.0078125)


def test_builders_agree() -> None:
    flat = Bags.from_lists(LISTS, WEIGHTS, capacity=8)
    values = np.concatenate(LISTS).astype(np.int64)
    weights = np.concatenate(WEIGHTS)
    for other in (
        Bags.from_values(values, [0, 2, 2, 5, 6], weights, capacity=8),
        Bags.from_lengths(values, np.array([2, 0, 3, 1]), weights, capacity=8),
    ):
        for a, b in zip(jax.tree.leaves(flat), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
    assert (flat.bags, flat.values.dtype, flat.offsets.dtype) == (4, np.int32, np.int32)
    assert flat.weights.dtype == np.float32


def test_padded_layout() -> None:
    flat = Bags.from_lists(LISTS, WEIGHTS)
    padded = flat.pad(3)
    np.testing.assert_array_equal(padded.ids, [[3, 1, -1], [-1, -1, -1], [2, 2, 0], [4, -1, -1]])
    np.testing.assert_array_equal(padded.weights, [[0.5, 2, 0], [0, 0, 0], [1, -1, 3], [0, 0, 0]])
    np.testing.assert_array_equal(flat.pad(1, truncate=True).ids, [[3], [-1], [2], [4]])
    assert Bags.from_lists([[], []]).pad(2).ids.tolist() == [[-1, -1]] * 2
    assert Bags.from_lists([]).pad(2).ids.shape == (0, 2)


def test_keyed_bags_are_the_bags_of_each_feature() -> None:
    other = [[1], [0, 2], [], [3]]
    keyed = KeyedBags.from_bags(
        {"a": Bags.from_lists(LISTS, capacity=7), "b": Bags.from_lists(other)}, capacity=12
    )
    assert (list(keyed), len(keyed), keyed.batch, keyed.values.shape) == (["a", "b"], 2, 4, (12,))
    again = jax.tree.unflatten(jax.tree.structure(keyed), jax.tree.leaves(keyed))
    assert again.names == ("a", "b")
    for name, lists in (("a", LISTS), ("b", other)):
        wanted = Bags.from_lists(lists).pad(3).ids
        np.testing.assert_array_equal(keyed.pad({"a": 3, "b": 3})[name].ids, wanted)
        one = keyed[name]
        got = jax.jit(lambda table, bags: pool(table[bags.values], bags, "sum"))(TABLE, one)
        np.testing.assert_allclose(got, reference(lists, None, "sum"), rtol=1e-5, atol=1e-6)


def test_keyed_weights() -> None:
    one = Bags.from_lists(LISTS, WEIGHTS)
    keyed = KeyedBags.from_bags({"a": one, "b": one})
    np.testing.assert_array_equal(keyed.pad(3)["b"].weights, one.pad(3).weights)


def test_a_second_problem_is_not_hidden_by_padding() -> None:
    with pytest.raises(EmbeddingError, match="bag 2, place 1"):
        Bags.from_lists([[1], [], [2, -1]], feature="colour")
