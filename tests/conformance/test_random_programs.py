"""A fixed sample of random programs; random_programs.py runs any number from the command line."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from sbp import B, S
from sbp.rules.entry import Row
from sbp.rules.registry import REGISTRY
from tests.conformance.random_code import Input, Line, Program, draw_program
from tests.conformance.random_ops import Value
from tests.conformance.random_programs import run, run_odd, shrunk

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@st.composite
def programs(draw: Any) -> Program:
    """Programs that hypothesis can shrink: every choice is one of a list, the simplest first."""
    return draw_program(lambda options: draw(st.sampled_from(options)))


@settings(max_examples=10, suppress_health_check=CHECKS)
@given(programs())
def test_equals_one_device(program: Program) -> None:
    outcome = run(program)
    event(outcome.kind)
    assert outcome.good, f"{outcome.kind}: {outcome.what}"


@pytest.mark.full
@settings(max_examples=4, suppress_health_check=CHECKS)
@given(programs(), st.booleans())
def test_equals_one_device_on_odd_values(program: Program, integers: bool) -> None:
    outcome = run_odd(program, integers)
    event(outcome.kind)
    assert outcome.good, f"{outcome.kind}: {outcome.what}"


@pytest.mark.slow
@pytest.mark.parametrize("ten", range(2))
def test_those_of_the_command_equal_one_device(ten: int) -> None:
    """The first 20 of seed 0."""
    for number in range(10 * ten, 10 * ten + 10):
        program = draw_program(random.Random(f"0.{number}").choice)
        outcome = run(program)
        assert outcome.good, f"program {number}: {outcome.kind}: {outcome.what}\n{program}"


def floats(noise: float) -> Value:
    return Value((4, 6), "float32", 8.0, noise)


SMALL = Program(
    grid=[1, 0],
    splitting=True,
    grad=False,
    inputs=(Input(0, (4, 6), "float32", [S(0)]), Input(1, (4, 6), "float32", None)),
    lines=(
        Line(2, "v0 * 2", (0,), floats(0.0)),
        Line(3, "sbp.annotate(v2, [S(1)])", (2,), floats(0.0)),
        Line(4, "jnp.sin(v3)", (3,), floats(1e-4)),
        Line(5, "v4 + v1", (4, 1), floats(1e-4)),
        Line(6, "jnp.flip(v0, 0)", (0,), floats(0.0)),
    ),
    outs=((5, [B]), (6, None)),
)


def broken(text: str) -> Any:
    """A body for `sin` that is not one."""
    return lambda ctx, x: [eval(text, {"x": x, "jnp": jnp})]


def scaled_rows() -> Program:
    """Rows of a table, looked up as a sum of which each is one device's, times what may be infinite."""
    table, small = Value((8, 32), "float32", 4.0, 0.0), Value((3, 32), "float32", 4.0, 0.0)
    return Program(
        grid=[1, 0],
        splitting=False,
        grad=False,
        inputs=(
            Input(0, table.shape, table.dtype, [S(0)]),
            Input(1, (3,), "int32", [B]),
            Input(2, small.shape, small.dtype, [B]),
        ),
        lines=(
            Line(3, 'jnp.take(v0, v1, 0, mode="clip")', (0, 1), small),
            Line(4, "jnp.sum((v3 * v2).reshape(3, -1, 2), 2)", (3, 2), replace(small, shape=(3, 16))),
        ),
        outs=((4, [B]),),
    )


def test_a_difference_is_attributed_to_the_op_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference that no op of the plan admits is an error."""
    assert run_odd(scaled_rows(), integers=False).kind == "attributed"
    monkeypatch.setattr(Row, "needs_finite", lambda row, op: False)
    outcome = run_odd(scaled_rows(), integers=False)
    assert (outcome.kind, outcome.what.splitlines()[0]) == ("differs", "strict=True")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("jnp.sin(x)", "equal"),
        ("jnp.sin(x) * 1.01", "differs"),
        ("jnp.sin(x).reshape(-1)", "crashed"),
        ("x.at[0, 0].set(jnp.nan)", "differs"),
    ],
)
def test_the_check_itself(text: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "sin", replace(REGISTRY["sin"], body=broken(text)))
    assert run(SMALL).kind == kind


def test_a_program_that_fails_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the program above, only the line that is wrong is left, as code that can be run."""
    monkeypatch.setitem(REGISTRY, "sin", replace(REGISTRY["sin"], body=broken("jnp.sin(x) * 1.01")))
    small = shrunk(SMALL, "differs")
    assert small.source == "def f(v3):\n    v4 = jnp.sin(v3)\n    return [v4]"
    assert "args = [tensor(3, (4, 6), 'float32')]" in repr(small)
    assert (small.inputs[0].sbp, small.outs) == (None, ((4, None),))


def test_an_annotation_that_cannot_be_is_a_refusal() -> None:
    wrong = replace(
        SMALL, lines=(Line(2, "sbp.annotate(v0, [sbp.P])", (0,), floats(0.0)),), outs=((2, None),)
    )
    outcome = run(wrong)
    assert (outcome.kind, outcome.good) == ("refused", True)
    assert "arrives as whole values" in outcome.what
