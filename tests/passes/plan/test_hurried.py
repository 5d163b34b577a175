"""Models for little time: given up when it is over, and of the strategies that treat all axes alike."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.passes.plan import hurried
from sbp.passes.plan.cheapest import choose
from sbp.passes.plan.grouped import axes_alike
from sbp.passes.plan.hurried import TimedModel, least_seconds, model_in_time
from sbp.passes.plan.model import Model
from sbp.passes.plan.narrow import solve_indexed
from tests.passes.questions import asked

GRID = sbp.placement("h100", shape=(2, 4))
W, X = np.ones((64, 128), np.float32), np.ones((512, 64), np.float32)


def step(w: Any, x: Any) -> Any:
    value, slope = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
    return w - 0.1 * slope, value


@pytest.fixture
def question() -> Any:
    return asked(step, GRID, W, X)


def test_a_model_is_given_up_when_its_time_is_over(question: Any) -> None:
    with pytest.raises(hurried.OutOfTime):
        TimedModel(question.candidates, question.asked, question.boxings, 0.0).build_indexed()
    given = question.candidates, question.asked, question.boxings
    late, begun_late, in_time, unlimited = (
        model_in_time(*given, seconds, is_late)
        for seconds, is_late in ((1.0, True), (1e-9, False), (100.0, False), (None, False))
    )
    assert [x.is_whole for x in (late, begun_late, in_time, unlimited)] == [False, False, True, True]
    assert late.network.cells < in_time.network.cells == unlimited.network.cells


def test_few_strategies_are_some_of_all_and_cost_the_same(question: Any) -> None:
    whole = Model(question.candidates, question.asked, question.boxings)
    few = Model(axes_alike(question.candidates, ((0, 1),)), question.asked, question.boxings)
    networks = whole.build_indexed(), few.build_indexed()
    best, found = (solve_indexed(network) for network in networks)
    assert best.cost <= found.cost < math.inf
    # The same assignment in the whole network.
    states = [
        list(all_).index(some[k])
        for all_, some, k in zip(whole.states, few.states, found.states, strict=True)
    ]
    assert networks[0].dense().cost(states) == pytest.approx(found.cost, rel=1e-12)


def test_the_ops_alone_take_no_more_than_any_plan(question: Any) -> None:
    least = least_seconds(question.candidates, question.boxings)
    assert 0 < least <= choose(question.candidates, question.asked, question.boxings, None).seconds


def test_a_plan_in_no_time_is_a_plan_and_says_so() -> None:
    options = sbp.Options(time_limit=1e-6, cache=False)
    hurry = sbp.compile(step, GRID, options=options).plan(W, X)
    best = sbp.compile(step, GRID, options=sbp.Options(time_limit=math.inf, cache=False)).plan(W, X)
    assert hurry.bound <= best.seconds
    assert hurry.gap == 0.0 or any("time limit" in note for note in hurry.notes)


def test_what_is_asked_for_holds_in_no_time() -> None:
    """Signatures that differ from axis to axis are not among the few."""
    options = sbp.Options(time_limit=1e-6, cache=False)
    asked_for = [sbp.B, sbp.S(0)], [sbp.S(0), sbp.B]
    plan = sbp.compile(step, GRID, in_sbp=asked_for, options=options).plan(W, X)
    assert plan.in_sbp[:2] == tuple(map(tuple, asked_for))
