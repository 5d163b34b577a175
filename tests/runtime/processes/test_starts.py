"""Two processes start again from files, and end with one message where one of them finds a NaN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.processes.test_two_processes import launched


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("starts")
    run = launched("-m", "tests.runtime.processes.starts", str(folder))
    assert run.returncode == 0, run.stderr[-3000:]
    names = {f.name for f in folder.iterdir()}
    assert {"whole.sbpx.0of2", "whole.sbpx.1of2", "staged.sbpx.0of2", "staged.sbpx.1of2"} <= names
    return [json.loads(Path(folder, f"said{i}.json").read_text()) for i in range(2)]


@pytest.mark.parametrize("name", ["whole", "staged"])
def test_each_loads_its_own_file(name: str, said: list[dict[str, Any]]) -> None:
    (first, again, compiled), (_, other, _) = (s[name] for s in said)
    assert first == again == other
    assert compiled == 0 or name == "staged"  # what crosses between processes is compiled


def test_all_name_the_device_that_found_it(said: list[dict[str, Any]]) -> None:
    assert said[0]["device"] == said[1]["device"]
    assert "is sqrt at starts.py:" in said[0]["device"]
    assert "its operands are finite; on device 6 of cpu(x=8)" in said[0]["device"]


def test_all_name_the_stage_that_found_it(said: list[dict[str, Any]]) -> None:
    assert said[0]["stage"] == said[1]["stage"]
    assert "is log at starts.py:" in said[0]["stage"]
