"""A run keeps good states only, goes back to the last of them, and goes on from it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sbp
from sbp.errors import ArgumentError, CheckpointError, DamagedCheckpointError, LeaseError, NonFiniteError
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.storage import files
from tests.runtime.training import small
from tests.runtime.training.small import batch_of, cut, damage, fitted, losses, poison_at, steps_in

GO_BACK = sbp.training.NonFinitePolicy(max_rollbacks=3)
SKIP = sbp.training.NonFinitePolicy(max_rollbacks=3, skip_batch=True)


@pytest.fixture(scope="module")
def curve() -> list[float]:
    return losses(fitted())


class Once:
    """A gradient that is NaN the first time that a step is done, as where a device has failed."""

    def __init__(self, step: int) -> None:
        self.step, self.left = step, 1

    def __call__(self, i: int) -> Any:
        if i + 1 == self.step and self.left:
            self.left -= 1
            return np.full(small.SIZE, np.nan, np.float32)
        return batch_of(i)


def test_a_poisoned_state_is_not_saved(tmp_path: Path) -> None:
    """The loss shows nothing; the leaves are named, and the step before is there."""
    with pytest.raises(NonFiniteError, match=r"step 6\n  got    \[0\] \(nan\), \[1\] \(nan\)"):
        fitted(poison_at(5), checkpoint=tmp_path, save_every=2)
    assert steps_in(tmp_path) == [2, 4]


def test_it_goes_back_to_the_last_good_step(
    curve: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches, log = Once(5), tmp_path / "log.csv"
    done = fitted(batches, checkpoint=tmp_path / "run", save_every=2, on_nonfinite=GO_BACK, log=log)
    assert losses(done) == curve and done.is_done and done.left_out == ()
    assert [int(line.split(",")[0]) for line in log.read_text().splitlines()[1:]] == [*range(1, 9)]
    assert "step 6: [0] (nan), [1] (nan); back to step 4, for the 1. time of at most 3" in caplog.text
    assert steps_in(tmp_path / "run") == [4, 6, 8]


def test_it_goes_back_to_where_it_began(curve: list[float], tmp_path: Path) -> None:
    """Before the first save there is a step 0."""
    done = fitted(Once(2), checkpoint=tmp_path, save_every=100, on_nonfinite=GO_BACK)
    assert losses(done) == curve and steps_in(tmp_path) == [0, 8]


def test_a_batch_that_is_bad_again_is_left_out_if_it_may(tmp_path: Path) -> None:
    done = fitted(poison_at(5), checkpoint=tmp_path, save_every=2, on_nonfinite=SKIP)
    assert done.left_out == (5,) and done.step == 8
    w = np.zeros(small.SIZE, np.float32)
    for i in (0, 1, 2, 3, 5, 6, 7):
        w = w + np.float32(0.5) * (batch_of(i) - w)
    np.testing.assert_array_equal(done.state[0], w)
    assert [row["step"] for row in done.history] == [1, 2, 3, 4, 6, 7, 8]


def test_the_last_batch_may_be_left_out(tmp_path: Path) -> None:
    done = fitted(poison_at(8), checkpoint=tmp_path, save_every=3, on_nonfinite=SKIP)
    assert done.left_out == (8,) and done.step == 8 and done.is_done
    again = fitted(poison_at(8), checkpoint=tmp_path)
    assert again.start_step == 8 and again.history == []
    np.testing.assert_array_equal(again.state[0], done.state[0])


def test_a_batch_that_is_bad_again_ends_it_if_it_may_not(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="step 5"):
        fitted(poison_at(5), checkpoint=tmp_path, save_every=2, on_nonfinite=GO_BACK)
    assert steps_in(tmp_path) == [0, 2, 4]


def test_it_goes_back_at_most_so_often(tmp_path: Path) -> None:
    policy = sbp.training.NonFinitePolicy(max_rollbacks=2, skip_batch=True)
    with pytest.raises(NonFiniteError, match="step 7"):
        fitted(poison_at(5, 7), checkpoint=tmp_path, save_every=1, on_nonfinite=policy)
    assert steps_in(tmp_path)[-1] == 6


def test_a_metric_that_is_nan_takes_it_back_too(curve: list[float], tmp_path: Path) -> None:
    """A loss shows it a step later, when the next step has taken the state."""

    def step(w: Any, batch: Any) -> Any:
        return w + 0.5 * (batch - w), ((batch - w) ** 2).mean()

    program = sbp.compile(step, sbp.placement("cpu", shape=(2,)), in_sbp=([sbp.S(0)], [sbp.S(0)]))
    w = (small.start()[0],)
    run = {"steps": 8, "checkpoint": tmp_path, "save_every": 4, "progress": False}
    done = sbp.fit(program, w, Once(5), on_nonfinite=GO_BACK, **run)
    assert losses(done) == pytest.approx(curve, rel=1e-6)


def test_leaves_may_be_exempt(tmp_path: Path) -> None:
    step = sbp.compile(
        lambda w, seen, x: (w + x, seen + x / 0, (w * w).sum()), sbp.placement("cpu", shape=(1,))
    )
    state, run = (np.zeros(2, np.float32), np.zeros(2, np.float32)), {"steps": 3, "progress": False}
    batches = [np.ones(2, np.float32)] * 3
    with pytest.raises(NonFiniteError, match=r"\[1\] \(inf\)"):
        sbp.fit(step, state, batches, checkpoint=tmp_path / "a", **run)
    policy = sbp.training.NonFinitePolicy(exempt=("1", "1/*"))
    for steps in (2, 3):
        run = {"steps": steps, "progress": False, "on_nonfinite": policy}
        done = sbp.fit(step, state, batches, checkpoint=tmp_path / "b", **run)
    assert done.start_step == 2 and np.isinf(done.state[1]).all()


def test_what_was_not_finite_may_stay_so(tmp_path: Path) -> None:
    """A mask with -inf in it."""
    step = sbp.compile(lambda mask, x: (mask, x.sum()), sbp.placement("cpu", shape=(1,)))
    mask = (np.array([0, -np.inf], np.float32),)
    for steps in (2, 4):
        done = sbp.fit(
            step, mask, lambda i: np.ones(2, np.float32), steps=steps, checkpoint=tmp_path, progress=False
        )
    assert done.start_step == 2


# -- going on


@pytest.mark.parametrize("harm", [damage, cut])
def test_it_goes_on_from_the_last_step_that_is_intact(
    harm: Any, curve: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fitted(steps=6, checkpoint=tmp_path, save_every=2)
    harm(tmp_path, 6)
    done = fitted(checkpoint=tmp_path, save_every=2)
    assert done.start_step == 4 and losses(done) == curve[4:]
    assert "step 6 is left out, an older one is taken" in caplog.text
    assert steps_in(tmp_path)[-1] == 8


def test_it_does_not_begin_anew_where_no_step_is_intact(tmp_path: Path) -> None:
    fitted(steps=4, checkpoint=tmp_path, save_every=2)
    for step in (2, 4):
        damage(tmp_path, step)
    with pytest.raises(DamagedCheckpointError, match=r"step 4: .*; step 2: ") as caught:
        fitted(checkpoint=tmp_path)
    assert "a run does not start anew" in str(caught.value)


def test_it_does_not_go_on_from_a_poisoned_step(
    curve: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a loop of one's own might have saved it, whose first save is compared with nothing."""
    fitted(steps=4, checkpoint=tmp_path, save_every=2)
    with Checkpoints(tmp_path) as runs:
        runs.save((np.full(small.SIZE, np.nan, np.float32), small.start()[1]), step=6)
    done = fitted(checkpoint=tmp_path)
    assert done.start_step == 4 and losses(done) == curve[4:]
    assert "step 6 is left out, an older one is taken: [0] is nan" in caplog.text


