"""What is others' stays, what was set aside is named, and the last good steps are there."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import sbp
from sbp.errors import ArgumentError, CheckpointError
from sbp.runtime.checkpoint import steps
from sbp.runtime.checkpoint.checkpoints import Checkpoints


def state_of(value: float) -> dict[str, Any]:
    return {"w": jnp.full(3, float(value))}


def value_of(runs: Checkpoints, step: int | None = None) -> float:
    return float(runs.restore(state_of(0), step)["w"][0])


def saved(runs: Checkpoints, *numbers: int) -> None:
    for step in numbers:
        runs.save(state_of(step), step=step)
    runs.wait()


def digests(folder: Path) -> dict[str, str]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


FOREIGN = [
    "step_00000001",
    "step_1",
    "step_00000004.orbax-checkpoint-tmp",
    "step_notes",
    "step_00000100",
    "2",
]


def test_what_others_have_written_is_never_touched(tmp_path: Path) -> None:
    """Finished checkpoints of orbax, unfinished ones, notes, and files within steps of our own."""
    for name in FOREIGN:
        (tmp_path / name).mkdir()
        (tmp_path / name / "data-1").mkdir()
        (tmp_path / name / "notes.txt").write_text(name)
        (tmp_path / name / "data-1" / "weights").write_text(name)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "step_00000200", {"w": np.ones(2)})
    manager = ocp.CheckpointManager(tmp_path / "step_00000300")
    manager.save(1, args=ocp.args.StandardSave({"w": np.ones(2)}))
    manager.close()
    (tmp_path / "sbp_lease-notes.txt").write_text("x")
    before = digests(tmp_path)
    with Checkpoints(tmp_path, keep=1) as runs:
        saved(runs, 5, 6, 7)
        (tmp_path / "step_00000007" / "mine.txt").write_text("mine")
        saved(runs, 8)
    with Checkpoints(tmp_path, keep=1) as again:
        again.prepare()
        saved(again, 9)
    after = digests(tmp_path)
    assert {name: after.get(name) for name in before} == before
    assert (tmp_path / "step_00000007" / "mine.txt").read_text() == "mine"
    assert runs.steps == [9]


def test_fit_touches_nothing_of_others(tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "step_00000001", {"w": np.ones(2)})
    (tmp_path / "step_notes").mkdir()
    before = digests(tmp_path)
    program = sbp.compile(lambda w, x: (w - x, w.sum()), sbp.placement("cpu", shape=(1,)))
    sbp.fit(program, (jnp.ones(2),), lambda i: jnp.ones(2), steps=2, checkpoint=tmp_path, save_every=2)
    assert {name: digests(tmp_path).get(name) for name in before} == before


def test_a_step_that_something_else_has_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step_00000001").mkdir()
    (tmp_path / "step_00000001" / "notes").write_text("")
    runs = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="a folder that this library has not written"):
        saved(runs, 1)
    saved(runs, 2)
    assert runs.steps == [2]
    runs.close()


def test_which_steps_stay(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=2, keep_every=4) as runs:
        saved(runs, *range(1, 12))
        assert runs.steps == [4, 8, 10, 11]
    for wrong in ({"keep": 0}, {"keep_every": 0}):
        with pytest.raises(ArgumentError, match="1 or more"):
            Checkpoints(tmp_path, **wrong)  # type: ignore[arg-type]


def test_going_back_sets_aside_what_is_newer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpoints(tmp_path) as runs:
        saved(runs, 100, 200, 300)
        assert value_of(runs, 100) == 100
        with caplog.at_level(logging.WARNING, "sbp"):
            saved(runs, 110)
        assert "steps 200, 300 set aside" in caplog.text
        assert runs.steps == [100, 110] and runs.abandoned_steps == [200, 300]
        saved(runs, 120, 130)
        assert runs.steps == [110, 120, 130] and value_of(runs) == 130
        saved(runs, 200)  # the same number on the new branch
        assert value_of(runs) == 200 and runs.abandoned_steps == [200, 300]
        with pytest.raises(CheckpointError, match="was set aside when training went on from an older step"):
            runs.restore(state_of(0), 300)
    with Checkpoints(tmp_path) as again:
        assert value_of(again) == 200


def test_a_run_from_the_beginning_sets_aside_what_is_newer(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as runs:
        saved(runs, 10, 20)
    with Checkpoints(tmp_path) as again:
        saved(again, 5)
        assert again.steps == [5] and again.abandoned_steps == [10, 20]
        saved(again, 6, 7, 8)
        assert again.steps == [6, 7, 8] and again.abandoned_steps == [10, 20]


def test_what_was_set_aside_is_bounded(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=2) as runs:
        saved(runs, 1)
        for round_ in range(4):
            runs.restore(state_of(0), 1)
            saved(runs, 10 + round_)
        assert runs.abandoned_steps == [11, 12]
        left = sorted(p.name for p in tmp_path.glob("step_*"))
        assert left == [f"step_{s:08d}" for s in (1, 11, 12, 13)]


def test_nothing_is_set_aside_before_the_new_step_counts(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as runs:
        saved(runs, 1, 2)
        runs.restore(state_of(0), 1)
        with pytest.raises(CheckpointError):
            runs.save({"w": np.array([object()])}, step=3)
            runs.wait()
        assert runs.steps == [1, 2]
        saved(runs, 3)
        assert runs.steps == [1, 3] and runs.abandoned_steps == [2]


def test_two_that_save_one_step_do_not_mix(tmp_path: Path) -> None:
    """Thirty rounds of two in one process: one of them has the step, whole; the other one is told so."""
    one, two = Checkpoints(tmp_path, keep=100), Checkpoints(tmp_path, keep=100)
    for step in range(30):
        said, barrier = dict[int, str](), threading.Barrier(2)

        def save(
            i: int, runs: Checkpoints, step: int = step, said: Any = said, barrier: Any = barrier
        ) -> None:
            state = {"w": np.full((64, 8), i), "v": np.full((8,), i)}
            try:
                barrier.wait()
                runs.save(state, step=step)
                runs.wait()
            except CheckpointError as e:
                said[i] = str(e)

        threads = [threading.Thread(target=save, args=x) for x in ((1, one), (2, two))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(said) == 1 and "there already" in next(iter(said.values())), said
        (winner,) = {1, 2} - {*said}
        found = one.restore({"w": np.zeros((64, 8), int), "v": np.zeros(8, int)}, step)
        assert {*found["w"].flat, *found["v"].flat} == {winner}
    one.close()
    two.close()


def test_a_second_one_in_the_same_process_takes_nothing_away(tmp_path: Path) -> None:
    one = Checkpoints(tmp_path, keep=100)
    for step in range(6):
        one.save(state_of(step), step=step)
        Checkpoints(tmp_path).prepare()
    one.wait()
    assert one.steps == [*range(6)]
    one.close()


class Pruner:
    """Prunes the newest step of a folder at one of the operations on files that a reader does there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.left = "", -1
        stat = os.stat

        def heard_stat(path: Any, *rest: Any, **options: Any) -> os.stat_result:
            self.hear("os.stat", (path,))
            return stat(path, *rest, **options)

        monkeypatch.setattr(os, "stat", heard_stat)  # of which Python's audit does not hear
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.left < 0 or event not in ("open", "os.stat", "os.listdir", "os.scandir"):
            return
        if not str(arguments[0]).startswith(self.folder):
            return
        self.left -= 1
        if self.left < 0:
            shutil.rmtree(f"{self.folder}/step_00000002")

    def read(self, template: Path, folder: Path, at: int, reading: Callable[[Checkpoints], Any]) -> Any:
        """What is read of a copy of a folder; the newest step goes at the given operation."""
        shutil.copytree(template, folder)
        self.folder, self.left = os.fspath(folder), at
        try:
            return reading(Checkpoints(folder))
        finally:
            self.left = -1


