"""Lazy optimizers: which become steps on rows, why others need the whole table, and their numbers."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp import B, S, lazy
from sbp.hardware.catalogue import BYTES_ONLY, Hardware, Link
from sbp.passes.physical.program import Compute
from sbp.runtime.embedding.optimizers import ftrl, rowwise_adagrad, rowwise_adam

LINE = sbp.placement("cpu", shape=(8,))
GRID = sbp.placement("cpu", shape=(2, 4))
ROWS, WIDTH = 400, 6
BY_ROWS = "only the rows that were looked up are updated"
# Work and words are dear: what is split is neither gathered nor repeated.
DEAR = Hardware("dear", ((8, 1e4),), 1e4, 1e12, 1e12, (Link(1 << 60, 1e4, 1e-9),), 1.0)

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: optax.adagrad(0.1),
    "rowwise": lambda: rowwise_adagrad(0.1),
    "adam": lambda: optax.adam(0.05),
    "adamw": lambda: optax.adamw(0.05, weight_decay=0.1),
    "ftrl": lambda: ftrl(0.1, l1=0.01, l2=0.1),
    "schedule": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 3)),
    "decay": lambda: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
}
# Their steps add up over addends of a gradient, though the parameter is given to them.
ADDITIVE = "sgd", "schedule"


def sums(table: Any, ids: Any) -> Any:
    """The usual lookup, pooled."""
    return table[ids].sum(1)


def make_step(tx: Any, lookup: Callable[..., Any] = sums) -> Callable[..., Any]:
    """A step of training a table and a dense weight."""

    def step(table: Any, state: Any, weight: Any, ids: Any) -> Any:
        def loss(table: Any, weight: Any) -> Any:
            return jnp.square(lookup(table, ids) @ weight - 1).mean()

        value, (grad, dense) = jax.value_and_grad(loss, (0, 1))(table, weight)
        added, state = tx.update(grad, state, table)
        return optax.apply_updates(table, added), state, weight - 0.1 * dense, value

    return step


def batch(seed: int) -> Any:
    """Ids with duplicates in a bag, in a shard, and between shards; many rows have none."""
    return 13 * np.random.default_rng(seed).integers(0, 20, (16, 3)).astype(np.int32)


def start(tx: Any) -> Any:
    """Table, state and weight, as host arrays."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return jax.tree.map(np.asarray, (table, tx.init(table), rng.normal(size=(WIDTH, 2)).astype(np.float32)))


def compare(
    step: Callable[..., Any],
    tx: Any,
    place: Any,
    in_sbp: Any,
    *,
    steps: int = 3,
    tolerance: float = 2e-5,
    **options: Any,
) -> sbp.Plan:
    """Trains on one device and on eight; all that is left must be equal. Returns the plan."""
    program = sbp.compile(step, place, in_sbp=in_sbp, options=sbp.Options(check=True, **options))
    one, many = start(tx), start(tx)
    plain = jax.jit(step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = program.plan(*many, batch(0))
        for seed in range(steps):
            *one, _ = plain(*one, batch(seed))
            *many, _ = jax.block_until_ready(program(*many, batch(seed)))
    whole = [note for note in plan.notes if lazy.WHOLE in note]
    said = [str(x.message) for x in caught if lazy.WHOLE in str(x.message)]
    assert set(said) == {f'sbp: {note}; sbp.rows(..., dense="error") refuses such a step' for note in whole}
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance / 10)
    return plan


def updates(plan: sbp.Plan) -> list[Compute]:
    """The steps on rows."""
    assert plan.physical is not None
    steps = (s for s, _ in plan.physical.walk())
    return [s for s in steps if isinstance(s, Compute) and s.node.op == "sbp_update_rows"]


