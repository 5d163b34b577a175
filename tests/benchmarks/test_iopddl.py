"""The reader of Google's planning problems, on one small enough to know the answer."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import iopddl

ROOT = Path(__file__).resolve().parents[2]

# Two nodes alive together. Both cheap states do not fit, and states (0, 1) exclude each other.
PROBLEM: dict[str, Any] = {
    "problem": {
        "name": "small",
        "nodes": {
            "intervals": [[0, 4], [2, 6], [1, 1]],
            "costs": [[1, 30], [2, 50], [7]],
            "usages": [[60, 10], [60, 10], [500]],
        },
        "edges": {"nodes": [[0, 1]], "costs": [[3, 10**18, 4, 5]]},
        "usage_limit": 100,
    }
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.json.gz"
    path.write_bytes(gzip.compress(json.dumps(PROBLEM).encode()))
    return path


def test_a_problem_is_solved(file: Path) -> None:
    record, found = iopddl.solved(file, 10.0)
    assert record["strategies"] == [1, 0, 0]
    assert record["cost"] == found.cost == 30 + 2 + 7 + 4
    assert (record["bound"], record["feasible"]) == (43.0, True)
    assert found.peak_bytes == 70.0


@pytest.mark.full
def test_it_runs_as_a_script(file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/iopddl.py", str(file), "--seconds", "20", "--out", str(tmp_path)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "| small | 43 | 43 | 0.0000% | True |" in printed
    assert json.loads((tmp_path / "small.json").read_text())["strategies"] == [1, 0, 0]
