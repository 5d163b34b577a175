"""The recommender models: their formulas, every layout of their tables, and their plans."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from models import dcn, deepfm, dlrm
from models.recommender.batch import Batch
from models.recommender.layers import Inputs
from models.recommender.learner import LAYOUTS, OPTIMIZERS, Learner, collection
from models.recommender.synthetic import Teacher
from sbp import B, S
from sbp.hardware.catalogue import Hardware, Link
from sbp.runtime.embedding import TableWise

LINE = sbp.placement("cpu", shape=(8,))
GRID = sbp.placement("cpu", shape=(2, 4))
SIZES, WIDTH, DENSE, BATCH = (40, 3, 90, 17), 8, 5, 16
INPUTS = Inputs(DENSE, len(SIZES), WIDTH)
MODELS: dict[str, Any] = {
    "dlrm": dlrm.DLRM((4,), (6,)),
    "dcn": dcn.DCN(2, 3, (6,)),
    "deepfm": deepfm.DeepFM((6,)),
}
BY_ROWS = "only the rows that were looked up are updated"
# Words cost nothing, work does: whatever can be split is.
SPLITTING = Hardware("splitting", ((8, 1e4),), 1e4, 1e12, 1e12, (Link(1 << 60, 1e12, 1e-9),), 1.0)


def learner(model: str = "dlrm", layout: str = "rows", optimizer: str = "adagrad") -> Learner:
    """A small learner."""
    tables = collection(SIZES, WIDTH, LAYOUTS[layout](8), 8)
    return Learner(MODELS[model], INPUTS, tables, OPTIMIZERS[optimizer].make(0.1), optax.adam(0.01))


def batch(index: int) -> Batch:
    """Clicks with keys that repeat, within and between the shards of the batch."""
    drawn = Teacher.plant(SIZES, dense=DENSE, seed=1).batch(BATCH, index)
    return replace(drawn, keys=np.asarray(drawn.keys).astype(np.int32))


def steps(step: Any, params: Any, state: Any) -> tuple[Any, Any, list[float]]:
    """Three steps; the losses are those before each."""
    losses = []
    for index in range(3):
        params, state, loss = step(params, state, batch(index))
        losses.append(float(loss))
    return params, state, losses


@pytest.fixture(scope="module")
def one_device() -> Any:
    """Tables, dense parameters and losses of each model on one device, with its start, made once."""
    known: dict[str, Any] = {}

    def run(model: str) -> Any:
        if model not in known:
            one = learner(model)
            params = jax.jit(one.init)(jax.random.key(0))
            start = one.tables.unstack(params["tables"]), params["dense"]
            params, _, losses = steps(jax.jit(one.step), params, jax.jit(one.init_state)(params))
            known[model] = start, (one.tables.unstack(params["tables"]), params["dense"]), losses
        return known[model]

    return run


SLOW = pytest.mark.slow
LAYOUTS_TO_TRY = ("rows", "columns", "replicated", "whole")
CASES = [
    *[("dlrm", layout, LINE) for layout in LAYOUTS_TO_TRY],
    *[pytest.param("dlrm", layout, GRID, marks=SLOW) for layout in LAYOUTS_TO_TRY],
    *[(model, "rows", LINE) for model in ("dcn", "deepfm")],
]


@pytest.mark.full
@pytest.mark.parametrize(("model", "layout", "place"), CASES, ids=str)
def test_every_layout_learns_what_one_device_does(
    model: str, layout: str, place: sbp.Placement, one_device: Any
) -> None:
    (tables, dense), expected, losses = one_device(model)
    many = learner(model, layout)
    params = {"tables": many.tables.stack(tables), "dense": dense}
    state = many.init_state(params)
    program = sbp.compile(
        many.step,
        place,
        in_sbp=many.in_sbp(place),
        options=sbp.Options(hardware=SPLITTING, check=True),
    )
    plan = program.plan(params, state, batch(0))
    params, _, found = steps(program, params, state)
    assert found == pytest.approx(losses, rel=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        (many.tables.unstack(params["tables"]), params["dense"]),
        expected,
    )
    (note,) = [note for note in plan.notes if note.startswith("sbp.rows at ")]
    assert BY_ROWS in note


def test_scores_are_one_number_for_each_example() -> None:
    for name in MODELS:
        one = learner(name)
        params = jax.eval_shape(one.init, jax.random.key(0))
        assert jax.eval_shape(one.scores, params, batch(0)).shape == (BATCH,)


def test_a_cross_layer_multiplies_first_features_with_mixtures() -> None:
    random = np.random.default_rng(0)
    first, x = random.normal(size=(2, 3, 4))
    down, up, bias = random.normal(size=(4, 2)), random.normal(size=(2, 4)), random.normal(size=4)
    wanted = np.zeros((3, 4))
    for b in range(3):
        for i in range(4):
            mixed = sum(x[b, j] * down[j, k] * up[k, i] for j in range(4) for k in range(2))
            wanted[b, i] = first[b, i] * (mixed + bias[i]) + x[b, i]
    layer = {"weights": [jnp.array(down), jnp.array(up)], "bias": jnp.array(bias)}
    np.testing.assert_allclose(dcn.cross(layer, jnp.array(first), jnp.array(x)), wanted, rtol=1e-5)


def test_a_factorization_machine_adds_up_all_pairs() -> None:
    factors = np.random.default_rng(0).normal(size=(3, 5, 2))
    wanted = [sum(f[i] @ f[j] for i in range(5) for j in range(i)) for f in factors]
    np.testing.assert_allclose(deepfm.pairs(jnp.array(factors)), wanted, rtol=1e-4)


def test_dot_products_of_all_pairs() -> None:
    vectors = np.random.default_rng(0).normal(size=(3, 4, 2))
    wanted = [[v[i] @ v[j] for i in range(4) for j in range(i)] for v in vectors]
    np.testing.assert_allclose(dlrm.dot_products(jnp.array(vectors)), wanted, rtol=1e-5)


def test_deepfm_by_hand() -> None:
    """The machine's part: weights of keys and numbers, and pairs of keys and numbers times their values."""
    model = deepfm.DeepFM(())
    params = model.init(jax.random.key(0), Inputs(2, 3, 4))
    params["score"] = jax.tree.map(jnp.zeros_like, params["score"])
    random = np.random.default_rng(0)
    dense, rows = random.normal(size=(1, 2)), random.normal(size=(3, 1, 4))
    found = model.forward(params, jnp.array(dense), {f"C{i}": jnp.array(r) for i, r in enumerate(rows)})
    factors = [dense[0, i] * np.asarray(params["factors"])[i] for i in range(2)] + [r[0, 1:] for r in rows]
    wanted = sum(factors[i] @ factors[j] for i in range(5) for j in range(i)) + rows[:, 0, 0].sum()
    wanted += dense[0] @ np.asarray(params["linear"]["weight"])[:, 0]
    np.testing.assert_allclose(found, [wanted], rtol=1e-4)


