"""The recommender models: their formulas, every layout of their tables, their plans, and their command."""

import argparse
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from models import dcn, deepfm, dlrm
from models.recommender import feed, training
from models.recommender.batch import Batch, Lists
from models.recommender.checkpoints import Stacking, TableCheckpoints, moves_of
from models.recommender.layers import Inputs
from models.recommender.layout import CRITEO, PREPARED, DataError, Layout
from models.recommender.learner import LAYOUTS, OPTIMIZERS, Learner, collection, collection_of
from models.recommender.synthetic import Drawn, Teacher
from sbp import B, S
from sbp.lazy import by_row
from sbp.runtime.batches import Feed
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
SPLITTING = sbp.Hardware("splitting", ((8, 1e4),), 1e4, 1e12, 1e12, (sbp.Link(1 << 60, 1e12, 1e-9),), 1.0)


def learner(model: str = "dlrm", layout: str = "rows", optimizer: str = "adagrad") -> Learner:
    """A small learner."""
    tables = collection(SIZES, WIDTH, LAYOUTS[layout](8), 8)
    return Learner(MODELS[model], INPUTS, tables, OPTIMIZERS[optimizer].make(0.1), optax.adam(0.01))


def batch(index: int) -> Batch:
    """Clicks with keys that repeat, within and between the shards of the batch."""
    drawn = Teacher.planted(SIZES, dense=DENSE, seed=1).batch(BATCH, index)
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
        in_sbp=many.in_sbp(place, layout),
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
    in_sbp = one.in_sbp(LINE, "rows")
    program = sbp.compile(one.step, LINE, in_sbp=in_sbp, options=sbp.Options(hardware=SPLITTING))
    found = [c for c in program.plan(params, state, clicks).collectives if c.kind == "all_to_all"]
    backward = sum(c.count for c in found if "backward" in c.tensor)
    return sum(c.count for c in found) - backward, backward


@pytest.mark.parametrize("model", MODELS)
def test_however_many_tables_there_are_one_exchange(model: str) -> None:
    (forward, backward), many = exchanges(2, MODELS[model]), exchanges(8, MODELS[model])
    assert (forward, backward) == many
    assert 1 <= forward <= 3
    assert 1 <= backward <= 2


def test_tables_and_their_state_lie_alike() -> None:
    by_row = learner(optimizer="rowwise").in_sbp(GRID, "rows")
    assert by_row[0]["tables"] == by_row[1]["tables"] == {"dim8": [S(0), S(0)]}
    assert by_row[2] == [S(0), S(0)]
    trace, *_ = learner(layout="columns", optimizer="momentum").in_sbp(LINE, "columns")[1]["tables"]["dim8"]
    assert trace.trace == [S(1)]
    assert learner(layout="columns", optimizer="rowwise").in_sbp(LINE, "columns")[1]["tables"]["dim8"] == [B]
    assert learner().in_sbp(LINE, "auto")[0]["tables"] is sbp.AUTO


def test_of_whole_tables_a_row_is_still_a_row() -> None:
    """An accumulator for each row, not for each group of tables."""
    one = learner(layout="whole", optimizer="rowwise")
    assert isinstance(one.tables.tables[0].placement, TableWise)
    params = jax.eval_shape(one.init, jax.random.key(0))
    groups, height, _ = params["tables"]["dim8"].shape
    assert jax.eval_shape(one.init_state, params)["tables"]["dim8"].shape == (groups * height,)


def clicks(keys: Any, count: int = 2) -> Batch:
    return Batch(np.ones(count, np.float32), np.ones((count, 1), np.float32), keys)


def data(**changed: Any) -> feed.Data:
    return feed.Data(**{"name": "d", "train": (), "test": (), "layout": PREPARED, **changed})


def test_keys_become_rows() -> None:
    keys = np.array([[7, 2**40], [-3, 1]])
    hashed = data(sizes=(5, 9), hashing=True).rows(clicks(keys)).keys
    assert hashed.dtype == np.int32
    assert (hashed >= 0).all() and (hashed < (5, 9)).all()
    whole = data(sizes=(8, 9), hashing=False)
    np.testing.assert_array_equal(whole.rows(clicks(keys % 8)).keys, keys % 8)
    with pytest.raises(DataError, match=r"key 1099511627776 of feature 2.*\n.*0\.\.8"):
        whole.rows(clicks(keys))
    lists = (Lists(np.array([1, 2, 3]), np.array([0, 1, 3])),)
    with pytest.raises(DataError, match="multi-hot"):
        whole.rows(clicks(lists))


