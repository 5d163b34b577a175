"""Runs that nobody looks after: killed, poisoned, damaged, out of disk; they end by themselves."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.processes import launch as launching
from sbp.runtime.processes.launch import LaunchRequest, launch
from tests.runtime.processes import cases, unattended

DISK_BYTES = 6 << 20
"""Some steps find room on it, and no more."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def ended(plan: dict[str, Any], file: Path, most: int) -> tuple[int, list[str], list[str]]:
    """How a launch of the run ends, and what it says."""
    file.write_text(json.dumps(plan))
    out, err = list[str](), list[str]()
    script = str(Path(unattended.__file__))
    request = LaunchRequest((script, str(file)), processes=2, devices=2, restarts=most)
    return launch(request, out.append, err.append), out, err


def undisturbed(plan: dict[str, Any]) -> list[float]:
    """The losses of a run to which nothing happens, in one process."""
    done = unattended.trained(plan, lambda i: (cases.batch_of(i), 1.0), progress=False)
    return [row["loss"] for row in done.history]


def check(kind: str, disk: Path, tmp_path: Path, steps: int, save_every: int, **faults: list[int]) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    plan = {"folder": str(disk), "notes": str(notes), "log": str(tmp_path / "log.csv")}
    plan |= {"kind": kind, "steps": steps, "save_every": save_every, **faults}  # type: ignore[dict-item]
    most = len(faults["kills"]) + len(faults["damages"])
    code, out, err = ended(plan, tmp_path / "plan.json", most)
    said = "".join(err)
    assert code == 0, said[-6000:]
    assert f"done {steps}\n" in out
    assert f"restart {most} of {most}" in said
    assert f"back to step {faults['poisons'][0] // save_every * save_every}, for the 1. time" in said
    assert "is left out, an older one is taken" in said
    assert "was not saved, and training goes on" in said
    with (tmp_path / "log.csv").open() as file:
        rows = [(int(row["step"]), float(row["value"])) for row in csv.DictReader(file)]
    assert [step for step, _ in rows] == [*range(1, steps + 1)]
    assert [loss for _, loss in rows] == pytest.approx(undisturbed(plan), rel=1e-6)
    assert Checkpoints(disk).steps[-1] == steps


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that is killed often waits for longer each time: here it need not."""
    monkeypatch.setattr(launching, "FIRST_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(launching, "MOST_WAIT_SECONDS", 0.1)


@pytest.mark.full
def test_a_run_that_everything_happens_to(disk: Path, tmp_path: Path) -> None:
    faults = {"kills": [13], "poisons": [22], "damages": [34], "fulls": [41], "frees": [49]}
    check("data", disk, tmp_path, 60, 5, **faults)


@pytest.mark.slow
@pytest.mark.parametrize("kind", unattended.PLACEMENTS)
def test_500_steps(kind: str, disk: Path, tmp_path: Path) -> None:
    kills = [13, 48, 77, 120, 151, 190, 230, 345, 386, 481]
    faults = {"kills": kills, "poisons": [266], "damages": [307], "fulls": [411], "frees": [444]}
    check(kind, disk, tmp_path, 500, 10, **faults)