def test_a_step_that_vanishes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At every operation: its reader takes the next, or is told, if it has asked for it by its number."""
    with Checkpoints(tmp_path / "run") as runs:
        for step in (1, 2):
            runs.save(state_of(step), step, extra={"rows": np.full(2, step)})
    pruner = Pruner(monkeypatch)
    readings: list[tuple[Callable[[Checkpoints], Any], Callable[[Checkpoints], Any]]] = [
        (value_of, lambda runs: value_of(runs, 2)),
        (lambda runs: int(runs.extra()["rows"][0]), lambda runs: int(runs.extra(2)["rows"][0])),
    ]
    for i, (newest, second) in enumerate(readings):
        seen = list[int]()
        while seen[-1:] != [2]:  # until it is read before that
            folder = tmp_path / f"{i} at {len(seen)}"
            with caplog.at_level(logging.WARNING, "sbp"):
                seen.append(pruner.read(tmp_path / "run", folder, len(seen), newest))
            try:
                assert pruner.read(tmp_path / "run", tmp_path / "named", len(seen) - 1, second) == 2
            except CheckpointError as e:
                assert "pruned while it was read" in str(e) or "one of 1" in str(e), str(e)
            shutil.rmtree(tmp_path / "named")
        assert len(seen) > 5 and {*seen[:-1]} == {1}
    assert "step 2 was pruned while it was read" in caplog.text


def test_leftovers_of_other_owners_are_swept_and_only_those(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as runs:
        saved(runs, 1, 2)
    left = tmp_path / "step_00000003" / f"data-{1:032x}"
    (left / "arrays").mkdir(parents=True)
    (left / "arrays" / "x").write_text("half")
    unmarked = tmp_path / "step_00000004" / "data-unmarked"
    unmarked.mkdir(parents=True)
    (left / steps.OWNER).write_text("{}")
    beside = tmp_path / "step_00000001" / f"data-{2:032x}"
    beside.mkdir()
    (beside / steps.OWNER).write_text("{}")
    with Checkpoints(tmp_path) as again:
        again.prepare()
        assert not left.parent.exists() and unmarked.exists() and not beside.exists()
        assert value_of(again) == 2 and value_of(again, 1) == 1
