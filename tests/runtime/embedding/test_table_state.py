"""Tables on devices: made, read and written where they lie, with their optimizer's state."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp import S, placement
from sbp.runtime.embedding.collection import Collection
from sbp.runtime.embedding.optimizers import rowwise_adagrad
from sbp.runtime.embedding.row_access import row_writer
from sbp.runtime.embedding.tables import (
    ColumnWise,
    FeatureConfig,
    QuotientRemainder,
    Replicated,
    RowWise,
    TableConfig,
    TableWise,
)
from sbp.runtime.hlo.meter import read_compiled

KEY = jax.random.key(5)
LINE = placement("cpu", shape=(8,))
GRID = placement("cpu", shape=(2, 4), axes=("data", "model"))
LAYOUTS = {"rows": RowWise(), "columns": ColumnWise(), "whole": TableWise(8), "replicated": Replicated()}


def three(layout: str, multiple: int = 8, **table: Any) -> Collection:
    """Three tables in one stack, of which two are made alike."""
    uniform = jax.nn.initializers.uniform(1.0)
    table = {"placement": LAYOUTS[layout], "initializer": uniform, **table}
    tables = [TableConfig(n, rows, 8, **table) for n, rows in (("a", 40), ("b", 7))]
    ones = TableConfig("c", 9, 8, **{**table, "initializer": jax.nn.initializers.ones})
    return Collection([FeatureConfig(t.name, t) for t in (*tables, ones)], multiple=multiple)


def live_bytes(tree: Any) -> dict[Any, int]:
    """Of each device, what it holds of a tree."""
    found: dict[Any, int] = {}
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
    return found


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("layout", "where", "axes"),
    [("rows", LINE, None), ("columns", LINE, None), ("whole", LINE, None), ("rows", GRID, ("model",))],
)
def test_tables_are_made_split_and_alike(layout: str, where: Any, axes: Any) -> None:
    c = three(layout)
    whole = c.unstack(jax.jit(c.init)(KEY))
    split = c.init(KEY, where, axes)
    assert {n: x.sharding for n, x in split.items()} == c.shardings(where, axes)
    if axes is None:
        (array,) = split.values()
        assert {*live_bytes(split).values()} == {array.nbytes // 8}
    found = c.unstack(split)
    other = three("replicated")
    for name, rows in other.unstack(other.init(KEY)).items():
        np.testing.assert_array_equal(found[name], rows, err_msg=name)
        np.testing.assert_array_equal(whole[name], rows, err_msg=name)
    assert (found["c"] == 1).all() and len(np.unique(found["a"])) == 40 * 8
    assert not np.isin(found["b"], found["a"]).any()


def test_making_a_table_holds_no_more_than_its_share() -> None:
    """Four times as large as what a device has of it: 20 MB over eight devices."""
    table = TableConfig("t", 80_000, 64)
    c = Collection([FeatureConfig("f", table)])
    compiled = jax.jit(lambda key: c.init(key, LINE)).lower(KEY).compile()
    memory = compiled.memory_analysis()
    share = math.prod(next(iter(c.stacks.values())).shape) * 4 / 8
    assert memory.output_size_in_bytes == share
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < 1.2 * share + (4 << 20)


@pytest.mark.some(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_read_and_written_with_their_state(layout: str) -> None:
    c = three(layout)
    params = c.init(KEY, LINE)
    flat = {n: x.reshape(-1, x.shape[-1]) for n, x in params.items()}
    state = {"adam": optax.adam(1.0).init(flat), "rowwise": rowwise_adagrad(1.0).init(flat)}
    before = jax.device_get(c.unstack(params))
    ids = np.array([39, 0, 17])
    read = c.read((params, state), "a", ids)
    (stack,) = params
    np.testing.assert_array_equal(read[0][stack], before["a"][ids])
    assert read[1]["adam"][0].count is None and read[1]["rowwise"][stack].shape == (3,)
    lines = jax.tree.map(lambda x: jnp.full(x.shape, -0.0, x.dtype).at[1].set(jnp.nan), read)
    after, state = c.write((params, state), "a", ids, lines)
    assert after[stack].sharding == c.shardings(LINE)[stack]
    assert params[stack].is_deleted() and state["adam"][0].count == 0
    again = jax.device_get(c.read((after, state), "a", ids))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y), again, jax.device_get(lines))
    assert np.signbit(again[0][stack][0]).all()  # bits, not numbers
    found = jax.device_get(c.unstack(after))
    before = {**before, "a": np.array(before["a"])}
    before["a"][ids] = again[0][stack]
    for name, rows in before.items():
        np.testing.assert_array_equal(found[name], rows, err_msg=name)


def test_parts_of_a_table_are_written_by_their_names() -> None:
    c = three("rows", compression=QuotientRemainder(4))
    params = c.write(c.init(KEY, LINE), "a.remainder", [2], 5.0)
    (found,) = c.read(params, "a.remainder", [2]).values()
    assert (found == 5).all()
    assert not (c.unstack(params)["a.quotient"] == 5).any()


def test_all_sizes_up_to_the_least_take_one_program_without_communication() -> None:
    c = three("rows")
    params = c.init(KEY, LINE)
    (stack,) = params
    shape = params[stack].shape
    row_writer.cache_clear()
    writer = row_writer(shape[:1], shape, params[stack].sharding)
    for n in (1, 7, 40):
        params = c.write(params, "a", np.arange(n), np.full((n, 8), n, np.float32))
    (size,) = {writer._cache_size()}  # type: ignore[attr-defined]
    assert size == 1
    text = writer.lower(params[stack], np.zeros(128, np.int32), np.zeros((128, 8), np.float32)).compile()
    assert not any(f" {op}" in text.as_text() for op in ("all-gather", "all-reduce", "all-to-all", "copy("))


def test_a_vocabulary_resets_rows_and_state_of_a_trained_table() -> None:
    """What was trained under another key is gone: the row, and what the optimizer knew of it."""
    c = three("rows")
    tx = sbp.rows(optax.adam(0.1))
    params = c.init(KEY, LINE)
    state = tx.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    added, state = jax.jit(tx.update)(grads, state, params)
    params = optax.apply_updates(params, added)
    (stack,) = params
    assert stack == c.stack_of("b")
    new = {stack: np.full((2, 8), 3.0, np.float32)}
    params, state = c.write((params, state), "b", [1, 6], (new, tx.init(new)))
    rows, kept = c.read((params, state), "b", [0, 1, 6])
    assert (rows[stack][1:] == 3).all() and not (rows[stack][0] == 3).any()
    moments = kept[stack][0]
    assert not moments.mu[1:].any() and not moments.nu[1:].any() and moments.mu[0].all()
    assert state[stack][0].count == 1


@pytest.mark.some(1)
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise"])
def test_of_tables_copied_over_groups_only_rows_are_reduced(optimizer: str) -> None:
    """Split within a group of four devices, and a copy in each of two groups: one table, as on one device."""
    table = TableConfig("t", 4096, 8, initializer=jax.nn.initializers.uniform(1.0), combiner="sum")
    c = Collection([FeatureConfig("f", table)])
    tx = sbp.rows({"sgd": optax.sgd(0.1), "rowwise": rowwise_adagrad(0.1)}[optimizer])

    def step(params: Any, state: Any, ids: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.square(c(p, {"f": ids})["f"] - 1).sum())(params)
        added, state = tx.update(grads, state, params)
        return optax.apply_updates(params, added), state, loss

    one = many = jax.device_get(c.init(KEY)), tx.init(c.init(KEY))
    lies = c.in_sbp(GRID, ("model",)), c.in_sbp(GRID, ("model",), one[1]), [S(0), S(0)]
    program, alone = sbp.compile(step, GRID, in_sbp=lies, out_sbp=(*lies[:2], None)), jax.jit(step)
    random = np.random.default_rng(0)
    for _ in range(3):
        ids = np.minimum(random.zipf(1.2, (32, 3)) - 1, 4096).astype(np.int32)  # the same in both groups, too
        *one, loss = alone(*one, ids)
        *many, other = program(*many, ids)
        np.testing.assert_allclose(other, loss, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), many, one)
    (array,) = many[0].values()
    for shard in array.addressable_shards:  # both copies, to the bit
        twin = array.addressable_shards[(shard.device.id + 4) % 8]
        np.testing.assert_array_equal(shard.data, twin.data)
    plan = program.plan(*many, ids)
    sent = read_compiled(program.lower(*many, ids).compile())
    assert sent.wire_bytes == pytest.approx(plan.wire_bytes, rel=1e-9)
    assert max(x.wire_bytes for x in plan.collectives) < array.nbytes / 4 / 4  # of a device's share
