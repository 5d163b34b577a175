"""Runs that end and go on: asked to, killed, on more or fewer processes; the curve is one."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optax
import pytest

import sbp
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from tests.runtime.processes import cases
from tests.runtime.processes.test_two_processes import ROOT, launched

OPTIMIZER = optax.adam(1e-2)
STEPS = 12


def curve_of(kind: str, steps: int) -> list[float]:
    """The losses of one process, under another placement than that of the script."""
    program = sbp.compile(cases.step_of(cases.mlp, OPTIMIZER), sbp.placement("cpu", shape=(4, 2)))
    params: Any = cases.weights()
    if kind == "stages":
        whole = sbp.placement("cpu", shape=(4, 2), axes=("stage", "data"))
        program = sbp.compile(cases.step_of(cases.tower(whole.split("stage")), OPTIMIZER, 4), whole)
        params = {"w": [cases.arrays(w=(16, 16))["w"] for _ in range(4)]}
    done = sbp.fit(program, (params, OPTIMIZER.init(params)), cases.batch_of, steps=steps)
    return [row["loss"] for row in done.history]


@pytest.fixture(scope="module")
def curve() -> list[float]:
    return curve_of("data", STEPS)


def logged(folder: Path) -> dict[int, float]:
    """The losses of all runs on a folder; each step is there once."""
    with (folder / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {int(row["step"]): float(row["value"]) for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.full
def test_a_run_goes_on_with_another_number_of_processes(
    script: str, tmp_path: Path, curve: list[float]
) -> None:
    folder = tmp_path / "run"
    for steps, processes in ((5, 2), (9, 4), (STEPS, 1)):
        run = launched(script, str(folder), str(steps), "data", processes=processes)
        assert run.returncode == 0, run.stderr[-3000:]
        assert f"done {steps}" in run.stdout
    assert list(logged(folder).values()) == pytest.approx(curve, rel=1e-5)
    program = sbp.compile(cases.step_of(cases.mlp, OPTIMIZER), sbp.placement("cpu", shape=(2, 2)))
    params = cases.weights()
    found = sbp.fit(
        program, (params, OPTIMIZER.init(params)), cases.batch_of, steps=STEPS + 1, checkpoint=folder
    )
    assert [row["step"] for row in found.history] == [STEPS + 1]


@pytest.mark.full
def test_stages_on_two_processes_go_on_in_one(script: str, tmp_path: Path) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    for to, steps, processes in ((folder, 3, 2), (folder, 6, 1), (whole, 6, 1)):
        run = launched(script, str(to), str(steps), "stages", processes=processes)
        assert run.returncode == 0, run.stderr[-3000:]
    assert logged(folder) == pytest.approx(logged(whole), rel=1e-5)


def started(script: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    """A launch that goes on beside the test."""
    command = [sys.executable, "-m", "sbp", "launch", "--processes", "2", "--devices", "4"]
    command += [script, str(folder), str(STEPS), "data", "slow", *more]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(folder: Path, step: int) -> None:
    """Waits for a checkpoint."""
    while max(Checkpoints(folder).steps, default=0) < step:
        time.sleep(0.05)


@pytest.mark.full
def test_who_is_asked_to_end_saves_first(script: str, tmp_path: Path, curve: list[float]) -> None:
    folder = tmp_path / "run"
    run = started(script, folder)
    until(folder, 2)
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate()
    assert run.returncode == 0, err[-3000:]
    (said,) = [line for line in out.splitlines() if line.startswith("asked to end")]
    assert Checkpoints(folder).steps[-1] == int(said.split()[-1]) < STEPS
    then = launched(script, str(folder), str(STEPS), "data")
    assert then.returncode == 0, then.stderr[-3000:]
    assert list(logged(folder).values()) == pytest.approx(curve, rel=1e-5)


@pytest.mark.full
def test_a_run_that_lost_a_process_goes_on(script: str, tmp_path: Path, curve: list[float]) -> None:
    folder = tmp_path / "run"
    run = started(script, folder)
    until(folder, 2)
    members = subprocess.run(
        ["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    subprocess.run(["kill", "-9", members[1]], check=True)
    _, err = run.communicate()
    assert run.returncode == 1 and "process 1 of 2 was killed by SIGKILL" in err
    then = launched(script, str(folder), str(STEPS), "data", processes=4)
    assert then.returncode == 0, then.stderr[-3000:]
    assert list(logged(folder).values()) == pytest.approx(curve, rel=1e-5)
