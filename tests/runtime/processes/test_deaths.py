"""One of three processes ends in each way that there is: the last line of the launcher names it, and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.processes.test_two_processes import launched

SCRIPT = """
import os, signal, sys, time
import jax, numpy as np, sbp
culprit, how = int(sys.argv[1]), sys.argv[2]
devices = sbp.placement("cpu", shape=(jax.device_count(),))
total = sbp.compile(lambda x: x.sum(), devices, in_sbp=([sbp.S(0)],))
x = np.ones(jax.device_count(), np.float32)
for i in range(400):
    float(total(x))
    time.sleep(0.02)
    if i == 20 and jax.process_index() == culprit:
        if how.startswith("SIG"): os.kill(os.getpid(), signal.Signals[how])
        if how == "raises": raise ValueError("my own mistake")
        if how == "exits": sys.exit(7)
        if how == "leaves with 7": os._exit(7)
        if how == "leaves with 0": os._exit(0)
        if how == "aborts": os.abort()
        if how == "ends early": sys.exit(0)
"""
SAID = {
    "SIGKILL": "was killed by SIGKILL",
    "SIGSEGV": "was killed by SIGSEGV",
    "SIGSTOP": "was stopped, and did not answer",
    "raises": "ended with code 1: ValueError: my own mistake",
    "exits": "ended with code 7: SystemExit: 7",
    "leaves with 7": "ended with code 7",
    "leaves with 0": "ended with code 0, while others still ran",
    "aborts": "was killed by SIGABRT",
}
QUICK = (1, "leaves with 0")
"""One in which a victim was named once; the others are slow."""
DEATHS = [
    pytest.param(culprit, how, marks=[] if (culprit, how) == QUICK else pytest.mark.slow)
    for culprit in (0, 1)
    for how in SAID
]


def last_words(culprit: int, how: str, folder: Path) -> str:
    """The last line of a launch in which a process ends so; pages of C++ are not in it."""
    file = folder / "script.py"
    file.write_text(SCRIPT)
    run = launched(str(file), str(culprit), how, processes=3)
    assert run.returncode == 1 and "absl::" not in run.stderr
    return run.stderr.splitlines()[-1]


@pytest.mark.full
@pytest.mark.parametrize(("culprit", "how"), DEATHS)
def test_the_last_line_names_the_culprit(culprit: int, how: str, tmp_path: Path) -> None:
    assert last_words(culprit, how, tmp_path) == f"process {culprit} of 3 {SAID[how]}"


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
def test_who_came_to_its_end_too_early_is_named_with_the_call(culprit: int, tmp_path: Path) -> None:
    said = last_words(culprit, "ends early", tmp_path)
    assert f"process {culprit} has come to its end after 21 calls" in said
