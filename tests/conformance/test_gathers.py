"""No program sends more of a split argument than `jit` does, or it is known which, and why."""

import itertools

import jax
import pytest

from tests.conformance import gathers

PROGRAMS = list(gathers.programs())
DEFAULT = 160
"""Every so many are looked at by default."""


@pytest.mark.parametrize("shard", [0, *(pytest.param(i, marks=pytest.mark.full) for i in range(1, DEFAULT))])
def test_nothing_is_gathered_in_vain(shard: int) -> None:
    with jax.enable_x64(True):
        found = [f for p in itertools.islice(PROGRAMS, shard, None, DEFAULT) for f in gathers.sent(p)]
    assert found
    assert [f for f in found if f.needless and not gathers.reason(f)] == []


def test_the_page_is_of_what_was_found() -> None:
    sent = gathers.Sent("roll", "functions", 0, 0, 4, 160.0, 64.0)
    text = gathers.page([sent, gathers.Sent("sum", "reductions", 0, 0, 4, 0.0)])
    assert "| roll | 1 | 2.5 to 2.5 | A cyclic shift" in text
    assert "| nothing | 1 |" in text