def test_the_rest_comes_after_the_training() -> None:
    whole = Teacher.planted((5,), dense=1).batch(23, 0)
    first = list(feed.full(4, 2)(iter([whole])))
    rest = list(feed.rest(4, 9)(iter([whole.between(8, 23)])))
    assert [len(b) for b in (*first, *rest)] == [4, 4, 4, 4, 1]
    np.testing.assert_array_equal(np.concatenate([b.dense for b in (*first, *rest)]), whole.dense[:17])
    full = feed.filled(rest[-1], 4)
    assert full.label[1:].tolist() == [feed.NOBODY] * 3
    assert len(full) == len(full.dense) == len(full.keys) == 4


def test_a_training_that_goes_on_has_no_work_with_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does it draw clicks, nor hash their keys, nor copy them; the batches are the same."""
    drawn, hashed = list[tuple[int, int]](), list[int]()
    teacher = Teacher.planted((50, 7), dense=2)
    source = Drawn(teacher, 26, group=10)  # pieces of 10, 10 and 6
    own = data(train=(source,), sizes=(5, 9), hashing=True)
    draw, rows = Teacher.batch, feed.Data.rows

    def noted(self: Teacher, size: int, index: int) -> Batch:
        drawn.append((size, index))
        return draw(self, size, index)

    def counted(self: feed.Data, batch: Batch) -> Batch:
        hashed.append(len(batch))
        return rows(self, batch)

    monkeypatch.setattr(Teacher, "batch", noted)
    monkeypatch.setattr(feed.Data, "rows", counted)

    def begun(step: int) -> Any:
        cut, workers = feed.full(4, 6 - step), feed.Workers(1, 1)
        return feed.flow(own, own.train, 4, cut, lambda batch: batch, workers, "train", step)

    with begun(0) as flow:
        every = list(flow)
    assert len(every) == 6
    drawn.clear()
    hashed.clear()
    batches = feed.Feed(begun)
    assert isinstance(batches, Feed)
    with batches.batches_from(3) as flow:
        jax.tree.map(np.testing.assert_array_equal, list(flow), every[3:])
    assert batches.flow is flow
    assert drawn == [(10, 1), (6, 2)] and hashed == [4, 4, 4]


@pytest.mark.parametrize("optimizer", ["adam", "rowwise"])
@pytest.mark.parametrize("then", ["rows", "columns", "whole"])
@pytest.mark.parametrize("now", ["rows", "replicated", "whole"])
def test_tables_go_on_stacked_otherwise(then: str, now: str, optimizer: str, tmp_path: Path) -> None:
    """Saved on 8 devices, restored on 6: every row of every table, and of its state, is where it belongs."""

    def stacked(layout: str, devices: int) -> tuple[Learner, TableCheckpoints]:
        tables = collection_of(SIZES, WIDTH, layout, devices)
        rule = OPTIMIZERS[optimizer].make(0.1)
        one = Learner(MODELS["dlrm"], INPUTS, tables, rule, optax.adam(0.01))
        return one, TableCheckpoints(tmp_path, one, Stacking(layout, devices))

    def numbered(one: Learner) -> Any:
        """Parameters and state whose leaves by rows have the name of table and row; all else is shared."""
        named = {
            part.name: np.arange(part.rows)[:, None] + 1000.0 * i + np.arange(WIDTH) / 10
            for i, part in enumerate(sorted(one.tables.stacks["dim8"].parts, key=lambda part: part.name))
        }
        stack = jax.device_get(one.tables.stack(named)["dim8"])
        params = jax.eval_shape(one.init, jax.random.key(0))
        rows = stack.reshape(-1, WIDTH)

        def filled(leaf: Any) -> Any:
            if not by_row(leaf.shape, rows.shape):
                return np.full(leaf.shape, 7, leaf.dtype)
            return rows.copy() if leaf.ndim == 2 else rows[:, 0].copy()

        state = jax.tree.map(filled, jax.eval_shape(one.init_state, params))
        params = {**jax.tree.map(filled, params), "tables": {"dim8": stack}}
        return params, state

    first, saving = stacked(then, 8)
    saving.save(numbered(first), 3)
    saving.wait()
    second, runs = stacked(now, 6)
    wanted = numbered(second)
    jax.tree.map(np.testing.assert_array_equal, runs.restore(wanted), wanted)


def test_tables_that_lie_as_they_did_stay_on_the_devices() -> None:
    """On another number of devices that divides the same multiple nothing moves."""
    pairs = [("rows", 8, "auto", 4), ("columns", 8, "replicated", 3), ("whole", 4, "whole", 4)]
    for then, before, now, after in pairs:
        old = collection_of(SIZES, WIDTH, then, before)
        assert moves_of(old, collection_of(SIZES, WIDTH, now, after)) is None
    for then, before, now, after in [
        ("rows", 8, "rows", 3),
        ("rows", 8, "whole", 8),
        ("whole", 4, "whole", 2),
    ]:
        old = collection_of(SIZES, WIDTH, then, before)
        assert moves_of(old, collection_of(SIZES, WIDTH, now, after)) is not None


def of_three_features(args: argparse.Namespace) -> feed.Data:
    """Clicks of which a net is compiled in a moment."""
    teacher = Teacher.planted((30, 3, 70), dense=2)
    train, test = Drawn(teacher, args.batch * 6), Drawn(teacher, args.held_out, start=feed.HELD_OUT)
    layout = Layout("label", ("I1", "I2"), ("C1", "C2", "C3"))
    return feed.Data("few clicks", (train,), (test,), layout, teacher.cardinalities, False, teacher)


def test_the_command_goes_on_where_it_was_asked_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other devices, with tables that lie otherwise: one curve, that of a run that nobody ended."""
    monkeypatch.setattr(training, "_data", of_three_features)
    small = f"--steps 6 --batch 24 --held-out 48 --width 4 --out {tmp_path}".split()
    whole = deepfm.main([*small, "--placement", "cpu:1"])
    assert whole.first == 0 and not (tmp_path / "checkpoint").exists()
    rows, seen = feed.Data.rows, list[int]()

    def asked(self: feed.Data, batch: Batch) -> Batch:
        seen.append(len(batch))
        if len(seen) == 4:  # the first one is to plan with
            os.kill(os.getpid(), signal.SIGTERM)
        return rows(self, batch)

    monkeypatch.setattr(feed.Data, "rows", asked)
    threads = set(threading.enumerate())
    first = deepfm.main([*small, "--resume", "--placement", "cpu:2"])
    assert 1 <= len(first.losses) < 6 and first.scores == {}
    assert "asked to end; --resume goes on" in capsys.readouterr().out
    assert not {t for t in threading.enumerate() if t.name.startswith(("parse", "batch", "hash"))} - threads
    with pytest.raises(ValueError, match="--resume goes on"):
        deepfm.main([*small, "--checkpoint", str(tmp_path / "checkpoint")])
    then = deepfm.main([*small, "--resume", "--placement", "cpu:3", "--table", "whole"])
    assert then.first == len(first.losses) and len(then.losses) == 6 - then.first
    assert first.losses + then.losses == pytest.approx(whole.losses, rel=1e-5)
    found = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()[1:]]
    assert [(int(step), float(x)) for step, _, x in found] == [*enumerate(first.losses + then.losses, 1)]
    assert then.scores["DeepFM"].log_loss == pytest.approx(whole.scores["DeepFM"].log_loss, rel=1e-5)


