"""A limit on time is one for all of planning: it is shared, kept, and named where it ended a search."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import B, S
from sbp.passes import chain, choosing
from sbp.passes.physical import fit as fitting
from sbp.passes.plan import cheapest, model
from sbp.passes.plan.network import Solution
from sbp.passes.plan.phases import Phases
from sbp.passes.request import Request, Terms
from sbp.runtime.call.usage_errors import terms_of
from tests.golden import two_stages
from tests.passes.questions import asked

LINE = sbp.placement("h100", shape=(8,))
W = np.ones((64, 64), np.float32)


def step(w: Any, x: Any) -> Any:
    value, slope = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
    return w - 0.1 * slope, value


class Clock:
    """Stands still but for what the test takes, so that no machine is too busy for it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(Phases.__init__, "__defaults__", (clock,))
    return clock


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that every search is given."""
    seconds: list[float] = []
    choose = choosing.cheapest

    def listening(model: Any, network: Any, limit: Any, progress: Any) -> Any:
        seconds.append(limit)
        return choose(model, network, limit, progress)

    monkeypatch.setattr(choosing, "cheapest", listening)
    return seconds


def planned(**options: Any) -> sbp.Plan:
    return sbp.compile(step, LINE, options=sbp.Options(**options)).plan(W, W)


@pytest.mark.usefixtures("clock", "usual_time_limit")
def test_it_is_30_seconds_where_nobody_says_it(told: list[float]) -> None:
    planned()
    assert 25 < told[0] <= 30
    assert terms_of(sbp.Options()).time_limit_seconds == 30
    assert terms_of(sbp.Options(time_limit=math.inf)).time_limit_seconds is None
    assert terms_of(sbp.Options(time_limit=5)).time_limit_seconds == 5


def test_what_comes_before_the_search_counts(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, told: list[float]
) -> None:
    candidates = chain.enumerate_candidates

    def slow(*args: Any, **kwargs: Any) -> Any:
        clock.sleep(0.5)
        return candidates(*args, **kwargs)

    monkeypatch.setattr(chain, "enumerate_candidates", slow)
    planned(time_limit=10)
    planned(time_limit=math.inf)
    assert 5 < told[0] <= 9.5 and told[1] is None


def test_the_search_leaves_time_for_what_comes_after_it(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, told: list[float]
) -> None:
    candidates = chain.enumerate_candidates

    def slow(*args: Any, **kwargs: Any) -> Any:
        clock.sleep(1.0)
        return candidates(*args, **kwargs)

    monkeypatch.setattr(chain, "enumerate_candidates", slow)
    planned(time_limit=10)
    assert told[0] <= 9.0 - chain.AFTER_SHARE


def test_what_is_kept_is_a_share_of_what_was_taken(clock: Clock) -> None:
    placement, now = sbp.placement("cpu", shape=(1,)), clock.now
    hardware = sbp.hardware.hardware_for("cpu")
    plain = Request("f", placement, hardware, (), (), ())
    assert plain.keeping(2.0) is plain and plain.seconds_left is None
    asked = dataclasses.replace(plain, terms=Terms(time_limit_seconds=10.0), deadline=now + 9.0)
    kept = asked.keeping(2.0)
    assert kept.kept_seconds == pytest.approx(2.0, abs=1.0)
    assert asked.seconds_left is not None and kept.seconds_left is not None
    assert asked.seconds_left - kept.seconds_left == pytest.approx(kept.kept_seconds, abs=1.0)
    assert dataclasses.replace(asked, deadline=now - 1.0).keeping(2.0).seconds_left == 0.0


@pytest.mark.parametrize(("limit", "least", "most"), [(1.0, 0.3, 0.8), (0.1, 0.05, 0.5), (None, None, None)])
def test_the_model_counts(
    limit: float | None,
    least: float | None,
    most: float | None,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But the solver has a part of what the model took, or its plan would be worth nothing."""
    question, build, given = asked(step, LINE, W, W), model.Model.build_indexed, list[Any]()

    def slow(self: Any) -> Any:
        clock.sleep(0.2)
        return build(self)

    def solve(network: Any, *, time_limit_seconds: float | None, progress: Any) -> Solution:
        given.append(time_limit_seconds)
        return Solution((0,) * len(network.unary), 1.0, 0.0)

    monkeypatch.setattr(model.Model, "build_indexed", slow)
    monkeypatch.setattr(cheapest, "solve_indexed", solve)
    cheapest.choose(question.candidates, question.asked, question.boxings, limit)
    (found,) = given
    assert found is limit is None or (least is not None and most is not None and least <= found <= most)