def test_a_batch_iterator_is_put_where_the_older_step_is(curve: list[float], tmp_path: Path) -> None:
    fitted(steps=6, checkpoint=tmp_path, save_every=2)
    damage(tmp_path, 6)
    done = fitted((batch_of(i) for i in range(8)), checkpoint=tmp_path)
    assert done.start_step == 4 and losses(done) == curve[4:]


# -- saves that fail


def test_a_full_disk_that_is_freed_ends_nothing(
    curve: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, full = files.create, [False]

    def create(path: Any, data: bytes) -> bool:
        if full[0]:
            raise OSError(28, "No space left on device", str(path))
        return write(path, data)

    def batches(i: int) -> Any:
        full[0] = 2 <= i < 5
        return batch_of(i)

    monkeypatch.setattr(files, "create", create)
    caplog.set_level(logging.WARNING)
    done = fitted(batches, checkpoint=tmp_path, save_every=1)
    assert losses(done) == curve and "training goes on" in caplog.text
    assert steps_in(tmp_path)[-1] == 8


def test_a_last_save_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(path: Any, data: bytes) -> bool:
        raise OSError(28, "No space left on device", str(path))

    def batches(i: int) -> Any:
        monkeypatch.setattr(files, "create", create) if i == 2 else None
        return batch_of(i)

    with pytest.raises(CheckpointError, match="the disk is full"):
        fitted(batches, steps=3, checkpoint=tmp_path)


def test_who_has_lost_the_folder_ends(tmp_path: Path) -> None:
    """Another run has it: nothing is saved there any more, and nobody waits for that."""

    def batches(i: int) -> Any:
        if i == 3:
            lease = next(tmp_path.glob("sbp_lease-*.json"))
            number = int(lease.stem.rpartition("-")[2]) + 1
            other = lease.read_text().replace('"pid": ', '"pid": 1').replace('"token": "', '"token": "x')
            (tmp_path / f"sbp_lease-{number:06d}.json").write_text(other)
        return batch_of(i)

    with pytest.raises(LeaseError, match="taken over by"):
        fitted(batches, checkpoint=tmp_path, save_every=1)


# -- arguments


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"on_nonfinite": GO_BACK}, "a run goes back to the last good step that was saved"),
        ({"on_nonfinite": GO_BACK, "batches": iter([])}, "a list_iterator, with max_rollbacks"),
        ({"save_every": 0, "log_every": -1}, "it is a number of steps"),
    ],
)
def test_arguments_that_do_not_go_together(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        fitted(**given)


def test_a_negative_number_of_times() -> None:
    with pytest.raises(ArgumentError, match="0 stops the run at once"):
        sbp.training.NonFinitePolicy(max_rollbacks=-1)
