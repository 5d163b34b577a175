"""Forks of a process that has used JAX: what would wait for ever is an error in words, all else works."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import S
from sbp.compat.forks import FORK, Fork, check_not_forked
from sbp.errors import KINDS, Problem, ProcessError
from sbp.runtime.processes import failure_propagation
from sbp.runtime.storage import lease
from tests.runtime.program import starting
from tests.runtime.program.starting import BATCH

SECONDS = 30.0
"""After which a fork hangs; none takes one."""
LINE = sbp.placement("cpu", shape=(8,))
X = np.arange(16, dtype=np.float32)
HANGS = "hangs"


@pytest.fixture(autouse=True)
def forks_are_wanted() -> Iterator[None]:
    """Python and JAX warn of each."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=RuntimeWarning)
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        yield


def in_fork(action: Callable[[], Any]) -> Any:
    """What an action gives in a fork of this process, or the error that it raises; `HANGS` if it does."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            found = action()
        except BaseException as e:
            found = e
        try:
            os.write(write, pickle.dumps(found))
        finally:
            os._exit(0)
    os.close(write)
    try:
        ready, _, _ = select.select([read], [], [], SECONDS)
        data = os.read(read, 1 << 20) if ready else b""
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
    return pickle.loads(data) if data else HANGS


class Made:
    """What a process has made before it forks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.double = sbp.compile(lambda x: x * 2, LINE, in_sbp=(S(0),))
        self.new = sbp.compile(lambda x: x * 3 + jnp.ones(16), LINE, in_sbp=(S(0),))
        self.step = sbp.compile(lambda w, x: (w + x.sum(), w.sum()), LINE)
        self.staged, self.weights = starting.staged(), starting.weights(4)
        self.staged(starting.weights(4), BATCH)
        self.out = self.double(X)
        self.double.save_executable(folder / "x.sbpx")
        self.loaded = sbp.load_executable(folder / "x.sbpx")
        self.double.plan(X).save(folder / "plan.json")
        self.runs = sbp.Checkpoints(folder / "runs")
        self.runs.save({"w": self.out}, step=1)
        self.runs.wait()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    found = Made(tmp_path_factory.mktemp("forks"))
    yield found
    found.runs.close()


REFUSED: dict[str, Callable[[Made], Any]] = {
    "a call": lambda m: m.double(X),
    "a call with what lies there": lambda m: m.double(m.out),
    "the first call": lambda m: m.new(X),
    "a program that was loaded": lambda m: m.loaded(X),
    "a pipeline": lambda m: m.staged(m.weights, BATCH),
    "place": lambda m: m.double.place(X),
    "report": lambda m: m.double.report(X),
    "profile": lambda m: m.double.profile(X),
    "verify": lambda m: sbp.verify(m.double, X),
    "to_host": lambda m: sbp.to_host(m.out),
    "save_executable": lambda m: m.double.save_executable(m.folder / "y.sbpx"),
    "load_executable": lambda m: sbp.load_executable(m.folder / "x.sbpx"),
    "save": lambda m: sbp.save(m.folder / "other", {"w": X}, step=1),
    "restore": lambda m: sbp.restore(m.folder / "runs", like={"w": X}),
    "Checkpoints.prepare": lambda m: sbp.Checkpoints(m.folder / "other").prepare(),
    "Checkpoints.save": lambda m: m.runs.save({"w": m.out}, step=2),
    "Checkpoints.save of NumPy's": lambda m: m.runs.save({"w": X}, step=2),
    "Checkpoints.check": lambda m: m.runs.check({"w": m.out}, step=2),
    "Checkpoints.baseline": lambda m: m.runs.baseline({"w": m.out}),
    "Checkpoints.restore": lambda m: m.runs.restore({"w": m.out}),
    "fit": lambda m: sbp.fit(m.step, (X,), [X], steps=1),
    "fit with a checkpoint": lambda m: sbp.fit(m.step, (X,), [X], steps=1, checkpoint=m.folder / "fit"),
}


@pytest.mark.parametrize("entry", REFUSED)
def test_what_takes_jax_is_refused_in_a_fork(entry: str, made: Made) -> None:
    found = in_fork(lambda: REFUSED[entry](made))
    assert isinstance(found, ProcessError), found
    assert f"forked from process {os.getpid()}, which had used JAX" in str(found)
    assert "would wait for them for ever" in str(found)
    assert 'multiprocessing.get_context("spawn")' in str(found)


WORKS: dict[str, Callable[[Made], Any]] = {
    "a plan that is known": lambda m: str(m.double.plan(X)),
    "a plan": lambda m: len(str(sbp.compile(lambda x: x @ x.T, LINE).plan(np.ones((8, 8), np.float32)))),
    "a search": lambda m: str(sbp.search(lambda x: x * 2, devices=8, kind="h100")(X).best),
    "source": lambda m: str(m.double.source(X)),
    "lowering": lambda m: len(m.double.lower(X).as_text()),
    "load_plan": lambda m: str(sbp.load_plan(m.folder / "plan.json")),
    "steps": lambda m: m.runs.steps,
    "what was saved beside a state": lambda m: m.runs.extra(1),
    "NumPy": lambda m: float((X @ X).sum()),
}


