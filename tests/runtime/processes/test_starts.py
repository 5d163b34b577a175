"""Two processes start again from files, and end with one message where one of them finds a NaN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import sbp
from sbp.errors import ExecutableError
from tests.runtime.processes.test_two_processes import launched


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("starts")


@pytest.fixture(scope="module")
def said(folder: Path) -> list[dict[str, Any]]:
    run = launched("-m", "tests.runtime.processes.starts", str(folder))
    assert run.returncode == 0, run.stderr[-3000:]
    names = {f.name for f in folder.iterdir()}
    assert {"whole.sbpx.0of2", "whole.sbpx.1of2", "staged.sbpx.0of2", "staged.sbpx.1of2"} <= names
    return [
        {
            **json.loads(Path(folder, f"said{i}.json").read_text()),
            "log": Path(folder, f"log{i}.txt").read_text(),
        }
        for i in range(2)
    ]


@pytest.mark.full
@pytest.mark.parametrize("name", ["whole", "staged", "tied"])
def test_each_loads_its_own_file_and_finds_its_own_programs(name: str, said: list[dict[str, Any]]) -> None:
    for first, again, cached, compiled, found in (s[name] for s in said):
        assert first == again == cached == said[0][name][0]
        assert compiled == 0  # nor what crosses between processes
        assert found > 0  # in process 1, too, of which JAX keeps nothing by itself


@pytest.mark.full
@pytest.mark.usefixtures("said")
def test_what_crosses_is_refused_with_the_rest(folder: Path) -> None:
    for name in ("staged", "tied"):
        with pytest.raises(ExecutableError) as caught:
            sbp.load_executable(folder / f"{name}.sbpx.0of2")
        (processes,) = [p for p in caught.value.problems if p.where.endswith(": processes")]
        assert (processes.got, processes.legal) == (
            "process 0 of 2",
            "process 0 of 1, as here",
        )


@pytest.mark.full
def test_all_name_the_device_that_found_it(said: list[dict[str, Any]]) -> None:
    assert said[0]["device"] == said[1]["device"]
    assert "is sqrt at starts.py:" in said[0]["device"]
    assert "its operands are finite; on device 6 of cpu(x=8)" in said[0]["device"]


@pytest.mark.full
def test_all_name_the_devices_of_all_processes(said: list[dict[str, Any]]) -> None:
    assert said[0]["devices"] == said[1]["devices"]
    assert "its operands are finite; on devices 1, 6 of cpu(x=8)" in said[0]["devices"]


@pytest.mark.full
def test_all_name_the_stage_that_found_it(said: list[dict[str, Any]]) -> None:
    assert said[0]["stage"] == said[1]["stage"]
    assert "is log at starts.py:" in said[0]["stage"]
    assert "on all devices of " in said[0]["stage"]


@pytest.mark.full
def test_who_gives_rows_of_its_own_without_saying_so_is_told(said: list[dict[str, Any]]) -> None:
    assert said[0]["unlike"] == said[1]["unlike"]
    batch, small = said[0]["unlike"]
    assert batch.startswith("<lambda>: x\n  got    other values in process 1 than in process 0\n")
    assert "own_rows= in Program.place, own_rows=True in sbp.fit" in batch
    assert small.startswith("<lambda>: w\n  got    other values in process 1 than in process 0\n")


@pytest.mark.full
def test_whole_batches_of_the_host_are_compared_once(said: list[dict[str, Any]]) -> None:
    for one in said:
        assert one["batches"] == [[496.0, 528.0, 560.0, 8.0, 4.0, 48.0], True]


@pytest.mark.full
def test_process_0_speaks_for_all_in_the_log(said: list[dict[str, Any]]) -> None:
    """At INFO; what the others do is said at DEBUG."""
    first, other = ([line for line in s["log"].splitlines() if "compiled" in line] for s in said)
    assert any(line.startswith("INFO quiet: compiled") for line in first)
    assert not any("quiet" in line or line.startswith("INFO") for line in other)
    assert any(line.startswith("DEBUG fn: compiled") for line in other)
    assert not any(line.startswith("DEBUG fn: compiled") for line in first)
