"""One of several processes is killed or stopped at some moment: the others end soon, and say which it was.

The run goes on with other numbers of processes under other placements, and its curve is that of one process.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sbp.runtime.checkpoint.checkpoints import Checkpoints
from tests.runtime.processes.test_long_runs import curve_of, logged
from tests.runtime.processes.test_two_processes import ROOT, launched

KILLS = 3
MOST_STEPS = 400  # in 0.2 s each and more: nobody comes there
SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8)]


def started(
    script: str, folder: Path, processes: int, kind: str, *options: str, steps: int = MOST_STEPS
) -> subprocess.Popen[str]:
    """A launch that goes on beside the test."""
    command = [sys.executable, "-m", "sbp", "launch", "--processes", str(processes), *options]
    command += ["--devices", str(8 // processes), script, str(folder), str(steps), kind, "slow"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def members(launcher: subprocess.Popen[str]) -> list[int]:
    """The ids of its processes, in their order."""
    found = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True, check=True)
    return [int(pid) for pid in found.stdout.split()]


def hit(script: str, folder: Path, kind: str, victim: int, number: int, rng: np.random.Generator) -> None:
    """Starts a run, and sends a signal to one of its two processes, some moments after a new checkpoint: all
    end."""
    before = max(Checkpoints(folder).steps, default=0)
    run = started(script, folder, 2, kind)
    while max(Checkpoints(folder).steps, default=0) <= before:
        assert run.poll() is None, run.communicate()[1][-3000:]
        time.sleep(0.05)
    time.sleep(float(rng.uniform(0, 2)))
    pids = members(run)
    subprocess.run(["kill", f"-{number}", str(pids[victim])], check=True)
    _, err = run.communicate()
    how = "was stopped, and did not answer" if number == signal.SIGSTOP else "was killed by SIGKILL"
    assert run.returncode == 1 and f"process {victim} of 2 {how}" in err, err[-3000:]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, *SLOW])
def test_whenever_one_is_killed_the_others_end_and_the_run_goes_on(
    seed: int, script: str, tmp_path: Path
) -> None:
    rng, folder = np.random.default_rng(seed), tmp_path / "run"
    kind = "stages" if seed % 2 else "data"
    for i in range(KILLS):
        victim = int(rng.integers(2)) if i else 0  # process 0 has the coordination service
        hit(script, folder, kind, victim, signal.SIGKILL, rng)
    at = max(Checkpoints(folder).steps)
    processes = (4, 1)[seed % 2]
    then = launched(script, str(folder), str(at + 3), kind, processes=processes)
    assert then.returncode == 0, then.stderr[-3000:]
    assert list(logged(folder)) == list(range(1, at + 4))
    assert list(logged(folder).values()) == pytest.approx(curve_of(kind, at + 3), rel=1e-5)


@pytest.mark.slow
def test_a_run_whose_process_is_killed_twice_goes_on_by_itself_without_it(
    script: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = started(script, folder, 2, "data", "--restarts", "5", "--min-processes", "1", steps=20)
    for after in (0, 2):
        while max(Checkpoints(folder).steps, default=0) <= after:
            assert run.poll() is None
            time.sleep(0.05)
        subprocess.run(["kill", "-9", str(members(run)[1])], check=True)
        time.sleep(5.0)
    _, err = run.communicate()
    killed = "process 1 of 2 was killed by SIGKILL"
    assert run.returncode == 0, err[-3000:]
    assert f"restart 1 of 5: {killed}; all 2 are started again in 1 s\n" in err
    assert f"restart 2 of 5: {killed}, twice in a row; 1 is started instead of 2 in 2 s\n" in err
    assert list(logged(folder).values()) == pytest.approx(curve_of("data", 20), rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_one_that_is_stopped_is_found_by_its_heartbeats(victim: int, script: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(victim)
    hit(script, tmp_path / "run", "data", victim, signal.SIGSTOP, rng)


COMPILES = """
import ctypes, sys, time
import jax, jax.numpy as jnp, numpy as np, sbp
seconds, at = float(sys.argv[1]), sys.argv[2]
rank = jax.process_index()
eight = sbp.placement("cpu", shape=(8,))

def compiled_long():
    if at == "held":
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # no thread of Python runs meanwhile
    began, done = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        def wide(x):  # several short chains: a long one overflows XLA's stack, and many LLVM's memory
            found = []
            for k in range(8):
                y = x + k + done
                for i in range(200):
                    y = jnp.sin(y @ y) + i
                found.append(y)
            return found
        jax.jit(wide).lower(jnp.ones((3, 3))).compile()
        done += 1
    print(f"compiled {done} programs in {time.monotonic() - began:.0f} s", flush=True)

def total(x):
    if rank == 1:
        compiled_long()
    return x.sum()

print("total", float(sbp.compile(total, eight, in_sbp=([sbp.S(0)],))(np.ones(8, np.float32))))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("seconds", "at"),
    [
        pytest.param("25", "held", id="longer than heartbeats may be away"),
        pytest.param("120", "compiled", id="120 s", marks=pytest.mark.slow),
    ],
)
def test_one_that_compiles_is_waited_for(seconds: str, at: str, tmp_path: Path) -> None:
    file = tmp_path / "compiles.py"
    file.write_text(COMPILES)
    run = launched(str(file), seconds, at)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("total 8.0") == 2
