"""The source of a plan with every op of the registry, and of random programs, runs and equals the program."""

import pytest

import sbp
from sbp.errors import SbpError
from tests.rules.claims import Sample
from tests.rules.test_claims import ALL_SAMPLES
from tests.runtime.source.equal import SPLITTING, checked

GRID = sbp.placement("cpu", shape=(2, 2))
OPTIONS = sbp.Options(hardware=SPLITTING)
FIRST = {one.name: one for one in reversed(ALL_SAMPLES)}
REST = [one for one in ALL_SAMPLES if one is not FIRST[one.name]]


def equal(one: Sample) -> None:
    """Of a sample that can be compiled."""
    try:
        sbp.compile(one.fn, GRID, options=OPTIONS).plan(*one.args)
    except SbpError:
        pytest.skip("cannot be compiled whole")
    checked(one.fn, one.args, GRID, close=one.close, options=OPTIONS)


@pytest.mark.some(
    14,
    "sort",
    "optimization_barrier",
    "scatter",
    "reduce_or",
    "conv_general_dilated",
    "cummax",
    "random_seed",
    "unstack",
)
@pytest.mark.parametrize("name", sorted(FIRST))
def test_of_every_op(name: str) -> None:
    equal(FIRST[name])


@pytest.mark.slow
@pytest.mark.parametrize("one", REST, ids=str)
def test_of_every_sample(one: Sample) -> None:
    equal(one)
