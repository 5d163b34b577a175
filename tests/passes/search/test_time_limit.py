"""A limit on time cuts a search off; the plan says so, and is no worse than what people write by hand."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.passes.physical.exposure import Clock
from sbp.passes.plan.bounds import least_seconds, solve_indexed
from sbp.passes.plan.effort import Effort, WorkCount, until_over
from sbp.passes.plan.model import Model
from sbp.passes.search import search
from sbp.passes.search.floor import CutModel, CutOff, add_floor, axes_alike
from sbp.passes.search.pool import Pool
from tests.golden import two_stages
from tests.passes.plan.cheapest import choose
from tests.passes.questions import asked

GRID = sbp.placement("h100", shape=(2, 4))
W, X = np.ones((64, 128), np.float32), np.ones((512, 64), np.float32)


def step(w: Any, x: Any) -> Any:
    value, slope = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
    return w - 0.1 * slope, value


@pytest.fixture
def question() -> Any:
    return asked(step, GRID, W, X)


def planned(in_sbp: Any = sbp.AUTO, **options: Any) -> sbp.Plan:
    given = sbp.Options(cache=False, **options)
    return sbp.compile(step, GRID, in_sbp=in_sbp, options=given).plan(W, X)


def test_a_model_is_given_up_when_the_time_is_over(question: Any) -> None:
    given = question.candidates, question.boundary, question.boxings
    with pytest.raises(CutOff):
        CutModel(*given, lambda: True).build_indexed()
    whole = CutModel(*given, lambda: False).build_indexed()
    assert whole.cells == Model(*given).build_indexed().cells


def test_few_signatures_are_some_of_all_and_cost_the_same(question: Any) -> None:
    whole = Model(question.candidates, question.boundary, question.boxings)
    few = Model(axes_alike(question.candidates, ((0, 1),)), question.boundary, question.boxings)
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
    assert 0 < least <= choose(question.candidates, question.boundary, question.boxings).seconds


def test_a_plan_in_no_time_says_so_and_is_no_worse_than_layouts_by_name(question: Any) -> None:
    best, cut = planned(), planned(time_limit=0.0)
    pool, clock = Pool(math.inf, WorkCount()), Clock(question.candidates, question.boxings)
    add_floor(pool, clock, question.boundary, ())
    assert {"data", "ZeRO-3", "tensor", "data x tensor"} <= {x.source for x in pool.candidates}
    assert pool.best is not None
    assert best.step_seconds <= cut.step_seconds <= pool.best.times.step_seconds
    assert cut.bound <= best.seconds
    said = "the search was cut off by Options(time_limit=0): a faster plan may be found with more"
    assert said in cut.notes and cut.cut_short and not best.cut_short


def test_layouts_by_name_are_looked_at_where_the_cheapest_plan_is_not_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solved, answer, sources = search.solve_indexed, search.Search.answer, list[set[str]]()

    def heard(self: search.Search, *given: Any) -> Any:
        sources.append({x.source for x in self.pool.candidates})
        return answer(self, *given)

    monkeypatch.setattr(search.Search, "answer", heard)
    monkeypatch.setattr(search.Search, "explore", lambda *_: None)
    planned()
    unproven = lambda *given, **terms: replace(solved(*given, **terms), bound=0.0)  # noqa: E731
    monkeypatch.setattr(search, "solve_indexed", unproven)
    assert not planned().cut_short
    assert sources[0] == {"the cheapest plan"}
    assert {"the cheapest plan", "data", "ZeRO-3", "tensor", "data x tensor"} <= sources[1]


def test_a_limit_that_nothing_reaches_changes_nothing() -> None:
    free, limited = planned(), planned(time_limit=1000.0)
    assert (limited.step_seconds, limited.seconds, limited.notes) == (
        free.step_seconds,
        free.seconds,
        free.notes,
    )


def test_what_is_asked_for_holds_in_no_time() -> None:
    """Signatures that differ from axis to axis are not among the few."""
    asked_for = [sbp.B, sbp.S(0)], [sbp.S(0), sbp.B]
    plan = planned(asked_for, time_limit=0.0)
    assert plan.in_sbp[:2] == tuple(map(tuple, asked_for))


def test_strict_plans_and_stages_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[float | None]()

    class Listening(search.Search):
        def run(self) -> Any:
            limits.append(self.request.terms.time_limit_seconds)
            return super().run()

    monkeypatch.setattr("sbp.passes.chain.Search", Listening)
    planned(time_limit=1000.0, strict_nonfinite=True)
    options = sbp.Options(time_limit=1000.0, cache=False)
    sbp.compile(two_stages.step, two_stages.step_placement, options=options).plan(*two_stages.step_args())
    assert limits == [500.0] * 4


@pytest.mark.parametrize("cut_after", [1, 5, 40])
def test_a_search_may_be_cut_off_anywhere(cut_after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two counted steps; then it ends with what is known, and says so."""
    looks = iter(range(1000))
    count = WorkCount(lambda: next(looks) >= cut_after)
    monkeypatch.setattr("sbp.passes.request.until_over", lambda _: Effort(count))
    plan = planned(time_limit=1.0)
    assert math.isfinite(plan.step_seconds) and plan.bound <= plan.seconds * (1 + 1e-9)
    assert plan.cut_short == count.is_cut


def test_effort_is_counted_and_cut_off() -> None:
    assert until_over(None).seconds_left == math.inf and until_over(0.0).is_spent
    effort = Effort().at_most(2.0)
    effort.count.add(3.0)
    assert effort.seconds_left == 0.0 and effort.is_spent and not effort.count.is_cut
