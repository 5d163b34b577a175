"""Programs compiled for 8 x H100 that are not here: what the plan says, and what XLA:GPU makes of it."""

import json
from pathlib import Path

import pytest

import sbp
from benchmarks import cases, large
from sbp.runtime.report.report import ProgramReport
from tests.runtime.target.plugin import needs_plugin

pytestmark = needs_plugin

# As large as a device wants it: nothing is run, and what a small program leaves free in the heap is no tenth.
SIZE = large.GPT
CASES = {
    "a GPT, weights and state split": ((8,), lambda: cases.gpt_case("zero", (8,), 1, SIZE, 64)),
    "a GPT, 2 x 4": ((2, 4), lambda: cases.gpt_case("2d", (2, 4), 1, SIZE, 64)),
}


SPLIT, *OTHERS = CASES


@pytest.fixture(scope="module", params=[SPLIT, *(pytest.param(c, marks=pytest.mark.full) for c in OTHERS)])
def report(request: pytest.FixtureRequest) -> ProgramReport:
    """Plan against compiled program."""
    shape, make = CASES[request.param]
    case, placement = make(), sbp.placement("h100", shape=shape)
    return sbp.compile(case.step, placement, in_sbp=case.in_sbp, donate_argnums=(0, 1)).report(*case.shapes())


def test_bytes_are_those_of_the_plan(report: ProgramReport) -> None:
    assert abs(report.byte_error) <= 0.01


def test_memory_is_that_of_the_plan(report: ProgramReport) -> None:
    # XLA needs 12 % more than is planned of one layer.
    assert abs(report.memory_error) <= 0.15 and report.fits


def test_every_collective_is_explained(report: ProgramReport) -> None:
    assert report.unexplained_differences == ()
    assert all(c.rows and (c.seconds or c.conditional) for c in report.collectives)
    assert any(c.asynchronous and c.kernels_beside for c in report.collectives)


def test_the_trace_has_the_names_of_the_plan(report: ProgramReport, tmp_path: Path) -> None:
    report.save(tmp_path / "step.trace.json")
    events = json.loads((tmp_path / "step.trace.json").read_text())["traceEvents"]
    names = {e["name"] for e in events}
    assert any(name.startswith("row") and " of " in name for name in names)
    assert any("layer0" in name for name in names)


def test_the_schedule_hides_most_of_the_collectives(report: ProgramReport) -> None:
    found = report.simulation
    assert found is not None
    assert found.unknown_trip_counts == found.unknown_kernels == ()
    assert 0 <= found.exposed_seconds < 0.5 * found.seconds
    assert found.seconds == pytest.approx(found.kernel_seconds + found.exposed_seconds)