def table_sized(plan: sbp.Plan) -> int:
    """How many tensors of the size of the table the program makes, those of the steps on rows apart."""
    assert plan.physical is not None
    graph = plan.physical.graph
    steps = (s for s, _ in plan.physical.walk() if isinstance(s, Compute) and s.node.op != "sbp_update_rows")
    return sum(graph.values[v].shape[:1] == (ROWS,) for s in steps for v in s.node.outputs)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_alone_are_updated(name: str) -> None:
    tx = sbp.rows(OPTIMIZERS[name]())
    plan = compare(make_step(tx), tx, LINE, ([S(0)], sbp.AUTO, [B], [S(0)]), hardware=DEAR)
    assert any(BY_ROWS in note for note in plan.notes)
    assert len(updates(plan)) == 1 and table_sized(plan) == 0
    assert updates(plan)[0].strategy.operands[-1] == (S(0),)
    assert updates(plan)[0].node.params["additive"] == (name in ADDITIVE)
    assert {"all_to_all"} <= set(plan.by_kind())


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("place", "table", "ids"),
    [
        (GRID, [S(0), S(0)], [S(0), S(0)]),
        (GRID, [S(0), B], [S(0), S(0)]),
        (GRID, [B, S(0)], [S(0), S(0)]),
        (GRID, [S(0), S(0)], [B, S(0)]),
        (GRID, [S(0), S(1)], [S(0), B]),
        (LINE, [S(1)], [S(0)]),
        (LINE, [B], [S(0)]),
        (LINE, [S(0)], [B]),
    ],
    ids=str,
)
def test_the_table_may_lie_in_any_way(place: sbp.Placement, table: Any, ids: Any) -> None:
    tx = sbp.rows(optax.adam(0.05))
    plan = compare(make_step(tx), tx, place, (table, sbp.AUTO, None, ids), hardware=DEAR)
    assert len(updates(plan)) == 1


def twice(table: Any, ids: Any) -> Any:
    """Two lookups of one table."""
    return table[ids].mean(1) - 2 * table[ids[:, 0]]


def narrow(table: Any, ids: Any) -> Any:
    """The table is read in half precision."""
    return table.astype(jnp.bfloat16)[ids].astype(jnp.float32).sum(1)


def filled(table: Any, ids: Any) -> Any:
    """Ids out of bounds have no row."""
    return table.at[ids * 4].get(mode="fill", fill_value=0).sum(1)


def clipped(table: Any, ids: Any) -> Any:
    """Ids out of bounds mean the last row."""
    return table.at[ids * 4].get(mode="clip").sum(1)


def pinned(table: Any, ids: Any) -> Any:
    """A model says how the gradient lies."""
    return sbp.annotate(table, [S(0)], grad=[S(0)])[ids].sum(1)


# One device adds up half precision in half precision, a device here what it has in single precision.
@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("lookup", "tolerance"), [(twice, 2e-5), (narrow, 5e-2), (filled, 2e-5), (clipped, 2e-5)]
)
def test_every_kind_of_lookup(lookup: Callable[..., Any], tolerance: float) -> None:
    tx = sbp.rows(optax.adagrad(0.1))
    in_sbp = [S(0)], sbp.AUTO, [B], [S(0)]
    plan = compare(make_step(tx, lookup), tx, LINE, in_sbp, tolerance=tolerance, hardware=DEAR)
    assert len(updates(plan)) == 1


def test_an_annotated_gradient() -> None:
    tx = sbp.rows(optax.adagrad(0.1))
    plan = compare(make_step(tx, pinned), tx, LINE, (None, sbp.AUTO, [B], [S(0)]))
    assert len(updates(plan)) == 1


def scaled(tx: Any) -> Callable[..., Any]:
    """Gradients are scaled, as loss scaling does, and negated twice."""

    def step(table: Any, state: Any, weight: Any, ids: Any) -> Any:
        grad = jax.grad(lambda t: 8.0 * jnp.square(sums(t, ids) @ weight).mean())(table)
        added, state = tx.update(-(-grad * (1 / 8.0)) / jnp.float32(1.0), state, table)
        return optax.apply_updates(table, added), state, weight, jnp.zeros(())

    return step


def test_scaled_gradients() -> None:
    tx = sbp.rows(optax.adagrad(0.1))
    assert len(updates(compare(scaled(tx), tx, LINE, ([S(0)], sbp.AUTO, [B], [S(0)])))) == 1


def decayed(table: Any, ids: Any) -> Any:
    """The table is used otherwise too."""
    return sums(table, ids) + 1e-3 * table.sum()


