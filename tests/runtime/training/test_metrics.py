"""Metrics come to the host a step late, are noted once each, and never end a run themselves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.runtime.training import recorder
from sbp.runtime.training.metrics import CsvFile
from tests.runtime.training.small import batch_of, fitted, losses, program, start


def nothing(error: BaseException) -> None:
    """What is known of errors here."""


class ScheduleTimes:
    """Takes rows."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def begin(self, step: int) -> None:
        self.rows.append(f"behind {step}")

    def take(self, row: Any) -> None:
        self.rows.append(row)


def test_a_metric_is_read_when_the_next_step_is_on_its_way() -> None:
    """The order in which `fit` dispatches steps and reads what they gave."""
    order: list[str] = []

    class Told:
        """A program that says when it is called; its metric says when it is read."""

        def __getattr__(self, name: str) -> Any:
            return getattr(program(), name)

        def __call__(self, *args: Any) -> Any:
            *state, loss = program()(*args)
            number = sum(x.startswith("step") for x in order) + 1
            order.append(f"step {number}")
            return *state, Read(number, loss)

    class Read:
        def __init__(self, number: int, value: Any) -> None:
            self.number, self.value = number, value

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            order.append(f"read {self.number}")
            return np.asarray(self.value, dtype)

    sbp.fit(Told(), start(), batch_of, steps=4, progress=False)  # type: ignore[arg-type]
    assert order == ["step 1", "step 2", "read 1", "step 3", "read 2", "step 4", "read 3", "read 4"]


def test_some_steps_are_noted() -> None:
    every = losses(fitted(steps=8))
    done = fitted(steps=8, log_every=3)
    assert [(row["step"], row["loss"]) for row in done.history] == [
        (3, every[2]),
        (6, every[5]),
        (8, every[7]),
    ]


def test_steps_that_are_not_noted_are_waited_for() -> None:
    """Each that is on its way holds a batch."""
    taken = ScheduleTimes()
    found = recorder.Recorder([taken], 100, nothing)
    for step in range(1, 50):
        found.add(step, jnp.ones(()), {}, False)
        assert len(found._unread) <= recorder.AHEAD
    assert taken.rows == []


def test_the_history_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorder.Recorder([], 1, nothing)
    assert found.history.maxlen == recorder.MOST_ROWS == 10_000
    for step in range(1, 10_010):
        found.add(step, 1.0, {}, False)
    found.flush()
    assert len(found.history) == 10_000 and found.history[-1]["step"] == 10_009


def test_steps_that_are_done_again_are_there_once() -> None:
    taken = ScheduleTimes()
    found = recorder.Recorder([taken], 1, nothing)
    for step in (1, 2, 3):
        found.add(step, float(step), {}, False)
    found.begin(1)
    found.add(2, 20.0, {}, True)
    found.flush()
    assert [(r["step"], r["loss"]) for r in found.history] == [(1, 1.0), (2, 20.0)]
    assert taken.rows[2] == "behind 1"


def test_the_result_prints_in_one_line() -> None:
    done = fitted(steps=2)
    assert len(repr(done).splitlines()) == 1 and len(repr(done)) < 100
    assert repr(done).startswith("<FitResult of step 2, loss ") and "2 arrays of 3.2e-05 MB" in repr(done)


# -- files


def test_the_table_is_replaced_and_not_written_anew_in_place(tmp_path: Path) -> None:
    """Who has it open, or kills the run at any moment, sees one table or the other."""
    path = tmp_path / "log.csv"
    file = CsvFile(path)
    file.begin(0)
    for step in (1, 2, 3):
        file.take({"step": step, "loss": float(step)})
    before = path.open()
    file.begin(2)
    assert before.read().splitlines()[-1] == "3,loss,3.0"
    before.close()
    file.take({"step": 3, "loss": 30.0})
    file.close()
    assert path.read_text().split() == ["step,metric,value", "1,loss,1.0", "2,loss,2.0", "3,loss,30.0"]
    assert [p.name for p in tmp_path.iterdir()] == ["log.csv"]


def test_a_table_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.csv"
    path.write_text("step,metric,value\n1,loss,1.0\n")

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        CsvFile(path).begin(1)
    assert path.read_text() == "step,metric,value\n1,loss,1.0\n" and len([*tmp_path.iterdir()]) == 1


def test_a_full_disk_under_the_table_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Once; and the run goes on. /dev/full is a disk without space."""
    file = CsvFile(Path("/dev/full"))
    file._file = Path("/dev/full").open("a")  # noqa: SIM115
    file._out = __import__("csv").writer(file._file)
    caplog.set_level(logging.WARNING)
    for step in (1, 2):
        file.take({"step": step, "loss": 1.0})
    file.close()
    assert caplog.text.count("step 1 and those behind it may be missing") == 1