def test_held_out_clicks_and_their_truth_are_the_same_rows() -> None:
    made = feed.made(30, 40, 0)
    (found,) = made.batches(made.test, 40, 1)
    ((label, _),) = feed.truth(made.teacher, 40)
    np.testing.assert_array_equal(found.label, label)
    assert made.sizes == made.teacher.cardinalities


def test_the_command_with_synthetic_clicks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It needs no reader of files, nor what that needs.
    for name in ("pyarrow", "models.recommender.criteo", "models.recommender.columns"):
        monkeypatch.setitem(sys.modules, name, None)
    options = f"--steps 3 --batch 32 --held-out 50 --rows 30 --width 8 --baseline --check --out {tmp_path}"
    result = dlrm.main(options.split())
    assert len(result.losses) == 3
    assert result.difference is not None
    assert result.difference.losses < 1e-13
    assert result.difference.params < 1e-13
    assert set(result.scores) == {"DLRM", "logistic regression", "teacher, without noise"}
    assert {score.samples for score in result.scores.values()} == {50}
    assert (tmp_path / "plan.html").exists()
    said = capsys.readouterr().out
    assert str(result.plan) in said
    assert "26 tables, on synthetic clicks (seed 0)" in said
    assert "50 held-out of synthetic clicks (seed 0)" in said
    assert all(stage in said for stage in ("read", "parse", "hash, copy", "train", "evaluate"))


def test_the_command_with_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Criteo's text, blanks included; what the steps leave is what is evaluated."""
    numbers, keys = len(CRITEO.dense), len(CRITEO.categorical)
    lines = [
        "\t".join(
            [str(i % 2), *(str(i * j) for j in range(numbers)), *(f"{i % 5 + j:x}" for j in range(keys))]
        )
        for i in range(40)
    ]
    lines[3] = "1" + "\t" * (numbers + keys)
    path = tmp_path / "day.tsv"
    path.write_text("\n".join(lines) + "\n")
    options = f"--data {path} --steps 2 --batch 16 --rows 20 --width 4 --placement cpu:1 --out {tmp_path}"
    result = dcn.main(options.split())
    assert result.scores["DCN"].samples == 8
    assert f"520 rows in 26 tables, on {path}" in capsys.readouterr().out
    with pytest.raises(DataError, match="fewer than 64 rows"):
        dcn.main([*options.split(), "--batch", "64"])


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
