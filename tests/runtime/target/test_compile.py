"""Programs compiled for 8 x H100 that are not here: what the plan says, and what XLA:GPU makes of it."""

import importlib.util
from dataclasses import replace
from typing import Any

import pytest

import sbp
from benchmarks import cases, large
from sbp.quiet import PLUGIN
from sbp.rates.chips import CHIPS
from sbp.runtime.look.meter import read_compiled
from sbp.runtime.target.simulate import simulate

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(PLUGIN) is None,
    reason=f"no {PLUGIN}: pip install -e '.[gpu-target]' (no GPU needed)",
)

SMALL = replace(large.GPT, width=512, heads=8, vocabulary=8192, sequence=256)
CASES = {
    "a GPT, weights and state split": ((8,), lambda: cases.gpt_case("zero", (8,), 1, SMALL, 64)),
    "a GPT, 2 x 4": ((2, 4), lambda: cases.gpt_case("2d", (2, 4), 1, SMALL, 64)),
}


@pytest.fixture(scope="module", params=CASES)
def compiled(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A plan and its executable."""
    shape, make = CASES[request.param]
    case, placement = make(), sbp.placement("h100", shape=shape)
    program = sbp.compile(case.step, placement, in_sbp=case.in_sbp, donate_argnums=(0, 1))
    args = case.shapes()
    return program.plan(*args), program.lower(*args).compile()


def test_bytes_are_those_of_the_plan(compiled: tuple[Any, Any]) -> None:
    plan, exe = compiled
    assert read_compiled(exe).wire_bytes == pytest.approx(plan.wire_bytes, rel=0.01)


@pytest.mark.xfail(strict=False, reason="the plan's peak is 1.4 times that of XLA's buffers for both")
def test_memory_is_that_of_the_plan(compiled: tuple[Any, Any]) -> None:
    plan, exe = compiled
    m = exe.memory_analysis()
    used = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes
    assert plan.memory_bytes == pytest.approx(used, rel=0.10)


def test_the_schedule_hides_most_of_the_collectives(compiled: tuple[Any, Any]) -> None:
    _, exe = compiled
    found = simulate(exe, CHIPS["h100"])
    assert found.unknown_trip_counts == found.unknown_kernels == ()
    assert 0 <= found.exposed_seconds < 0.5 * found.seconds
    assert found.seconds == pytest.approx(found.kernel_seconds + found.exposed_seconds)
