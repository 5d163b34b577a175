"""Small random programs under a limit: the planner beside all plans there are (limits.py)."""

import pytest

from tests.passes.physical.limits import outcomes


@pytest.mark.full
@pytest.mark.parametrize(
    "count", [20, pytest.param(500, marks=pytest.mark.slow)], ids=["a few", "as many as are asked for"]
)
def test_the_bound_holds_and_the_best_is_mostly_found(count: int) -> None:
    kinds = [found.kind for found in outcomes(count)]
    assert "bound above the best" not in kinds
    assert kinds.count("equal") >= 0.95 * count