def by_position(grads: Any, state: Any, params: Any = None) -> Any:
    """A step that depends on which row it is."""
    return -0.1 * grads * jnp.linspace(0, 1, grads.shape[0])[:, None], state


def without_the_last(grads: Any, state: Any, params: Any = None) -> Any:
    """A step that leaves the last row alone, by shapes."""
    return -0.1 * jnp.pad(grads[:-1], ((0, 1), (0, 0))), state


def by_count(grads: Any, state: Any, params: Any = None) -> Any:
    """A step that depends on how many rows there are."""
    return -grads / grads.shape[0], state


def halved_after(tx: Any) -> Callable[..., Any]:
    """What the optimizer gives is not just added."""

    def step(table: Any, state: Any, weight: Any, ids: Any) -> Any:
        added, state = tx.update(jax.grad(lambda t: (sums(t, ids) @ weight).mean())(table), state, table)
        return table + 0.5 * added, state, weight, jnp.zeros(())

    return step


def rescaled(tx: Any) -> Callable[..., Any]:
    """Gradients are scaled by a number that is computed."""

    def step(table: Any, state: Any, weight: Any, ids: Any) -> Any:
        grad = jax.grad(lambda t: jnp.square(sums(t, ids) @ weight).mean())(table)
        added, state = tx.update(grad * (1 / (1 + jnp.square(weight).sum())), state, table)
        return optax.apply_updates(table, added), state, weight, jnp.zeros(())

    return step


LOCAL = sbp.rows(optax.sgd(0.1))
NORMED = sbp.rows(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)))
SHORT = sbp.rows(optax.GradientTransformation(lambda p: (), without_the_last))
COUNTED = sbp.rows(optax.GradientTransformation(lambda p: (), by_count))
PLACED = sbp.rows(optax.GradientTransformation(lambda p: (), by_position))


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("tx", "step", "reason"),
    [
        (NORMED, make_step(NORMED), "not known to treat every row by itself"),
        (PLACED, make_step(PLACED), "not known to treat every row by itself"),
        (COUNTED, make_step(COUNTED), "not known to treat every row by itself"),
        (SHORT, make_step(SHORT), "not known to treat every row by itself"),
        (LOCAL, make_step(LOCAL, decayed), "does not come only from lookups: broadcast_in_dim at"),
        (LOCAL, halved_after(LOCAL), "its result is not just added to the table"),
    ],
    ids=("norm", "position", "count", "last", "decay", "halved"),
)
def test_what_needs_the_whole_table_says_why(tx: Any, step: Callable[..., Any], reason: str) -> None:
    plan = compare(step, tx, LINE, ([S(0)], sbp.AUTO, [B], [S(0)]))
    assert not updates(plan)
    (note,) = [n for n in plan.notes if n.startswith("sbp.rows at ")]
    assert lazy.WHOLE in note and reason in note
    assert "test_tables.py:" in note


def test_steps_in_a_loop() -> None:
    tx = sbp.rows(optax.adagrad(0.1))
    one = make_step(tx)

    def steps(table: Any, state: Any, weight: Any, ids: Any) -> Any:
        def body(carry: Any, ids: Any) -> Any:
            *carry, loss = one(*carry, ids)
            return tuple(carry), loss

        carry, losses = jax.lax.scan(body, (table, state, weight), jnp.stack([ids, ids + 1]))
        return *carry, losses.sum()

    plan = compare(steps, tx, LINE, ([S(0)], sbp.AUTO, [B], [S(0)]), steps=1)
    assert len(updates(plan)) == 1


def test_rows_means_one_thing_on_one_device() -> None:
    tx, plain = sbp.rows(optax.adam(0.1)), optax.adam(0.1)
    table = jnp.arange(12.0).reshape(4, 3)
    grad = jnp.zeros((4, 3)).at[1, 2].set(1.0)
    added, state = tx.update(grad, tx.init(table), table)
    whole, after = plain.update(grad, plain.init(table), table)
    np.testing.assert_array_equal(added, jnp.where(jnp.arange(4)[:, None] == 1, whole, 0))
    assert int(state[0].count) == int(after[0].count) == 1


