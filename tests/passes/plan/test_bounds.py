"""Bounds that hold of every plan, whatever runs beside what."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import sbp
from sbp.passes.physical.exposure import Clock
from sbp.passes.plan.bounds import least_kernel_seconds, least_seconds
from sbp.passes.plan.flat import all_costs
from sbp.passes.spec import SpecError, check_plan
from tests.passes.search.test_explore import HARDWARE, SLOW, beside, chain, problem, sent_twice, summed


@pytest.mark.parametrize("fn", [beside, chain, summed, sent_twice])
@pytest.mark.parametrize("hardware", [HARDWARE, SLOW])
def test_no_plan_has_a_shorter_step(fn: object, hardware: object) -> None:
    """Of every assignment whose ops take little, the step takes at least what is proven of all."""
    model, network, _ = problem(fn, hardware)  # type: ignore[arg-type]
    bound = least_kernel_seconds(model.c, model.boxings)
    assert 0.0 < bound <= least_seconds(model.c, model.boxings)
    states, costs = all_costs(network)
    clock = Clock(model.c, model.boxings)
    for k in np.argsort(costs, kind="stable")[:60]:
        assignment = model.chosen(states[:, k].tolist(), 0.0, 0.0)
        assert clock.times(assignment).step_seconds >= bound * (1 - 1e-9)


def plan_of_chain(kind: str) -> sbp.Plan:
    """Two products, planned for a kind of device."""
    x = np.ones((256, 256), np.float32)
    placement = sbp.placement(kind, shape=(2, 4))
    return sbp.compile(lambda x, w: (x.T @ w).T @ x, placement).plan(x, x)


def test_the_gap_of_a_step_is_said_where_something_overlaps() -> None:
    """On CPUs one thing comes after the other: the bound on that time is the bound on the step."""
    gpu, cpu = plan_of_chain("h100"), plan_of_chain("cpu")
    assert 0.0 < gpu.step_bound <= gpu.step_seconds
    assert gpu.step_gap == pytest.approx(1 - gpu.step_bound / gpu.step_seconds)
    assert cpu.step_bound == cpu.bound and cpu.step_gap == cpu.cheapest_gap
    hidden = replace(gpu, step_seconds=0.9 * gpu.seconds, step_bound=0.45 * gpu.seconds)
    assert "its step is at most 50 % from the shortest" in str(hidden)
    assert "from the shortest" not in str(cpu)


def test_a_step_below_its_bound_is_a_fault() -> None:
    plan = plan_of_chain("h100")
    with pytest.raises(SpecError, match="no step is shorter"):
        check_plan(replace(plan, step_bound=2 * plan.step_seconds))
