"""The end game of small programs under a limit."""

import math
from typing import Any

import pytest

from sbp.passes.physical.enumeration import WeighedPlan, shortest_by_trying
from sbp.passes.plan import constants
from sbp.passes.plan.model import ChosenSignatures
from tests.passes.physical.limits import example, outcome
from tests.passes.plan.cheapest import choose


@pytest.mark.some(1)
@pytest.mark.parametrize("seed", [82, 554, 1012])
def test_what_the_counted_loads_miss_is_found(seed: int) -> None:
    """Without it no plan was found for two of these, and a dearer one for the last."""
    found = outcome(seed)
    assert found is not None and found.kind == "equal"


@pytest.mark.some("209")
@pytest.mark.parametrize("seed", [609, 209])
def test_what_runs_again_is_tried_too(seed: int) -> None:
    """Without it no plan was found for the first one, and one that takes 1.11 times as long for the other."""
    found = outcome(seed)
    assert found is not None and found.kind == "equal" and found.best_again


def test_the_shortest_that_fits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    given = example(2)
    fastest, asked = choose(*given), list[float]()

    def weigh(assignment: ChosenSignatures, fits: bool = True) -> WeighedPlan:
        return WeighedPlan(assignment.seconds, assignment.seconds, fits)

    def third(assignment: ChosenSignatures) -> WeighedPlan:
        asked.append(assignment.seconds)
        return weigh(assignment, len(asked) == 3)

    def tried(below: float, weigh: Any = weigh) -> ChosenSignatures | None:
        return shortest_by_trying(*given, weigh, below, fastest.bound)

    found = tried(math.inf, third)
    assert found is not None and found.seconds == asked[2] and found.bound <= found.seconds
    shortest = tried(math.inf)
    assert shortest is not None and shortest.seconds == pytest.approx(fastest.seconds)
    assert tried(fastest.seconds * (1 - 1e-9)) is None
    monkeypatch.setattr(constants, "COMBINATIONS", 1)
    assert tried(math.inf) is None
