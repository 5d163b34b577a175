"""Runs of the recommender models: their feeds, their commands, and how they go on where they were."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import sbp
from models import dcn, deepfm, dlrm
from models.recommender import feed, training
from models.recommender.batch import Batch, Lists
from models.recommender.layout import CRITEO, PREPARED, DataError, Layout
from models.recommender.synthetic import Drawn, Teacher
from sbp.errors import EmbeddingError
from sbp.runtime.training.batches import Feed


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
    with pytest.raises(DataError, match=r"key -3 of feature 1\n.*0\.\.7"):
        whole.rows(clicks(keys))


def test_lists_become_bags() -> None:
    """Of a fixed size each: what is longer is refused, and the message says what is long enough."""
    lists = Lists(np.array([1, 2, 3]), np.array([0, 1, 3])), Lists(np.array([4]), np.array([0, 0, 1]))
    bags = data(sizes=(5, 5), hashing=False, hotness=(2, 1)).rows(clicks(lists)).keys
    assert [x.tolist() for x in bags] == [[[1, -1], [2, 3]], [[-1], [4]]]
    assert [x.dtype for x in bags] == [np.int32, np.int32]
    for hotness, why in (((), "each feature has one key"), ((1, 1), "a bag has a fixed size")):
        with pytest.raises(
            DataError, match=rf"a list of 2 keys in feature 1\n(.*\n)*.*{why}(.*\n)*.*--hotness 2"
        ):
            data(sizes=(5, 5), hashing=False, hotness=hotness).rows(clicks(lists))
    with pytest.raises(DataError, match=r"--hotness of 3 numbers\n.*2: one for each feature"):
        data(sizes=(5, 5), hashing=False, hotness=(2, 1, 1)).rows(clicks(lists))
    with pytest.raises(DataError, match=r"key 4 of feature 2\n.*0\.\.3"):
        data(sizes=(5, 4), hashing=False, hotness=(2, 1)).rows(clicks(lists))
    filled = feed.fill_batch(data(sizes=(5, 5), hashing=True, hotness=(2, 2)).rows(clicks(lists)), 3)
    assert [x.shape for x in filled.keys] == [(3, 2), (3, 2)]


def test_the_rest_comes_after_the_training() -> None:
    whole = Teacher.plant((5,), dense=1).batch(23, 0)
    first = list(feed.full(4, 2)(iter([whole])))
    rest = list(feed.rest(4, 9)(iter([whole.rows_between(8, 23)])))
    assert [len(b) for b in (*first, *rest)] == [4, 4, 4, 4, 1]
    np.testing.assert_array_equal(np.concatenate([b.dense for b in (*first, *rest)]), whole.dense[:17])
    full = feed.fill_batch(rest[-1], 4)
    assert full.label[1:].tolist() == [feed.NOBODY] * 3
    assert len(full) == len(full.dense) == len(full.keys) == 4


def test_a_training_that_goes_on_has_no_work_with_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does it draw clicks, nor hash their keys, nor copy them; the batches are the same."""
    drawn, hashed = list[tuple[int, int]](), list[int]()
    teacher = Teacher.plant((50, 7), dense=2)
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


def of_three_features(args: argparse.Namespace) -> feed.Data:
    """Clicks of which a net is compiled in a moment."""
    teacher = Teacher.plant((30, 3, 70), dense=2)
    train, test = Drawn(teacher, args.batch * 6), Drawn(teacher, args.held_out, start=feed.HELD_OUT)
    layout = Layout("label", ("I1", "I2"), ("C1", "C2", "C3"))
    return feed.Data("few clicks", (train,), (test,), layout, teacher.cardinalities, False, teacher)


@pytest.mark.full
def test_the_command_goes_on_where_it_was_asked_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other devices, with tables that lie otherwise: one curve, that of a run that nobody ended."""
    monkeypatch.setattr(training, "_data", of_three_features)
    small = f"{SMALL} --out {tmp_path}".split()
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


SMALL = "--no-alone --steps 6 --batch 24 --held-out 48 --width 4"
LEARNS = f"{SMALL} --vocabulary 16 --save-every 2 --resume".split()
"""Sixteen rows a table, which is less than the keys of C3."""
KILLED = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
from models import deepfm
from models.recommender import training
from tests.models.test_recommender_runs import of_three_features
training._clicks = of_three_features
deepfm.main(sys.argv[1:])
"""


def last_step(folder: Path) -> tuple[Any, Any]:
    """What the last checkpoint of a run has: rows and state by key, and what is kept beside them."""
    runs = sbp.Checkpoints(folder / "checkpoint")
    assert runs.steps[-1] == 6
    arrays = runs.path / "step_00000006"
    return json.loads((arrays / "sbp_manifest.json").read_text())["leaves"], runs.extra(6)["fit.batches"]


