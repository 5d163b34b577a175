"""Runs of the recommender models: their feeds, their commands, and how they go on where they were."""

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from models import dcn, deepfm, dlrm
from models.recommender import feed, training
from models.recommender.batch import Batch, Lists
from models.recommender.checkpoints import Stacking, TableCheckpoints, moves_of
from models.recommender.layout import CRITEO, PREPARED, DataError, Layout
from models.recommender.learner import OPTIMIZERS, Learner, collection_of
from models.recommender.synthetic import Drawn, Teacher
from sbp.lazy import by_row
from sbp.runtime.training.batches import Feed
from tests.models.test_recommenders import (
    INPUTS,
    MODELS,
    SIZES,
    WIDTH,
)


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


@pytest.mark.some(5)
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
        ((name, whole),) = one.tables.stacks.items()
        named = {
            part.name: np.arange(part.rows)[:, None] + 1000.0 * i + np.arange(WIDTH) / 10
            for i, part in enumerate(sorted(whole.parts, key=lambda part: part.name))
        }
        stack = jax.device_get(one.tables.stack(named)[name])
        params = jax.eval_shape(one.init, jax.random.key(0))
        rows = stack.reshape(-1, WIDTH)

        def filled(leaf: Any) -> Any:
            if not by_row(leaf.shape, rows.shape):
                return np.full(leaf.shape, 7, leaf.dtype)
            return rows.copy() if leaf.ndim == 2 else rows[:, 0].copy()

        state = jax.tree.map(filled, jax.eval_shape(one.init_state, params))
        params = {**jax.tree.map(filled, params), "tables": {name: stack}}
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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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