@pytest.mark.parametrize("entry", WORKS)
def test_what_takes_no_device_works_in_a_fork(entry: str, made: Made) -> None:
    assert in_fork(lambda: WORKS[entry](made)) == WORKS[entry](made)


def _rows(i: int) -> Any:
    return np.full(16, i, np.float32)


def test_the_workers_of_a_feed_may_be_forks(made: Made) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        outs = [made.double(x).sum() for x in pool.imap(_rows, range(4))]
    assert [float(x) for x in outs] == [0, 32, 64, 96]


def _refused(_: int) -> Any:
    raise ProcessError(Problem("process", "here", "got", "legal", "why", "fix"))


def test_an_error_of_a_worker_comes_to_its_parent() -> None:
    """A pool waits for ever for the result of an error that cannot be unpickled."""
    fork = multiprocessing.get_context("fork")
    with fork.Pool(1) as pool, pytest.raises(ProcessError, match="here") as e:
        pool.map_async(_refused, range(2)).get(SECONDS)
    assert e.value.problems[0].fix == "fix"
    for kind in KINDS.values():
        error = kind(e.value.problems[0], *e.value.problems)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), again.problems, str(again)) == (kind, error.problems, str(error))


def test_a_fork_of_a_fork_is_one_too(made: Made) -> None:
    found = in_fork(lambda: in_fork(lambda: made.double(X)))
    assert isinstance(found, ProcessError) and f"forked from process {os.getpid()}, which" in str(found)


def test_this_process_is_none(made: Made) -> None:
    in_fork(lambda: None)
    assert FORK.parent is None
    check_not_forked("anything")
    np.testing.assert_array_equal(made.double(X), X * 2)


BEFORE = """
import os, sys
import sbp, jax, numpy as np
if os.fork() == 0:
    double = sbp.compile(lambda x: x * 2, sbp.placement("cpu", shape=(1,)))
    print(float(double(np.ones(4, np.float32)).sum()), flush=True)
    os._exit(0)
os.wait()
"""


def test_a_fork_before_jax_is_used_may_use_it() -> None:
    run = [sys.executable, "-W", "ignore", "-c", BEFORE]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.stdout == "8.0\n", done.stderr[-2000:]


def test_who_has_joined_others_has_used_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device: the threads of the coordination service are not in a fork either."""
    from jax._src import distributed, xla_bridge

    monkeypatch.setattr(xla_bridge, "_backends", {})
    fork = Fork()
    fork.note()
    assert fork.parent is None
    monkeypatch.setattr(distributed.global_state, "client", object())
    fork.note()
    assert fork.parent == os.getppid()


# -- what a fork must leave alone


def test_a_fork_does_not_release_the_lease_of_its_parent(tmp_path: Path) -> None:
    runs = sbp.Checkpoints(tmp_path)
    runs.prepare()
    held = runs._lease
    assert held is not None
    for end in (runs.close, lease._holdings().release_all, held.release, runs.__exit__):
        assert in_fork(end) is None
    held.check()
    last = lease._last(runs.path)
    assert last is not None and not last[1].is_released
    runs.close()
    last = lease._last(runs.path)
    assert last is not None and last[1].is_released


def test_a_fork_does_not_wait_for_a_save_of_its_parent(tmp_path: Path) -> None:
    gate = threading.Event()
    runs = sbp.Checkpoints(tmp_path)
    runs.save({"w": X}, step=1)
    assert runs._pending is not None
    pending, thread = runs._pending, runs._pending._thread
    pending._thread = threading.Thread(target=gate.wait)
    pending._thread.start()
    assert in_fork(runs.wait) is None
    assert in_fork(runs.close) is None
    gate.set()
    pending._thread.join()
    pending._thread = thread
    runs.close()
    assert runs.steps == [1]


def test_the_end_of_a_fork_tells_the_other_processes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no member of the program, and would wait for the board."""
    ends, hooks = list[Any](), list[Any]()
    monkeypatch.setattr(failure_propagation, "_listen", lambda *_: None)
    monkeypatch.setattr("atexit.register", ends.append)
    monkeypatch.setattr(sys, "excepthook", lambda *args: hooks.append(args))
    kv_store: Any = object()  # whoever touches it raises
    silence: Any = SimpleNamespace(watch=lambda _: ())
    failure_propagation.watch(kv_store, 0, silence)
    monkeypatch.setattr(FORK, "parent", 1)
    (end,) = ends
    end()
    error = ValueError("of a fork")
    sys.excepthook(ValueError, error, None)
    assert hooks == [(ValueError, error, None)]
    monkeypatch.setattr(FORK, "parent", None)
    with pytest.raises(AttributeError):
        end()
