"""SIGTERM, Ctrl-C and batches that do not come: the state is saved, and the run ends in time."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sbp.errors import BatchError
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.embedding.vocabulary import Vocabulary
from sbp.runtime.training import interrupt
from tests.runtime.training.small import batch_of, fitted, losses, steps_in

SIGNALS = [signal.SIGTERM, signal.SIGINT]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Waits are short, and signals are those of a process that a person starts: one in the background of a
    shell ignores Ctrl-C, and so do the tests there."""
    monkeypatch.setattr(interrupt, "END_SECONDS", 0.3)
    monkeypatch.setattr(interrupt, "LOOK_SECONDS", 0.05)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def asked_at(step: int, number: signal.Signals) -> Any:
    """Batches, of which that of a step comes with a signal."""

    def batches(i: int) -> Any:
        if i + 1 == step:
            os.kill(os.getpid(), number)
        return batch_of(i)

    return batches


@pytest.mark.parametrize("number", SIGNALS)
def test_it_saves_and_ends(number: signal.Signals, tmp_path: Path) -> None:
    before = [signal.getsignal(n) for n in SIGNALS]
    done = fitted(asked_at(4, number), checkpoint=tmp_path)
    assert not done.is_done and done.step == 3 and steps_in(tmp_path) == [3]
    assert [signal.getsignal(n) for n in SIGNALS] == before
    then = fitted(checkpoint=tmp_path)
    assert losses(done) + losses(then) == losses(fitted())


def test_without_a_folder_it_ends_too() -> None:
    done = fitted(asked_at(4, signal.SIGINT))
    assert not done.is_done and done.step == 3


def test_asked_at_the_last_step_it_is_done(tmp_path: Path) -> None:
    """The metrics of the second step are read while the third, the last one, runs."""

    def log(row: Any) -> None:
        if row["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    done = fitted(steps=3, checkpoint=tmp_path, log=log)
    assert done.is_done and steps_in(tmp_path) == [done.step] == [3]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_feed_that_hangs_hears_it(number: signal.Signals, tmp_path: Path) -> None:
    """It waits in a queue; whoever sends the signal has the run's end in the time that it says."""

    def batches(i: int) -> Any:
        if i == 3:
            threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
            return queue.Queue[Any]().get()
        return batch_of(i)

    done = fitted(batches, checkpoint=tmp_path)
    assert not done.is_done and done.step == 3 and steps_in(tmp_path) == [3]


def test_a_feed_that_hangs_ends_the_run(tmp_path: Path) -> None:
    def batches(i: int) -> Any:
        time.sleep(60 if i == 3 else 0)
        return batch_of(i)

    with pytest.raises(BatchError, match=r"the batch of step 4\n.*\n.*\n.*the state is saved"):
        fitted(batches, checkpoint=tmp_path, batch_seconds=0.3)
    assert steps_in(tmp_path) == [3]


def test_a_feed_that_hangs_at_once(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="the batch of step 1"):
        fitted(lambda i: time.sleep(60), checkpoint=tmp_path, batch_seconds=0.3)
    fitted(steps=2, checkpoint=tmp_path)
    with pytest.raises(BatchError, match="the batch of step 3"):
        fitted(lambda i: time.sleep(60), checkpoint=tmp_path, batch_seconds=0.3)
    assert steps_in(tmp_path) == [2]


def test_a_vocabulary_that_has_gone_on_is_not_saved(tmp_path: Path) -> None:
    """The batch that did not come has taken keys: a step with them would be one that never was."""
    words = Vocabulary(8)

    def batches(i: int) -> Any:
        words.lookup([i])
        time.sleep(60 if i == 3 else 0)
        return batch_of(i)

    with pytest.raises(BatchError, match="the last step that was saved is there"):
        fitted(batches, checkpoint=tmp_path, save_every=2, batch_seconds=0.3)
    assert steps_in(tmp_path) == [2]
    assert Checkpoints(tmp_path).extra()["fit.vocabularies"][0]["keys"].tolist() == [0, 1]


def test_a_signal_that_comes_by_two_ways_is_one(tmp_path: Path) -> None:
    """From a scheduler, and from a launcher that it was sent to, too."""

    def batches(i: int) -> Any:
        if i == 3:
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM)
        return batch_of(i)

    assert fitted(batches, checkpoint=tmp_path).step == 3


def test_the_second_signal_ends_it_at_once() -> None:
    def batches(i: int) -> Any:
        if i == 3:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
        return batch_of(i)

    with pytest.raises(KeyboardInterrupt):
        fitted(batches)


def test_what_is_ignored_stays_so(tmp_path: Path) -> None:
    """A shell has background processes ignore Ctrl-C; a wait for a batch is interrupted all the same."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert fitted(asked_at(4, signal.SIGINT)).is_done
        with pytest.raises(BatchError):
            fitted(lambda i: time.sleep(60), batch_seconds=0.3)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_it_says_that_it_waits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(interrupt, "SAID_AGAIN_SECONDS", 0.1)

    def batches(i: int) -> Any:
        time.sleep(0.4 if i == 1 else 0)
        return batch_of(i)

    fitted(batches, steps=2)
    assert "step 2 has waited 0 s for its batch" in caplog.text


def test_another_thread_hears_no_signal(tmp_path: Path) -> None:
    """Python lets the main thread alone hear them."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(fitted(checkpoint=tmp_path)))
    thread.start()
    thread.join()
    assert found[0].is_done
