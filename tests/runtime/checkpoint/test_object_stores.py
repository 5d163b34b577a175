"""Checkpoints in object stores, by their emulators: saved, killed, restored, pruned; others' stays."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from etils import epath

import sbp
from sbp.errors import CheckpointError, DamagedCheckpointError
from sbp.runtime.checkpoint import steps
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.storage import files, lease, libraries, object_store
from sbp.runtime.storage.lease import own_holder
from tests.runtime.checkpoint import emulators, killed_saver

STORES = ("s3", "gs")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[str, str]]]:
    """Starts the emulators that are asked for, and has clients of this process use them."""
    folder, started = tmp_path_factory.mktemp("emulators"), dict[str, dict[str, str]]()
    contexts = list[Any]()
    with pytest.MonkeyPatch.context() as patch:

        def start(name: str) -> dict[str, str]:
            if missing := emulators.missing(name):
                pytest.skip(f"the emulator of {name}:// needs {missing}")
            if name not in started:
                contexts.append(emulators.running(name, folder))
                started[name] = contexts[-1].__enter__()
                for key, value in started[name].items():
                    patch.setenv(key, value)
            return started[name]

        yield start
        for context in contexts:
            context.__exit__(None, None, None)


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, stores: Callable[[str], Any]) -> str:
    """A folder of this test's own in an object store, with spaces and the like in its name."""
    stores(request.param)
    test = request.node.originalname.removeprefix("test_")
    return f"{request.param}://{emulators.BUCKET}/a test/{test[:30]} ü%41"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of these tests for the minutes of a cluster."""
    monkeypatch.setattr(lease, "WAIT_SECONDS", 0.6)
    monkeypatch.setattr(lease, "DEAD_SECONDS", 0.4)
    monkeypatch.setattr(lease, "LOOK_SECONDS", 0.05)


def state_of(value: float) -> dict[str, Any]:
    return {"w": jnp.full(3, float(value)), "v": jnp.full((4, 2), -float(value))}


def value_of(runs: Checkpoints, step: int | None = None) -> float:
    found = runs.restore(state_of(0), step)
    assert {*map(float, found["w"])} == {-float(found["v"][0, 0])} == {-float(found["v"][3, 1])}
    return float(found["w"][0])


def saved(runs: Checkpoints, *numbers: int) -> None:
    for step in numbers:
        runs.save(state_of(step), step=step, extra={"step": step})
    runs.wait()


def keys(url: str) -> set[str]:
    """All objects below a folder."""
    return {*object_store.sizes(epath.Path(url))}


def test_a_run_with_pruning_going_back_and_what_is_not_its_own(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = epath.Path(url)
    foreign = {
        "step_00000001/notes",
        "step_00000003/notes",
        "step_x/a",
        "sbp_lease-x",
        "run2/step_00000001/b",
    }
    for name in foreign:
        files.replace(folder / name, name.encode())
    beside = folder.parent / f"{folder.name}2" / "x"
    files.replace(beside, b"beside")
    with caplog.at_level(logging.WARNING, "sbp"), Checkpoints(url, keep=2) as runs:
        with pytest.raises(CheckpointError, match="a folder that this library has not written"):
            saved(runs, 1)
        saved(runs, 2, 4, 6)
        assert runs.steps == [4, 6] and value_of(runs, 4) == 4 and runs.extra(6) == {"step": 6}
        saved(runs, 5)
        assert runs.steps == [4, 5] and runs.abandoned_steps == [6]
    assert "no exclusive creation" not in caplog.text
    with Checkpoints(url, keep=2) as again:
        saved(again, 7)
        assert again.steps == [5, 7] and value_of(again) == 7
        again.restore(state_of(0), 5)
        saved(again, 8)
        assert again.abandoned_steps == [6, 7]
    left = keys(url)
    assert foreign <= left and files.read(beside) == b"beside"
    assert {x.split("/")[0] for x in left if x.startswith("step_0")} == {
        *(f"step_{s:08d}" for s in (1, 3, 5, 6, 7, 8))
    }
    assert not {x for x in left if x.startswith((".sbp", "step_00000003")) and x not in foreign}


def test_a_second_saver_is_refused_while_the_first_one_lives(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, done = epath.Path(url), threading.Event()
    other = replace(own_holder(folder, None), host="other", boot="another boot", pid=1)
    path = folder / "sbp_lease-000001.json"

    def beat() -> None:
        count = 0
        while not done.wait(0.1):
            count += 1
            files.replace(path, json.dumps(asdict(replace(other, beat=count))).encode())

    files.create(path, json.dumps(asdict(other)).encode())
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="held by process 1 on other"):
            Checkpoints(url).prepare()
    finally:
        done.set()
        thread.join()
    with caplog.at_level(logging.WARNING, "sbp"), Checkpoints(url) as runs:
        saved(runs, 1)
    assert "is taken over from process 1 on other" in caplog.text
    assert runs.steps == [1] and lease._last(folder)[1].is_released  # type: ignore[index]


def test_what_was_changed_is_seen(url: str) -> None:
    with Checkpoints(url) as runs:
        saved(runs, 2, 3, 4)
        whole = files.read(runs.path / "step_00000004" / steps.MANIFEST)
        for damage in (b"", whole[: len(whole) // 2], whole.replace(b'"step": 4', b'"step": 5')):
            files.replace(runs.path / "step_00000004" / steps.MANIFEST, damage)
            with pytest.raises(DamagedCheckpointError, match=r"step=3\)"):
                value_of(runs, 4)
            assert value_of(runs) == 3
        arrays = {k: n for k, n in object_store.sizes(runs.path / "step_00000003").items() if "/d/" in k}
        large = runs.path / "step_00000003" / max(arrays, key=arrays.__getitem__)
        data = bytearray(files.read(large))
        data[len(data) // 2] ^= 1
        files.replace(large, bytes(data))
        with pytest.raises(DamagedCheckpointError):
            value_of(runs, 3)
        files.remove(large)
        with pytest.raises(DamagedCheckpointError, match="is missing"):
            value_of(runs, 3)
        assert value_of(runs, 2) == 2


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_one_of_many_creates_an_object(kind: str, stores: Callable[[str], Any]) -> None:
    stores(kind)
    folder = epath.Path(f"{kind}://{emulators.BUCKET}/created")
    for round_ in range(3):
        found, barrier = dict[int, str](), threading.Barrier(8)

        def make(i: int, path: Any = folder / str(round_), found: Any = found, at: Any = barrier) -> None:
            at.wait()
            try:
                files.create(path, b"%d" % i)
                found[i] = "made"
            except FileExistsError:
                found[i] = "there"

        threads = [threading.Thread(target=make, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        (winner,) = [i for i, said in found.items() if said == "made"]
        assert len(found) == 8 and files.read(folder / str(round_)) == b"%d" % winner


def test_an_answer_that_is_lost_is_not_taken_for_another_writer(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients try again: the second try finds what the first one has put. Others say another error for it."""
    path = epath.Path(url) / "x"
    put = object_store._put

    def lost(error: Exception) -> Callable[..., None]:
        def lossy(at: Any, data: bytes, **how: str) -> None:
            put(at, data, **how)
            raise error

        return lossy

    for error in (FileExistsError("412"), ConnectionError("reset"), OSError(22, "precondition")):
        monkeypatch.setattr(object_store, "_put", lost(error))
        files.create(path, b"mine")
        assert files.read(path) == b"mine"
        monkeypatch.setattr(object_store, "exists", lambda _: False)  # made in between
        with pytest.raises(FileExistsError):
            files.create(path, b"another's")
        monkeypatch.undo()
        assert files.read(path) == b"mine"
        files.remove(path)


