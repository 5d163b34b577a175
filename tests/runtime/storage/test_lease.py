"""One job writes into a folder; another one waits, is refused, or takes over what a dead one has left."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from etils import epath

from sbp.errors import CheckpointError, LeaseError
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.storage import files, lease
from sbp.runtime.storage.lease import Holder, acquire, give_up, own_holder

STATE = {"w": jnp.ones(2)}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of these tests for the minutes of a cluster."""
    monkeypatch.setattr(lease, "WAIT_SECONDS", 0.5)
    monkeypatch.setattr(lease, "DEAD_SECONDS", 0.25)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lease, "LOOK_SECONDS", 0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    return epath.Path(tmp_path)


def held(folder: Any, **changes: Any) -> Holder:
    """The lease of somebody else, who lives on another host unless it is said otherwise."""
    elsewhere = {"host": "other", "boot": "another boot", "pid": 1}
    other = replace(own_holder(folder, None), **{**elsewhere, **changes})
    files.create(folder / "sbp_lease-000001.json", json.dumps(asdict(other)).encode())
    return other


def beating(folder: Any, holder: Holder, done: threading.Event) -> threading.Thread:
    def beat() -> None:
        count = 0
        while not done.wait(0.05):
            count += 1
            text = json.dumps(asdict(replace(holder, beat=count))).encode()
            files.replace(folder / "sbp_lease-000001.json", text)

    thread = threading.Thread(target=beat)
    thread.start()
    return thread


def ended_process() -> tuple[int, str]:
    """The number of a process that is no more."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid, "1"


DEAD = {
    "was released": {"is_released": True},
    "process has ended": "ended",
    "same number, other process": {"boot": lease._boot(), "pid": os.getpid(), "started": "1"},
    "same job on another host": {"job": "17"},
    "silent": {},
}


@pytest.mark.parametrize("name", DEAD)
def test_a_dead_one_is_taken_over(name: str, folder: Any, caplog: pytest.LogCaptureFixture) -> None:
    changes = DEAD[name]
    if changes == "ended":
        pid, started = ended_process()
        other = replace(own_holder(folder, None), pid=pid, started=started)
        files.create(folder / "sbp_lease-000001.json", json.dumps(asdict(other)).encode())
    else:
        held(folder, **changes)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "sbp"):
        taken = acquire(folder, "17")
    try:
        assert taken.number == 2
        taken.check()
        is_said = "is taken over from" in caplog.text
        assert is_said == (name != "was released")
    finally:
        give_up(taken)


def test_one_that_lives_is_waited_for_and_then_refused(folder: Any, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    thread = beating(folder, held(folder), done)
    with (
        caplog.at_level(logging.WARNING, "sbp"),
        pytest.raises(CheckpointError, match="held by process 1 on other"),
    ):
        acquire(folder)
    assert "waiting up to" in caplog.text
    done.set()
    thread.join()


def test_one_that_ends_meanwhile_lets_the_next_in(folder: Any) -> None:
    done, other = threading.Event(), held(folder)
    thread = beating(folder, other, done)
    threading.Timer(0.2, done.set).start()
    taken = acquire(folder)
    thread.join()
    assert taken.number == 2
    give_up(taken)


def test_a_living_process_of_this_host_is_not_dead_for_its_silence_alone(folder: Any) -> None:
    """Nor for the name of its job: two runs of one job are two runs."""
    other = own_holder(folder, "17")
    assert not lease.is_gone(other)
    assert lease._why_it_may(other, own_holder(folder, "17"), 0.0) is None
    assert lease.is_gone(replace(other, started="1"))
    assert not lease.is_gone(replace(other, boot="another boot", started="1"))


def test_what_a_storage_that_failed_has_left_is_no_other_owner(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is made, then the storage fails: the next try of this process does not wait for itself."""
    names = files.names

    def failing(_: Any) -> list[str]:
        if files.exists(folder / "sbp_lease-000001.json"):
            raise OSError("the storage does not answer")
        return []

    monkeypatch.setattr(files, "names", failing)
    with pytest.raises(OSError, match="does not answer"):
        acquire(folder)
    monkeypatch.setattr(files, "names", names)
    monkeypatch.setattr(lease, "DEAD_SECONDS", 1000)
    taken = acquire(folder)
    assert taken.number == 2
    with pytest.raises(LeaseError):
        lease._taken(folder, own_holder(folder, None), {taken.holder.token})
    give_up(taken)


