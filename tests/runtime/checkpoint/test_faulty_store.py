"""A store that fails, is slow, or lists late: an error in words, or the step is there whole, and no other."""

from __future__ import annotations

import functools
import itertools
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbp.errors import CheckpointError
from sbp.runtime.checkpoint import steps
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.storage import files, lease
from tests.runtime.checkpoint import emulators

KEEP = 3
# What orbax was doing when an operation failed is dropped with its loop of asyncio, which says so when it is
# collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if missing := emulators.missing("s3"):
        pytest.skip(f"the emulator of s3:// needs {missing}")
    folder = tmp_path_factory.mktemp("emulator")
    with emulators.running("s3", folder) as environment, pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        yield f"s3://{emulators.BUCKET}"
        faulty().forget()


@functools.cache
def faulty() -> Any:
    """The store: imported when its packages are known to be there."""
    from tests.runtime.checkpoint import faulty_store

    return faulty_store


def state_of(serial: int) -> dict[str, Any]:
    return {"w": np.full((8, 3), serial), "v": np.full(5, -serial)}


def serial_of(runs: Checkpoints, step: int | None = None) -> int:
    found = runs.restore(state_of(0), step)
    (serial,) = {*map(int, found["w"].flat), *(-int(x) for x in found["v"])}
    return serial


class History:
    """What is done to a folder, and what must be there.

    Arguments:
      url: of the folder.
      seed: of what is done.
    """

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.chance = url, random.Random(seed)
        self.runs = Checkpoints(url, keep=KEEP)
        self.counted, self.tried = dict[int, int](), dict[int, int]()
        self.serials, self.step = itertools.count(1), 0
        self.said = list[str]()

    def save(self) -> None:
        self.step += 1
        serial = next(self.serials)
        self.tried[self.step] = serial
        self.runs.save(state_of(serial), self.step, extra={"serial": serial})
        self.runs.wait()
        self.counted[self.step] = serial
        self.counted = {s: x for s, x in self.counted.items() if s in sorted(self.counted)[-KEEP:]}

    def restore(self) -> None:
        there = self.runs.steps
        if there:
            assert serial_of(self.runs, there[-1]) == self.tried[there[-1]]
            assert self.runs.extra(there[-1]) == {"serial": self.tried[there[-1]]}

    def go_back(self) -> None:
        """To the oldest step that stays; what is newer is set aside by the next save."""
        if len(self.counted) == KEEP:
            self.step = min(self.counted)
            assert serial_of(self.runs, self.step) == self.counted[self.step]
            self.counted = {self.step: self.counted[self.step]}
            self.save()

    def reopen(self) -> None:
        self.runs.close()
        self.runs = Checkpoints(self.url, keep=KEEP)
        self.runs.prepare()
        self.restore()

    def tries(self, *actions: Any) -> None:
        """One of these, which may fail in words."""
        action = self.chance.choice(actions)
        try:
            action()
        except CheckpointError as e:
            self.said.append(f"{action.__name__}: {e.problems[0].got}")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LOOK_SECONDS", 0.05)


def test_nothing_is_lost_where_listings_come_late_and_all_is_slow(
    bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What was written just now is not listed: no step is missed, swept or saved over for that."""
    with (
        faulty().weather(late_seconds=1.1, slow_seconds=0.01),
        caplog.at_level(logging.WARNING, "sbp"),
    ):
        history = History(f"{bucket}/late", 0)
        for action in (history.save, history.reopen, *[history.save] * 2, history.reopen, history.go_back):
            action()
            assert history.runs.steps == sorted(history.counted)
        history.reopen()
        for step, serial in history.counted.items():
            assert serial_of(history.runs, step) == serial
        assert history.runs.abandoned_steps == [2, 3]
        history.runs.close()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(i, marks=pytest.mark.slow) for i in range(2, 30))])
def test_a_store_that_fails_now_and_then_loses_nothing(seed: int, bucket: str) -> None:
    """An operation fails before it is done, or when it is done; the libraries' own tries are used up."""
    with faulty().weather(failing=0.02, seed=seed) as weather:
        history = History(f"{bucket}/failing{seed}", seed)
        for _ in range(12):
            history.tries(history.save, history.save, history.restore, history.reopen)
        assert weather.failed > 0
        weather.failing = 0.0
        last = Checkpoints(history.url, keep=KEEP)
        there = last.steps
        assert {s for s in history.counted if s > history.step - KEEP} <= {*there}
        for step in there:
            assert (
                serial_of(last, step) == history.tried[step]
                and last.extra(step)["serial"] == history.tried[step]
            )
        history.runs.close()
        history.runs = last
        history.save()  # and it goes on
        assert (
            last.steps == sorted({*there, history.step})[-KEEP:]
            and serial_of(last) == history.tried[history.step]
        )
        last.close()
    print(weather.failed, "failures;", *history.said, sep="\n  ")


def test_the_library_does_not_wait_for_what_will_not_come(bucket: str, tmp_path: Path) -> None:
    """A store that is gone: an error in words at once."""
    with faulty().weather() as weather:
        runs = Checkpoints(f"{bucket}/gone", keep=KEEP)
        runs.save(state_of(1), 1)
        runs.wait()
        weather.failing = 1.0
        for action in (
            lambda: runs.steps,
            lambda: runs.abandoned_steps,
            lambda: runs.extra(),
            lambda: runs.restore(state_of(0)),
            lambda: runs.save(state_of(2), 2),
        ):
            with pytest.raises(CheckpointError, match="does not answer"):
                action()
        weather.failing = 0.0
        assert serial_of(runs) == 1
        runs.close()


def test_a_sweep_that_is_told_of_no_manifest_deletes_no_arrays_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifests that were written just now are not listed yet: of a step, and of one that was set aside."""
    with Checkpoints(tmp_path) as runs:
        for step in (1, 2, 3):
            runs.save(state_of(step), step)
        runs.wait()
        runs.restore(state_of(0), 2)
        runs.save(state_of(4), 4)
        runs.wait()
        names, before = files.names, sorted(tmp_path.rglob("*"))
        monkeypatch.setattr(
            files, "names", lambda at: [x for x in names(at) if not x.startswith("sbp_manifest")]
        )
        steps.sweep(runs.path)
        monkeypatch.undo()
        assert sorted(tmp_path.rglob("*")) == before and runs.abandoned_steps == [3]


def test_the_last_lease_is_found_where_the_newest_are_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody sees the last two of them, neither who looks for the last one nor who deletes old ones."""
    folder, names = files.folder_path(tmp_path), files.names
    monkeypatch.setattr(files, "names", lambda at: names(at)[:-2])
    for number in range(1, 8):
        lease.give_up(lease.acquire(folder))
        assert lease._last(folder)[0] == number  # type: ignore[index]
    assert len(names(folder)) == 3
