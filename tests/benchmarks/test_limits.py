"""The table of limits: what its words count."""

import math

import pytest

from benchmarks import limits


@pytest.mark.full
def test_the_words_say_what_is_split_and_gathered(capsys: pytest.CaptureFixture[str]) -> None:
    case = limits.case_of("gpt", (2,), 1, 1)
    plan = limits.row(case, (2,), ("gpt 1 on 2", "none"), math.inf)
    assert not isinstance(plan, str)
    cells = capsys.readouterr().out.split(" | ")
    assert cells[0] == "| gpt 1 on 2" and cells[4] == "0.00%"
    assert limits.chosen(plan) == cells[5] and cells[5].endswith(" 0 of them again, 0 ops run again")
    refused = limits.planned(case, (2,), 1e6)
    assert isinstance(refused, str) and refused.startswith("the smallest peak that was found is ")
