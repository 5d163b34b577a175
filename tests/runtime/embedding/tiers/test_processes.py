"""Tables over tiers in several processes: each has the store of its rows, and others may take them over."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.runtime.embedding.tiers.clicks import STEPS, TABLES, alone
from tests.runtime.processes.test_two_processes import ROOT, launched

SCRIPT = ("-m", "tests.runtime.embedding.tiers.clicks")


def trained(folder: Path, steps: int, processes: int) -> dict[int, float]:
    """The losses of all steps so far; a run goes on from the last that was saved."""
    run = launched(*SCRIPT, str(folder), str(steps), "4", processes=processes)
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(map(json.loads, (folder / "losses.txt").read_text().splitlines()))


@pytest.mark.full
def test_two_processes_and_one_that_goes_on(tmp_path: Path) -> None:
    trained(tmp_path, 10, processes=2)
    losses = trained(tmp_path, STEPS, processes=1)
    check(tmp_path, losses)


@pytest.mark.slow
def test_one_process_and_two_that_go_on(tmp_path: Path) -> None:
    trained(tmp_path, 10, processes=1)
    losses = trained(tmp_path, STEPS, processes=2)
    check(tmp_path, losses)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_again_and_again(kills: int, tmp_path: Path) -> None:
    """Whatever it was at: pulling, writing back, merging, committing. It goes on from its last save."""
    rng, killed, folder = np.random.default_rng(kills), 0, tmp_path / "run0"
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    while True:
        folder.mkdir(exist_ok=True)
        calls = int(rng.integers(1, 400)) if killed < kills else 0
        command = [sys.executable, *SCRIPT, str(folder), str(STEPS), "4", str(calls)]
        run = subprocess.run(
            command, cwd=ROOT, env=os.environ | cache, capture_output=True, text=True, check=False
        )
        assert run.returncode in (0, -signal.SIGKILL), run.stderr[-3000:]
        killed += run.returncode != 0
        if not run.returncode:
            check(folder, dict(map(json.loads, (folder / "losses.txt").read_text().splitlines())))
            if killed == kills:
                return
            folder = tmp_path / f"run{killed}"


def check(folder: Path, losses: dict[int, float]) -> None:
    """Losses and rows are those of one device that holds everything."""
    with jax.enable_x64(True):
        plain, state, wanted = alone()
    np.testing.assert_allclose([losses[n + 1] for n in range(STEPS)], wanted, rtol=0, atol=1e-9)
    found: dict[str, Any] = json.loads((folder / "rows.json").read_text())
    for table in TABLES:
        rows = plain.read(state, table.name, np.arange(table.vocabulary_size))
        for x, y in zip(jax.tree.leaves(rows), found[table.name], strict=True):
            np.testing.assert_allclose(y, x, rtol=0, atol=1e-9)
