"""Every row of an element-wise rule is true."""

import pytest

from tests.rules.claims import Sample, false_compositions, false_rows
from tests.rules.samples_elementwise import SAMPLES


@pytest.mark.parametrize("one", SAMPLES, ids=str)
def test_rows(one: Sample) -> None:
    assert not false_rows(one)


@pytest.mark.parametrize("hierarchy", [(2, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("one", SAMPLES, ids=str)
def test_compositions(one: Sample, hierarchy: tuple[int, ...]) -> None:
    assert not false_compositions(one, hierarchy)