def test_a_copy_of_a_folder_is_free(folder: Any, tmp_path: Path) -> None:
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    mine = acquire(folder / "a")
    for name in files.names(folder / "a"):
        files.replace(folder / "b" / name, files.read(folder / "a" / name))
    other = own_holder(folder / "b", None)
    assert lease._why_it_may(mine.holder, other, 0.0) == "this folder is a copy of that one's"
    give_up(mine)


def test_what_is_no_lease_is_taken_over_when_nobody_writes_it_again(folder: Any) -> None:
    for text in (b"", b"[]", b"{}", b"[" * 100_000):
        files.replace(folder / "sbp_lease-000003.json", text)
        taken = acquire(folder)
        assert taken.number == 4
        give_up(taken)
        files.remove(folder / "sbp_lease-000004.json")


def test_it_is_renewed_released_and_shared(folder: Any) -> None:
    one, two = acquire(folder), acquire(folder)
    assert one is two and one.users == 2
    before = one.holder.beat
    end = threading.Event()
    for _ in range(100):
        if one.holder.beat > before + 1:
            break
        end.wait(0.05)
    assert one.holder.beat > before + 1
    give_up(one)
    assert not lease._last(folder)[1].is_released  # type: ignore[index]
    give_up(two)
    assert lease._last(folder)[1].is_released  # type: ignore[index]


def test_who_lost_it_finishes_no_step(folder: Any) -> None:
    runs = Checkpoints(folder)
    runs.save(STATE, step=1)
    runs.wait()
    number = lease._last(folder)[0] + 1  # type: ignore[index]
    other = replace(own_holder(folder, None), token="other", host="other", boot="x")
    files.create(folder / f"sbp_lease-{number:06d}.json", json.dumps(asdict(other)).encode())
    with pytest.raises(CheckpointError, match="taken over by process"):
        runs.save(STATE, step=2)
        runs.wait()
    assert runs.steps == [1]
    assert [p.name for p in Path(folder).glob("step_*")] == ["step_00000001"]


def test_one_process_has_a_folder_once_by_whatever_links_it_comes(folder: Any) -> None:
    """It would wait for itself, and be refused."""
    Path(folder / "run").mkdir()
    Path(folder / "link").symlink_to(folder / "run")
    with Checkpoints(folder / "run") as one, Checkpoints(folder / "link") as two:
        one.save(STATE, step=1)
        one.wait()
        two.save(STATE, step=2)
        two.wait()
        assert one.steps == two.steps == [1, 2]
        one.close()
        two.save(STATE, step=3)


def test_of_many_at_once_one_has_each_number(folder: Any) -> None:
    """Fifty rounds of four that find the same dead owner."""
    for _ in range(50):
        found, barrier = list[Any](), threading.Barrier(4)

        def take(found: list[Any] = found, barrier: threading.Barrier = barrier) -> None:
            number = (lease._last(folder) or (0, None))[0] + 1
            barrier.wait()
            found.append(lease._created(folder, number, own_holder(folder, None)))

        threads = [threading.Thread(target=take) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert sum(x is not None for x in found) == 1
    assert len([n for n in os.listdir(folder) if n.startswith("sbp_lease")]) <= 2


def test_a_storage_without_exclusive_creation_is_said(
    folder: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "is_exclusive", lambda path, data: False)
    with caplog.at_level(logging.WARNING, "sbp"):
        taken = acquire(folder)
    assert "no exclusive creation of files" in caplog.text
    give_up(taken)