def test_a_store_that_knows_no_conditions_is_used_with_a_warning(
    stores: Callable[[str], Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that refuses the condition, by whatever error of the kind."""
    stores("s3")
    put = object_store._put
    refusals = (OSError(38, "not implemented"), NotImplementedError(), TypeError("mode"), ValueError("mode"))
    for i, error in enumerate(refusals):

        def refusing(at: Any, data: bytes, error: Exception = error, **how: str) -> None:
            if how:
                raise error
            put(at, data)

        monkeypatch.setattr(object_store, "_put", refusing)
        caplog.clear()
        folder = epath.Path(f"s3://{emulators.BUCKET}/refusing/{i}")
        with caplog.at_level(logging.WARNING, "sbp"):
            taken = lease.acquire(folder)
        assert "no exclusive creation of files" in caplog.text and not taken.is_exclusive
        with pytest.raises(FileExistsError):
            files.create(lease._path(folder, 1), b"x")
        lease.give_up(taken)


UNCONDITIONAL = """
import logging, sys, sbp, numpy as np
logging.basicConfig(format="%(message)s")
with sbp.Checkpoints(sys.argv[1]) as runs:
    runs.save({"w": np.arange(3.0)}, 1)
    runs.wait()
    try:
        sbp.Checkpoints(sys.argv[1] + "2").prepare()  # released when Python ends
        print(runs.restore({"w": np.zeros(3)})["w"].tolist())
        runs.save({"w": np.zeros(3)}, 1)
    except sbp.SbpError as e:
        print(e.problems[0].got)
"""


def test_a_store_that_forgets_conditions_is_found_out(tmp_path: Path) -> None:
    """The emulator of Google's store is one as it stands: of two puts where nothing may be both succeed."""
    if missing := emulators.missing("gs-unconditional"):
        pytest.skip(f"the emulator needs {missing}")
    with emulators.running("gs-unconditional", tmp_path) as environment:
        command = [sys.executable, "-c", UNCONDITIONAL, f"gs://{emulators.BUCKET}/run"]
        run = subprocess.run(
            command,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        at = f"{environment['STORAGE_EMULATOR_HOST']}/download/storage/v1/b/{emulators.BUCKET}/o"
        with urllib.request.urlopen(f"{at}/run2%2Fsbp_lease-000001.json?alt=media") as answer:
            assert json.load(answer)["is_released"]  # by the end of Python
    assert "no exclusive creation of files" in run.stderr and "Traceback" not in run.stderr, run.stderr
    assert run.stdout.splitlines() == ["[0.0, 1.0, 2.0]", "a step that is there already"]


def test_what_is_not_there_is_said_in_words(
    stores: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in STORES:
        stores(kind)
        with pytest.raises(CheckpointError, match="no bucket elsewhere") as said:
            Checkpoints(f"{kind}://elsewhere/run").prepare()
        assert said.value.problems[0].why == "buckets are made by who pays for them, with a region and rights"
        with pytest.raises(CheckpointError, match="no complete step"):
            sbp.restore(f"{kind}://{emulators.BUCKET}/nothing", like=state_of(0))
    monkeypatch.setattr(libraries, "_write_arrays_to_s3", lambda _: False)
    with pytest.raises(CheckpointError, match="this version of orbax-checkpoint does not write arrays there"):
        Checkpoints("s3://bucket/run")


# -- killed


def killed(url: str, environment: dict[str, str], kills: int, seed: int) -> list[int]:
    """Kills savers in two processes at random moments; the last step that each one had said to count.

    The next one goes on from it, or from one that counted and could not be said any more.
    """
    chance, last, said = random.Random(seed), 0, list[int]()
    command = [sys.executable, "-m", "sbp", "launch", "--processes", "2", "--devices", "2"]
    for _ in range(kills):
        run = subprocess.Popen(
            [*command, "-m", "tests.runtime.checkpoint.killed_saver", url],
            cwd=emulators.ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert run.stdout is not None
        output, wanted, began = list[str](), chance.randint(1, 3), -1
        for line in run.stdout:
            output.append(line)
            if line.startswith("restored"):
                began = last = _checked(int(line.split()[1]), last)
            if line.startswith("done"):
                last = int(line.split()[1])
                if last >= began + wanted:
                    time.sleep(chance.uniform(0, 0.8))
                    break
        for pid in _family(run.pid):
            os.kill(pid, signal.SIGKILL)
        rest = run.communicate()[0]
        assert began >= 0 and last >= began + wanted, "".join(output)[-3000:]
        last = max([last, *(int(x.split()[1]) for x in rest.splitlines() if x.startswith("done"))])
        said.append(last)
    return said


def _checked(restored: int, last: int) -> int:
    assert restored in (last, last + 1), (restored, last)
    return restored


def _family(pid: int) -> list[int]:
    """A process and those that it has started, which are in sessions of their own."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("s3", 2),
        ("gs", 1),
        pytest.param("s3", 10, marks=pytest.mark.slow),
        pytest.param("gs", 10, marks=pytest.mark.slow),
    ],
)
def test_killed_while_saving(kind: str, kills: int, stores: Callable[[str], dict[str, str]]) -> None:
    """By two processes with two devices each; it comes back on eight devices, and on one, bit for bit."""
    url = f"{kind}://{emulators.BUCKET}/killed {kills}/run"
    environment = stores(kind)
    last = killed(url, environment, kills, seed=kills)[-1]
    with Checkpoints(url, keep=2, job="killed") as runs:
        step = _checked(runs.steps[-1], last)
        for devices in (8, 1):
            assert not killed_saver.differs(runs.restore(killed_saver.laid(0, devices)), step)
        runs.save(killed_saver.laid(step + 1, 8), step + 1)
        runs.wait()
        assert not killed_saver.differs(runs.restore(killed_saver.laid(0, 1)), step + 1)
        assert len(runs.steps) == 2
        left = {x.split("/")[0] for x in keys(url) if x.startswith("step_")}
    assert left == {f"step_{s:08d}" for s in runs.steps}