def test_deepfm_needs_room_for_factors() -> None:
    with pytest.raises(ValueError, match="a weight and one factor or more"):
        deepfm.DeepFM().init(jax.random.key(0), Inputs(2, 3, 1))


def exchanges(tables: int, model: Any) -> tuple[int, int]:
    """How many all-to-alls a step with large tables has, forward and backward."""
    stacks = collection((100_000,) * tables, 16, LAYOUTS["rows"](8), 8)
    inputs = Inputs(DENSE, tables, 16)
    one = Learner(model, inputs, stacks, OPTIMIZERS["rowwise"].make(0.1), optax.adam(0.01))
    params = jax.eval_shape(one.init, jax.random.key(0))
    state = jax.eval_shape(one.init_state, params)
    shape = jax.ShapeDtypeStruct
    clicks = Batch(
        shape((64,), np.float32),
        shape((64, DENSE), np.float32),
        shape((64, tables), np.int32),  # type: ignore[arg-type]
    )
    in_sbp = one.in_sbp(LINE)
    program = sbp.compile(one.step, LINE, in_sbp=in_sbp, options=sbp.Options(hardware=SPLITTING))
    found = [c for c in program.plan(params, state, clicks).collectives if c.kind == "all_to_all"]
    backward = sum(c.count for c in found if "backward" in c.tensor)
    return sum(c.count for c in found) - backward, backward


@pytest.mark.some(1)
@pytest.mark.parametrize("model", MODELS)
def test_however_many_tables_there_are_one_exchange(model: str) -> None:
    (forward, backward), many = exchanges(2, MODELS[model]), exchanges(8, MODELS[model])
    assert (forward, backward) == many
    assert 1 <= forward <= 3
    assert 1 <= backward <= 2


def test_tables_and_their_state_lie_alike() -> None:
    by_row = learner(optimizer="rowwise").in_sbp(GRID)
    assert by_row[0]["tables"] == by_row[1]["tables"]
    assert list(by_row[0]["tables"].values()) == [[S(0), S(0)]]
    assert by_row[2] == [S(0), S(0)]
    momentum, rowwise = (learner(layout="columns", optimizer=name) for name in ("momentum", "rowwise"))
    ((trace, *_),) = momentum.in_sbp(LINE)[1]["tables"].values()
    assert trace.trace == [S(1)]
    assert list(rowwise.in_sbp(LINE)[1]["tables"].values()) == [[B]]


def test_of_whole_tables_a_row_is_still_a_row() -> None:
    """An accumulator for each row, not for each group of tables."""
    one = learner(layout="whole", optimizer="rowwise")
    assert isinstance(one.tables.tables[0].placement, TableWise)
    params = jax.eval_shape(one.init, jax.random.key(0))
    ((name, stack),) = params["tables"].items()
    groups, height, _ = stack.shape
    assert jax.eval_shape(one.init_state, params)["tables"][name].shape == (groups * height,)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_the_command_learns(name: str) -> None:
    """On one device, by its own learning rate: a row that is looked up again and again is learned."""
    tx = sbp.rows(OPTIMIZERS[name].make(OPTIMIZERS[name].lr))
    table = jnp.full((4, 2), 0.1)
    state = tx.init(table)

    @jax.jit
    def step(table: Any, state: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda t: jnp.square(t[1] - 0.3).sum() / 100)(table)
        added, state = tx.update(grad, state, table)
        return table + added, state, loss

    losses = []
    for _ in range(60):
        table, state, loss = step(table, state)
        losses.append(float(loss))
    assert losses[-1] < 0.2 * losses[0]
    np.testing.assert_array_equal(table[0], np.full(2, np.float32(0.1)))