@pytest.mark.full
def test_a_run_that_is_killed_gives_the_same_rows_to_the_same_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 when a step is there: who goes on ends with the keys, rows and state of a run left alone."""
    monkeypatch.setattr(training, "_clicks", of_three_features)
    command = [sys.executable, "-c", KILLED, *LEARNS, "--placement", "cpu:2"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    deepfm.main([*LEARNS, "--placement", "cpu:2", "--out", str(whole)])
    process = subprocess.Popen([*command, "--out", str(killed)])
    first = killed / "checkpoint" / "step_00000004" / "sbp_manifest.json"
    while not first.exists() and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert process.returncode == -signal.SIGKILL
    for step in sorted((killed / "checkpoint").glob("step_*"))[2:]:
        shutil.rmtree(step)  # it was faster than the kill
    deepfm.main([*LEARNS, "--placement", "cpu:2", "--out", str(killed)])
    (leaves, kept), (others, also) = last_step(whole), last_step(killed)
    assert leaves == others  # with checksums of all elements
    jax.tree.map(np.testing.assert_array_equal, kept, also)
    assert len(kept["C3"]["keys"]) == 16  # some have left
    shutil.rmtree(whole / "checkpoint" / "step_00000006")
    more = ["--vocabulary", "40", "--placement", "cpu:4", "--out", str(whole)]
    grown = deepfm.main([*LEARNS, *more])
    assert grown.first == 4 and len(grown.losses) == 2  # with more rows, on other devices


@pytest.mark.full
def test_the_command_with_vocabularies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On eight devices as on one, with keys that leave, and others that are too rare for a row."""
    monkeypatch.setattr(training, "_clicks", of_three_features)
    options = f"--no-alone --steps 4 --batch 24 --held-out 48 --width 4 --check --out {tmp_path}".split()
    result = deepfm.main([*options, "--vocabulary", "12", "--admit", "2", "--evict", "aged"])
    assert result.difference is not None
    assert result.difference.losses < 1e-13 and result.difference.params < 1e-13
    capsys.readouterr()
    monkeypatch.setattr(sbp.Program, "key_counts", lambda _: ("the keys of an exchange",))
    deepfm.main(f"{SMALL} --out {tmp_path} --steps 1 --count-keys".split())
    assert "the keys of an exchange\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match="keys have no rows before training"):
        deepfm.main([*options, "--vocabulary", "12", "--rows", "5"])


@pytest.mark.full
def test_the_command_with_tiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As one device that holds everything, also where a run goes on; bags too."""
    options = "--tiered --host-budget 2MB --pass-batches 3 --keys 20000 --batch 64 --width 4".split()
    options += ["--held-out", "128", "--out", str(tmp_path)]
    small = ["--device-budget", "800kB", "--save-every", "4"]
    result = deepfm.main(
        [*options, *small, "--steps", "6", "--check", "--checkpoint", str(tmp_path / "steps")]
    )
    assert result.difference is not None
    assert result.difference.losses < 1e-13 and result.difference.params < 1e-13
    out = capsys.readouterr().out
    assert "rows on devices: " in out and " there, the rest " in out and "the host's budget is 2.00 MB" in out
    more = deepfm.main(
        [*options, *small, "--steps", "9", "--checkpoint", str(tmp_path / "steps"), "--resume"]
    )
    assert more.first == 6 and len(more.losses) == 3 and "DeepFM" in more.scores
    with pytest.raises(EmbeddingError, match="with the smallest pass"):
        deepfm.main([*options, "--steps", "1", "--device-budget", "100kB"])
    with pytest.raises(ValueError, match="tables lie by rows"):
        deepfm.main([*options, "--steps", "1", "--table", "columns"])


def test_held_out_clicks_and_their_truth_are_the_same_rows() -> None:
    made = feed.make_data(30, 40, 0)
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
    options = "--steps 3 --batch 32 --held-out 50 --rows 30 --width 8 --baseline --check"
    result = dlrm.main([*options.split(), "--out", str(tmp_path)])
    assert len(result.losses) == 3
    assert result.difference is not None
    assert result.difference.losses < 1e-13
    assert result.difference.params < 1e-13
    others = {"DLRM on one device", "logistic regression", "teacher, without noise"}
    assert set(result.scores) == {"DLRM", *others}
    assert result.scores["DLRM"].auc == pytest.approx(result.scores["DLRM on one device"].auc, abs=1e-3)
    assert {score.samples for score in result.scores.values()} == {50}
    assert (tmp_path / "plan.html").exists()
    said = capsys.readouterr().out
    assert str(result.plan) in said
    assert "26 tables, on synthetic clicks (seed 0)" in said
    assert "50 held-out of synthetic clicks (seed 0)" in said
    assert all(stage in said for stage in ("read", "parse", "hash, copy", "train", "evaluate"))


@pytest.mark.full
@pytest.mark.parametrize("table", ["--rows 40 --baseline", "--vocabulary 60"])
def test_the_command_with_bags(table: str, tmp_path: Path) -> None:
    """Parquet with lists of keys, ragged and empty ones among them: on eight devices as on one."""
    pa = pytest.importorskip("pyarrow")
    parquet, rng, n = pytest.importorskip("pyarrow.parquet"), np.random.default_rng(0), 96
    columns: dict[str, Any] = {"label": pa.array(rng.integers(0, 2, n))}
    columns.update((name, pa.array(rng.integers(0, 9, n))) for name in CRITEO.dense)
    for i, name in enumerate(CRITEO.categorical):
        lists = [rng.integers(0, 50, rng.integers(0, 4)).tolist() for _ in range(n)]
        columns[name] = pa.array(lists if i % 2 else rng.integers(0, 50, n))
    path = tmp_path / "clicks.parquet"
    parquet.write_table(pa.table(columns), path)
    given = f"--data {path} --steps 2 --batch 32 --held-out 32 --width 4 --check --out {tmp_path} --hotness 3"
    result = dlrm.main([*given.split(), *table.split()])
    assert result.difference is not None
    assert result.difference.losses < 1e-13 and result.difference.params < 1e-13
    assert result.scores["DLRM"].samples == 32


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
