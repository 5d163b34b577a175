"""The parts of the search that are left out exist, are left out, and come back."""

import math

import pytest

from benchmarks.search import PARTS, main, planned, replaced
from sbp.passes.plan import constants


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_there_and_comes_back(part: str) -> None:
    def now() -> list[object]:
        return [getattr(owner, name) for owner, name, _ in PARTS[part]]

    before = now()
    with replaced(PARTS[part]):
        assert now() == [other for _, _, other in PARTS[part]] != before
    assert now() == before


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """What the table says of it is what is planned."""
    usual = planned("classifier", (2, 4), math.inf)
    assert usual.step_seconds <= 166.2e-6
    main(["classifier", "--parts", "1", "--without", "shaken shares"])
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 4 and f"| classifier | 1 |  | {1e6 * usual.step_seconds:.1f} us | 1.000 |" in rows[2]


def test_the_table_of_constants(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With sixteen turns a shorter plan of the classifier is found than with eight."""
    monkeypatch.setattr(constants, "MOST_TURNS", 16)
    main(["classifier", "--parts", "1", "--constants", "MOST_TURNS"])
    name, half, _, double, _ = capsys.readouterr().out.splitlines()[2].strip("| ").split(" | ")
    assert (name, constants.MOST_TURNS) == ("MOST_TURNS = 16", 16)
    assert half == "1.010 to 1.010" and float(double.split(" to ")[0]) <= 1.0
