"""The table of planning times: its rows, its musts, its text."""

import pytest

from benchmarks.planner import LARGE_ROWS, PlannerRow, large_line, main, measure


def test_a_row_says_whether_it_keeps_its_must() -> None:
    name = "gpt/2x2x2x2/12"
    assert large_line(name, PlannerRow(50.0, 2.0, 0.0)).endswith("| 60 s, 3 GB, gap 1% | yes |")
    for row in (PlannerRow(61.0, 2.0, 0.0), PlannerRow(50.0, 3.1, 0.0), PlannerRow(50.0, 2.0, 0.02)):
        assert large_line(name, row).endswith("| NO |")
    assert "gpt/2x2/1" not in LARGE_ROWS
    assert large_line("gpt/2x2/1", PlannerRow(1.0, 1.0, 0.0)).endswith("| 0.00% |  |  |")


def test_a_row_is_planned() -> None:
    row = measure("gpt/2x2/1")
    assert row.seconds > 0 and row.gigabytes > 0 and row.gap == 0.0


def test_passes_by_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--models", "mlp", "--placement", "2x2", "--rounds", "1"])
    said = capsys.readouterr().out
    assert "| mlp | choice |" in said and "| mlp | **all** |" in said
