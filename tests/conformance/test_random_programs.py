"""A fixed sample of random programs; random_programs.py runs any number from the command line."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.conformance.random_code import Program, draw_program
from tests.conformance.random_programs import run

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@st.composite
def programs(draw: Any) -> Program:
    """Programs that hypothesis can shrink: every choice is one of a list, the simplest first."""
    return draw_program(lambda options: draw(st.sampled_from(options)))


@settings(max_examples=40, suppress_health_check=CHECKS)
@given(programs())
def test_equals_one_device(program: Program) -> None:
    outcome = run(program)
    event(outcome.kind)
    assert outcome.good, f"{outcome.kind}: {outcome.what}"


@pytest.mark.slow
@pytest.mark.parametrize("ten", range(20))
def test_those_of_the_command_equal_one_device(ten: int) -> None:
    """The first 200 of seed 0."""
    for number in range(10 * ten, 10 * ten + 10):
        program = draw_program(random.Random(f"0.{number}").choice)
        outcome = run(program)
        assert outcome.good, f"program {number}: {outcome.kind}: {outcome.what}\n{program}"
