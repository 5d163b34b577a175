"""The planning problem around some tensors, with moves that are banned."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import S
from sbp.hardware.catalogue import hardware_for
from sbp.passes.explain.targets import NamedTensors
from sbp.passes.face import Plan
from sbp.passes.physical.exposure import Clock
from sbp.passes.physical.program import Box, Physical
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.network import Solution
from sbp.passes.replan.near_problem import Ban, NearProblem
from sbp.passes.replan.replanner import Replanner

SERIAL = sbp.Options(hardware=replace(hardware_for("h100"), platform="serial"))


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def two_products(x: Any, v: Any, w: Any) -> Any:
    return jnp.tanh(x @ v) @ w


@pytest.fixture(scope="module")
def plan() -> Plan:
    """One that gathers: the batch is split, and the weights are at rest in parts."""
    place = sbp.placement("h100", shape=(4,))
    fn = sbp.compile(two_products, place, in_sbp=([S(0)], [S(0)], [S(0)]), out_sbp=[S(0)], options=SERIAL)
    return fn.plan(array(4096, 512), array(512, 512), array(512, 512))


def replanner_of(plan: Plan) -> Replanner:
    assert isinstance(plan.replanner, Replanner)
    return plan.replanner


def moves(physical: Physical) -> set[tuple[str, int]]:
    return {(step.move.kind, step.value) for step in physical.steps if isinstance(step, Box)}


def program(problem: NearProblem, states: Any) -> Physical:
    clock = Clock(problem.s.candidates, problem.s.boxings)
    return clock.program(problem.model.chosen_signatures(states, 0.0, 0.0), ()).physical


def test_what_is_banned_is_not_there_and_costs_more(plan: Plan) -> None:
    assert plan.physical is not None
    problem = replanner_of(plan).problem(plan.physical, {})
    found = moves(plan.physical)
    assert found
    for kind, value in found:
        free = problem.variables_near(problem.of_values([value]))
        usual = problem.network_around(free, Ban()).solve({}, Effort())
        other = problem.network_around(free, Ban(frozenset({(kind, value)}))).solve({}, Effort())
        assert usual is not None and moves(program(problem, usual[0])) == found
        assert other is not None and (kind, value) not in moves(program(problem, other[0]))
        assert other[1] > usual[1]


def test_what_is_not_proven_is_said_with_its_gap(plan: Plan) -> None:
    assert plan.physical is not None
    r = replanner_of(plan)
    target = NamedTensors(plan, plan.physical, r.request.ties).find("v")
    search = r.search(plan.physical, target, Effort())
    states = tuple(search.problem.plan_states)
    cost = search.problem.network.dense().cost(states)
    for bound, slack in ((cost, 0.0), (0.75 * cost, 0.25 * cost)):
        held = search.plan_of((S(0),), Solution(states, cost, bound))
        assert held.slack_seconds == pytest.approx(slack) and held.signature == (S(0),)