def test_strict_plans_share_it(clock: Clock, told: list[float]) -> None:
    """The second search says what strictness costs."""
    planned(time_limit=10, strict_nonfinite=True)
    assert len(told) == 2 and all(3 < t <= 5 for t in told)


def test_stages_share_it(clock: Clock, told: list[float]) -> None:
    program = sbp.compile(two_stages.step, two_stages.step_placement, options=sbp.Options(time_limit=10))
    plan: Any = program.plan(*two_stages.step_args())
    assert len(plan.stages) == len(told) == 2 and all(3 < t <= 5 for t in told)


def test_a_part_is_kept_for_a_plan_that_fits() -> None:
    graph = asked(step, LINE, W, W).candidates.graph
    whole = sum(math.prod(v.shape) * 4 for v in graph.values)
    assert fitting.seconds_of_fastest(graph, whole, 9.0) == 9.0
    assert fitting.seconds_of_fastest(graph, whole - 1, 9.0) == 4.5
    assert fitting.seconds_of_fastest(graph, 0.0, None) is None


@pytest.mark.parametrize(("limit", "first"), [(1.0, 0.5), (None, math.inf)])
def test_tries_to_fit_share_it(
    limit: float | None, first: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    question, given = asked(step, LINE, W, W), list[float]()
    real = fitting.LimitedSearch

    class Listening(real):  # type: ignore[misc, valid-type]
        """Finds what fits by its own count, and takes its time for that."""

        def __init__(self, network: Any, budget: Any, seconds: float, *others: Any) -> None:
            given.append(seconds)
            super().__init__(network, budget, 0.0, *others)

        def run(self) -> Any:
            clock.sleep(0 if limit is None else given[-1])
            return dataclasses.replace(super().run(), peak_bytes=0.0)

        def go_on(self, target: float, seconds: float, taken: Any = ()) -> Any:
            given.append(seconds)
            return self.run()

        def smallest(self, seconds: float) -> Any:
            given.append(seconds)
            return self.run()

    monkeypatch.setattr(fitting, "LimitedSearch", Listening)
    problem = question.candidates, question.asked, question.boxings, (), 1e3
    fastest = cheapest.choose(question.candidates, question.asked, question.boxings, None)
    found = fitting.LimitedProblem(*problem, limit).keep_limit(fastest)
    assert found.smallest is not None
    assert len(given) >= fitting.LEAST_TRIES + 3 and given[0] <= first
    assert limit is None or (given[0] > 0.5 * first and sum(given) <= 1.3 * limit)


def unproven(choose: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: dataclasses.replace(choose(*args), bound=0.0)


def test_a_search_that_was_ended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "cheapest", unproven(choosing.cheapest))
    said = (
        "the search ended at its time limit of 0.001 s; a faster plan may be found in more: "
        "Options(time_limit=0.004)"
    )
    assert said in planned(time_limit=0.001).notes
    # One with time left has ended by itself.
    assert not any("time limit" in note for note in (*planned().notes, *planned(time_limit=math.inf).notes))


def test_one_that_was_proven_does_not() -> None:
    plan = planned(time_limit=1e-6)
    assert plan.gap > 0 or not any("time limit" in note for note in plan.notes)


@pytest.mark.full
def test_time_kept_for_memory_does_not_narrow_a_search() -> None:
    """Where the values of a program are more than a device has, half of the time is for the cheapest plan.

    That is not too late for the strategies that differ from axis to axis.
    """
    small = dataclasses.replace(sbp.hardware.hardware_for("h100"), memory_bytes=1e6)
    grid = sbp.placement("h100", shape=(2, 4))
    plans = [
        sbp.compile(
            step, grid, in_sbp=([B, S(1)], [S(0), B]), options=sbp.Options(hardware=small, time_limit=limit)
        ).plan(jnp.zeros((256, 256)), jnp.zeros((512, 256)))
        for limit in (30.0, math.inf)
    ]
    assert plans[0].seconds == plans[1].seconds and plans[0].bound == plans[1].bound
    assert sum(math.prod(v.shape) * 4 for v in plans[0].physical.graph.values) > small.memory_bytes
