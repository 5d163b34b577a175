"""Parallelisms on many axes, where neighbouring ones are used as one."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.hardware.catalogue import hardware_for
from sbp.passes.plan import constants
from sbp.passes.plan.model import Model
from sbp.passes.plan.seeds import DATA, TENSOR, seeds_for
from sbp.passes.plan.solve import solve
from sbp.passes.plan.start_points import states_of
from sbp.passes.search.explore import Explorer
from sbp.passes.search.floor import axes_alike, axis_groups
from sbp.passes.search.limited_space import LimitedProblem, LimitedSpace
from sbp.passes.search.search import Search
from tests.passes.questions import asked

FOUR = sbp.placement("h100", shape=(2, 2, 2, 2))
ARGS = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 2048), (2048, 512), (1024, 512)))


def step(up: Any, down: Any, x: Any) -> Any:
    """Two layers, trained."""
    ups, downs = jax.grad(lambda up, down: ((jax.nn.relu(x @ up) @ down - x) ** 2).mean(), (0, 1))(up, down)
    return up - 0.1 * ups, down - 0.1 * downs


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((2, 2, 2, 2), ((0,), (1, 2, 3))),
        ((4, 8, 8), ((0, 1), (2,))),
        ((2, 2, 2), ((0,), (1, 2))),
        ((2, 16, 16), ((0,), (1, 2))),
        ((8,), ((0,),)),
    ],
)
def test_axes_are_grouped_by_hosts(shape: tuple[int, ...], groups: Any) -> None:
    """Where all are of one kind, or one reaches beyond a host, the outermost stands alone."""
    assert axis_groups(sbp.placement("h100", shape=shape), hardware_for("h100")) == groups


def test_pairs_are_of_groups() -> None:
    seeds = seeds_for(4, outer=2)
    assert (DATA, DATA, TENSOR, TENSOR) in seeds and all(len(seed) == 4 for seed in seeds)


@pytest.mark.full
def test_what_differs_within_a_group_is_left_out() -> None:
    question = asked(step, FOUR, *ARGS)
    groups = axis_groups(FOUR, hardware_for("h100"))
    few = axes_alike(question.candidates, groups)
    for node in (n for n in question.candidates.graph.nodes if n.op == "dot_general"):
        whole, left = question.candidates.strategies[node.id], few.strategies[node.id]
        assert {id(s) for s in left} < {id(s) for s in whole}
        signatures = [nd for s in left for nd in (*s.operands, *s.results)]
        assert all(len({nd[a] for a in group}) == 1 for nd in signatures for group in groups)
        assert any(nd[0] != nd[1] for nd in signatures)


@pytest.mark.full
def test_programs_too_large_to_write_down_have_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of them at least, and no step is longer than that of the cheapest plan; where even the model of
    groups is too large, that one is kept."""
    args = *ARGS[:2], jax.ShapeDtypeStruct((65536, 512), jnp.float32)  # so large that it is worth to send
    question, found = asked(step, FOUR, *args), list[Explorer]()
    few = axes_alike(question.candidates, axis_groups(FOUR, hardware_for("h100")))
    whole, grouped = (
        Model(candidates, question.boundary, question.boxings).build_indexed().cells
        for candidates in (question.candidates, few)
    )
    assert grouped < whole / 40
    run = Explorer.run

    def listening(self: Explorer, *turns: Any) -> None:
        found.append(self)
        run(self, *turns)

    monkeypatch.setattr(Explorer, "run", listening)
    plans = []
    for cells in (2 * grouped, grouped - 1):  # the cheapest plan's strategies are there too
        monkeypatch.setattr(constants, "WRITTEN_CELLS", cells)
        options = sbp.Options(cache=False)
        plans.append(sbp.compile(step, FOUR, options=options, donate_argnums=(0, 1)).plan(*args))
    explored, kept = plans
    assert len(found) == 1 and len({x.source for x in found[0].pool.candidates}) >= 8
    assert explored.step_seconds <= kept.step_seconds
    assert explored.bound == kept.bound and explored.cheapest_gap == kept.gap
    assert [any("too large" in note for note in plan.notes) for plan in plans] == [False, True]


def test_a_plan_keeps_its_strategies() -> None:
    """The model of few strategies has it, at what it takes in that of all."""
    place = sbp.placement("h100", shape=(2, 2, 2))
    question = asked(step, place, *ARGS)
    model = Model(question.candidates, question.boundary, question.boxings)
    network = model.build()
    found = solve(network)
    known = model.chosen_signatures(found.states, found.cost, found.bound)
    groups = axis_groups(place, hardware_for("h100"))
    few = axes_alike(question.candidates, groups, known)
    assert all(any(s is known.strategies[i] for s in own) for i, own in few.strategies.items())
    grouped = Model(few, question.boundary, question.boxings)
    small = grouped.build()
    states = states_of(grouped, small, known)
    assert small.cost(states) == pytest.approx(found.cost, rel=1e-12)
    assert grouped.chosen_signatures(states, found.cost, found.bound).strategies == known.strategies


@pytest.mark.full
def test_under_a_limit_few_strategies_are_searched_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit with them is searched among all, and refused with their bound."""
    place, searched = sbp.placement("h100", shape=(2, 2, 2)), list[LimitedProblem]()
    fit = LimitedSpace.fit

    def listening(self: LimitedSpace, *args: Any) -> Any:
        searched.append(self.problem)
        return fit(self, *args)

    monkeypatch.setattr(LimitedSpace, "fit", listening)
    options = partial(sbp.Options, cache=False)

    def planned(limit: float) -> sbp.Plan:
        program = sbp.compile(step, place, options=options(memory_limit=limit), donate_argnums=(0, 1))
        return program.plan(*ARGS)

    def refused(limit: float) -> str:
        """What no peak is below."""
        with pytest.raises(sbp.SbpError) as caught:
            planned(limit)
        return str(caught.value).partition("and none below ")[2].partition(" by")[0]

    fastest = planned(math.inf)
    tight = 0.7 * fastest.memory_bytes
    assert not searched and planned(tight).fits and [p.proves for p in searched] == [True]
    usual = refused(0.2 * fastest.memory_bytes)
    assert usual.endswith("MB")
    searched.clear()
    # As for a program whose tables are too large together; each by itself is not.
    monkeypatch.setattr(
        Search, "few", lambda self, known, cells: axes_alike(self.candidates, self.groups, known.assignment)
    )
    plan = planned(tight)
    assert plan.fits and [p.proves for p in searched] == [False]
    searched.clear()
    assert refused(0.2 * fastest.memory_bytes) == usual
    assert [p.proves for p in searched] == [False, True]
