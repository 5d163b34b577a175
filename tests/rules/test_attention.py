"""Attention by cuDNN: its rows are true, with formulas for its kernels; what it costs; what runs whole."""

import pytest

from tests.rules.claims import Sample, applications, false_compositions, false_rows
from tests.rules.samples_attention import SAMPLES


@pytest.mark.parametrize("one", SAMPLES, ids=str)
def test_rows_are_true(one: Sample) -> None:
    assert applications(one)
    assert not false_rows(one, one.groups[-1:])


@pytest.mark.parametrize("one", SAMPLES, ids=str)
def test_compositions_are_true(one: Sample) -> None:
    assert not false_compositions(one, (2, 2))
