"""The models' commands in several processes, killed, and resumed otherwise: the losses of one device."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from models import deepfm, gpt
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from tests.runtime.processes.test_two_processes import ROOT, launched

SMALL = "--layers 2 --width 32 --heads 4 --seq 8 --batch 8 --sample 0 --save-every 2 --resume".split()
OTHERWISE = {
    "zero, 4 processes": (4, "--parallel zero --placement cpu:8"),
    "stages, 2 processes": (2, "--stages 2 --parallel tensor --placement cpu:2x4"),
    "fewer devices, 2 processes": (2, "--parallel 2d --placement cpu:2x2"),
}


def until(folder: Path, step: int, run: subprocess.Popen[str]) -> None:
    while max(Checkpoints(folder).steps, default=0) < step:
        assert run.poll() is None, run.communicate()[1][-3000:]
        time.sleep(0.05)


def killed(out: Path) -> int:
    """A GPT on two processes, of which one is killed; the last step that was saved."""
    command = [sys.executable, "-m", "sbp", "launch", "--processes", "2", "--devices", "4"]
    command += ["-m", "models.gpt", *SMALL, "--steps", "5000", "--parallel", "data", "--out", str(out)]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(out / "checkpoint", 4, run)
    pids = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=True).stdout
    subprocess.run(["kill", "-9", pids.split()[1]], check=True)
    assert "process 1 of 2 was killed by SIGKILL" in run.communicate()[1]
    return Checkpoints(out / "checkpoint").steps[-1]


@pytest.mark.full
def test_a_gpt_that_was_killed_goes_on_in_one_process(tmp_path: Path) -> None:
    at = killed(tmp_path)
    more = f"--steps {at + 4} --parallel 2d --placement cpu:2x4 --out {tmp_path}".split()
    found = gpt.main([*SMALL, *more])
    assert found.first == at and len(found.losses) == 4
    assert found.difference is not None and found.difference.losses < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("how", OTHERWISE)
def test_and_in_several(how: str, tmp_path: Path) -> None:
    processes, options = OTHERWISE[how]
    at = killed(tmp_path)
    more = f"--steps {at + 4} {options} --out {tmp_path}".split()
    run = launched("-m", "models.gpt", *SMALL, *more, processes=processes)
    assert run.returncode == 0, run.stderr[-3000:]
    found = re.search(r"largest difference to one device: losses (\S+)", run.stdout)
    assert found is not None and float(found[1]) < 1e-5
    assert f"steps {at + 1} to {at + 4}: loss" in run.stdout


def losses_in(out: Path) -> list[float]:
    """The losses of all runs on a folder, one for each step."""
    rows = [line.split(",") for line in (out / "metrics.csv").read_text().splitlines()[1:]]
    assert [int(step) for step, _, _ in rows] == [*range(1, len(rows) + 1)]
    return [float(value) for _, _, value in rows]


@pytest.mark.slow
def test_a_recommender_of_two_processes_goes_on_in_one(tmp_path: Path) -> None:
    """Its clicks come by threads in each process; scores come to all; tables lie by columns afterwards."""
    small = "--batch 24 --samples 144 --held-out 48 --rows 30 --width 8 --resume --check --baseline".split()
    out = tmp_path / "run"
    run = launched("-m", "models.deepfm", *small, "--steps", "4", "--out", str(out))
    assert run.returncode == 0, run.stderr[-3000:]
    found = re.search(r"largest difference to one device in 4 steps of 64 bits: losses (\S+)", run.stdout)
    assert found is not None and float(found[1]) < 1e-13
    assert run.stdout.count("samples/s") == run.stdout.count("\nstage ") * 2 + 3  # each table from process 0

    one = deepfm.main([*small[:-2], "--steps", "4", "--out", str(out)])
    assert (one.first, one.losses) == (4, [])
    said = re.search(r"^DeepFM +(\S+) +(\S+)$", run.stdout, re.MULTILINE)
    assert said is not None
    score = one.scores["DeepFM"]
    assert [float(x) for x in said.groups()] == pytest.approx([score.auc, score.log_loss], abs=1e-4)
    then = deepfm.main([*small[:-2], "--steps", "6", "--table", "columns", "--out", str(out)])
    assert then.first == 4
    whole = deepfm.main(
        [*small[:-2], "--steps", "6", "--placement", "cpu:2", "--out", str(tmp_path / "whole")]
    )
    assert losses_in(out) == pytest.approx(whole.losses, rel=1e-5)
    assert then.scores["DeepFM"].log_loss == pytest.approx(whole.scores["DeepFM"].log_loss, rel=1e-5)


@pytest.mark.slow
def test_a_recommender_that_is_asked_to_end_saves_in_both_processes(tmp_path: Path) -> None:
    small = "--batch 24 --samples 24000 --held-out 48 --rows 30 --width 4 --save-every 2".split()
    command = [
        sys.executable,
        "-m",
        "sbp",
        "launch",
        "--processes",
        "2",
        "--devices",
        "2",
        "-m",
        "models.dcn",
    ]
    command += [*small, "--steps", "1000", "--placement", "cpu:4", "--resume", "--out", str(tmp_path)]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(tmp_path / "checkpoint", 2, run)
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate()
    assert run.returncode == 0, err[-3000:]
    assert out.count("asked to end; --resume goes on") == 1
    last = Checkpoints(tmp_path / "checkpoint").steps[-1]
    assert len(losses_in(tmp_path)) == last < 1000