def test_an_optimizer_is_needed() -> None:
    with pytest.raises(sbp.SbpError, match="an optimizer with init"):
        sbp.rows(0.1)


@pytest.mark.full
def test_a_plan_without_a_batch_is_made_again_with_one() -> None:
    tx = sbp.rows(optax.sgd(0.1))
    program = sbp.compile(
        make_step(tx), LINE, in_sbp=([S(0)], sbp.AUTO, [B], [S(0)]), options=sbp.Options(hardware=DEAR)
    )
    args = (*start(tx), (np.arange(48, dtype=np.int32) % 6 * 25).reshape(16, 3))
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), args)
    without = program.plan(*structs)
    program(*args)
    known = program.plan(*structs)
    (before,), (after,) = updates(without), updates(known)
    assert before.node.params["samples"] == () and len(after.node.params["samples"]) == 1
    # Six keys in all, two of each owner: room for two per device and owner instead of six.
    assert known.wire_bytes < without.wire_bytes


@pytest.mark.some(1)
@pytest.mark.parametrize("place", [LINE, GRID], ids=("line", "grid"))
def test_whole_tables_stay_on_their_devices(place: sbp.Placement) -> None:
    """Eight tables of five rows in a stack: pooled vectors travel, gradients of rows do not."""
    tx, tables = sbp.rows(optax.adagrad(0.1)), 8

    def step(table: Any, state: Any, weight: Any, ids: Any) -> Any:
        stack = table.reshape(tables, -1, WIDTH)

        def loss(stack: Any) -> Any:
            ids_of_tables = jnp.broadcast_to(ids, (tables, *ids.shape)) % 6 - 1
            found = jax.vmap(lambda t, i: t.at[i].get(mode="fill", fill_value=0))(stack, ids_of_tables)
            return jnp.square(found.sum((0, 2)) @ weight - 1).mean()

        value, grad = jax.value_and_grad(loss)(stack)
        added, state = tx.update(grad.reshape(table.shape), state, table)
        return optax.apply_updates(table, added), state, weight, value

    axes = [S(0)] * len(place.shape)
    plan = compare(step, tx, place, (axes, sbp.AUTO, None, axes), hardware=BYTES_ONLY)
    (update,) = updates(plan)
    assert not any("sbp_update_rows" in c.reason for c in plan.collectives)
    assert update.strategy.operands[0] == update.strategy.operands[-1] == tuple(axes)


@pytest.mark.some(1)
@pytest.mark.parametrize("place", [LINE, GRID], ids=str)
@pytest.mark.parametrize("name", ["rowwise", "rowwise adam"])
@pytest.mark.parametrize("width", [(16,), (3, 16)], ids=str)
def test_a_row_wise_step_on_columns(name: str, place: sbp.Placement, width: tuple[int, ...]) -> None:
    """Sums over a row are added up over the devices that have its columns, number by number."""
    tx = sbp.rows({"rowwise": rowwise_adagrad(0.1), "rowwise adam": rowwise_adam(0.01, epsilon=1e-3)}[name])
    last = S(len(width))
    lies, batch_lies = ([last], [B]) if place is LINE else ([S(0), last], [S(0), B])

    def step(table: Any, state: Any, ids: Any) -> Any:
        grad = jax.grad(lambda t: jnp.square(t[ids].sum(1) - 1).mean())(table)
        added, state = tx.update(grad, state, table)
        return optax.apply_updates(table, added), state

    options = sbp.Options(check=True, hardware=DEAR)
    in_sbp, out_sbp = (lies, sbp.AUTO, batch_lies), (lies, sbp.AUTO)
    program = sbp.compile(step, place, in_sbp=in_sbp, out_sbp=out_sbp, options=options)
    table = np.random.default_rng(0).normal(size=(ROWS, *width)).astype(np.float32)
    one = many = jax.tree.map(np.asarray, (table, tx.init(table)))
    plain = jax.jit(step)
    for seed in range(2):
        one, many = plain(*one, batch(seed)), jax.block_until_ready(program(*many, batch(seed)))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    plan = program.plan(*many, batch(0))
    (found,) = updates(plan)
    assert found.strategy.operands[0] == found.strategy.results[0] == tuple(lies)
    assert table_sized(plan) == 0
