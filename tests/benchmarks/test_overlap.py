"""The table of steps with overlap: its rows, its figures, its text."""

import math
from typing import Any

import pytest

import sbp
from benchmarks.overlap import OverlapRow, main, measure, plan_of, rank_correlation, summary, table

ROW = OverlapRow("gpt@2/data:8", 0.03, 0.02, 0.001, 0.01, 0.002, 0.012, 0.011, 0.003)


def test_a_row_as_text() -> None:
    cells = [x.strip() for x in table([ROW]).splitlines()[-1].strip("|").split("|")]
    assert cells[:4] == ["gpt@2/data:8", "30.00", "20.00", "1.00"]
    assert cells[4:7] == ["10.00", "2.00", "2.00"]
    assert cells[7:] == ["12.00", "11.00", "3.00", "1.10"]


def test_how_far_apart() -> None:
    plan, model, others = summary([ROW]).splitlines()
    assert "apart by 100.0% in the median" in plan and "apart by 10.0% in the median" in model
    assert "20.0% in the median if all were hidden, by 20.0% if nothing were" in others


def test_rank_correlation_goes_by_order_alone() -> None:
    assert rank_correlation([1, 2, 30], [5, 6, 7]) == pytest.approx(1.0)
    assert rank_correlation([3, 2, 1], [5, 6, 7]) == pytest.approx(-1.0)
    assert math.isnan(rank_correlation([1], [1]))


@pytest.mark.full
def test_what_is_simulated_and_planned_are_different_times() -> None:
    """The model gets the kernels of the simulation: what it adds to them is what it finds exposed."""
    row = measure("gpt@1/zero:8", 0.0201, 0.0001)
    assert row.step_seconds < row.serial_seconds
    assert row.model_seconds == pytest.approx(0.02 + row.model_exposed_seconds)
    assert row.model_seconds < row.model_serial_seconds
    assert 0 < row.model_exposed_seconds < row.model_serial_seconds - 0.02


def test_rows_of_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "equinox/zero:8"])
    said = capsys.readouterr().out
    assert "| equinox/zero:8 |" in said and "with the simulator's times: rank correlation" in said


def test_plans_do_not_depend_on_how_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    # Those of benchmarks.gpu_target do not: another plan's step says nothing of what it compiled.
    limits = []

    def compiled(*given: Any, options: sbp.Options | None = None, **named: Any) -> None:
        limits.append(options and options.effort)
        raise InterruptedError

    monkeypatch.setattr(sbp, "compile", compiled)
    for plan in (lambda: measure("gpt@1/data:8", 1.0, 0.0), lambda: plan_of("gpt@1/data:8")):
        with pytest.raises(InterruptedError):
            plan()
    assert limits == [1.0, 1.0]
