"""A limit on time is kept: by a clock that counts work, no phase begins after it but what a plan needs.

What a phase takes by that clock is said here, in parts of what reading the program takes; so it does not
matter how fast the machine is, or what else it does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from benchmarks.musts import MODELS, traced
from sbp.passes import chain
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.paths import Boxings
from sbp.passes.chain import Logical
from sbp.passes.explain.plan import SAME, PlanData
from sbp.passes.physical.exposure import Clock
from sbp.passes.physical.known_layouts import FITTING, kept_bytes
from sbp.passes.plan.hurried import model_of_few
from sbp.passes.plan.network import CostNetwork
from sbp.passes.plan.phases import Phases
from sbp.passes.plan.pins import boundary
from sbp.passes.plan.seeds import restricted, tensors_of
from sbp.passes.plan.solve import solve
from sbp.passes.request import Request
from sbp.runtime.compile.traced_call import request_of

GRID = sbp.placement("h100", shape=(2, 4))
WORK: Mapping[str, float] = {
    "candidates": 1.0,
    "model of few signatures": 0.5,
    "search": 0.3,
    "what ops take at least": 0.2,
    "model": 0.5,
    "memory": 0.6,
    "boxing": 0.2,
    "report": 0.9,
    "look": 0.4,
    "cheapest plan looked at": 0.3,
    "step in XLA's order": 0.5,
}
"""What phases take, of what reading the program takes; others nothing."""
MODEL_WORK = 4.0
"""What building the model of all signatures takes, where it is not given up."""


class WorkPhases(Phases):
    """Phases by a clock that counts work.

    Arguments:
      unit: what reading the program takes, seconds.
      checks: how often a model asks the clock while it is built.
    """

    def __init__(self, unit: float, checks: int) -> None:
        self.at, self.tick, self.unit, self.checks = 0.0, 0.0, unit, checks
        super().__init__(self._now)

    def _now(self) -> float:
        self.at += self.tick
        return self.at

    def again(self) -> WorkPhases:
        return self

    @contextmanager
    def of(self, name: str, *, needed: bool = True) -> Iterator[None]:
        with super().of(name, needed=needed):
            self.at += self.unit * WORK.get(name, 0.0)
            self.tick = MODEL_WORK * self.unit / self.checks if name == "model of all signatures" else 0.0
            try:
                yield
            finally:
                self.tick = 0.0


def products(w: Any, x: Any) -> Any:
    """A train step of two weights."""

    def loss(w: Any) -> Any:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]))

    value, slopes = jax.value_and_grad(loss)(w)
    return [a - 0.1 * b for a, b in zip(w, slopes, strict=True)], value


def small(memory_limit: float = math.inf) -> Logical:
    """A program of two weights on two axes, of which nothing is annotated."""
    options = sbp.Options(memory_limit=memory_limit, cache=False)
    program = sbp.compile(products, GRID, donate_argnums=0, options=options)
    w = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 2
    traced_call = program.trace(w, jax.ShapeDtypeStruct((8192, 4096), jnp.float32))
    request = request_of(traced_call, traced_call.signatures(program.in_sbp, program.out_sbp), GRID, options)
    return Logical(request, traced_call.traced, Boxings(Network(GRID, request.hardware)))


def planned(logical: Logical, limit: float, unit: float) -> tuple[PlanData, WorkPhases]:
    """The plan of a program under a limit, and its phases."""
    phases = WorkPhases(unit, 2 * len(logical.graph.nodes))
    request = logical.request
    terms = replace(request.terms, time_limit_seconds=limit)
    request = replace(request, terms=terms, phases=phases).timed()
    plan: PlanData = chain.PLACEMENT.run(replace(logical, request=request), phases=phases)
    return plan, phases


def check_kept(logical: Logical, limit: float, unit: float) -> None:
    """No phase begins after the limit but what is needed; a plan that took longer says so."""
    plan, phases = planned(logical, limit, unit)
    kept = chain.AFTER_SHARE * unit
    late = [p.name for p in phases.done if not p.needed and p.begun > limit - kept]
    assert not late, (unit, limit)
    needed = phases.at - phases.optional_seconds
    assert phases.at <= max(1.1 * limit, needed + 0.1 * limit), (unit, limit, phases.done)
    said = [note for note in plan.notes if note.startswith("planning took")]
    assert bool(said) == (phases.at > limit + max(0.1 * limit, 0.1)), (unit, limit)
    assert math.isfinite(plan.step_seconds) and plan.bound <= plan.seconds * (1 + SAME)


@pytest.mark.parametrize("unit", [0.1, 0.4, 2.0])
@pytest.mark.parametrize("limit", [1.0, 2.0, 5.0])
def test_nothing_begins_after_the_limit_but_what_a_plan_needs(limit: float, unit: float) -> None:
    check_kept(small(), limit, unit)


PROGRAMS = (("gpt", 1), ("llama-remat", 1), ("llama-scan", 2), ("mixture", 1), ("resnet", 50))


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("shape", [(8,), (2, 2, 2)])
@pytest.mark.parametrize(("model", "layers"), PROGRAMS)
def test_it_is_so_for_programs_of_all_kinds(
    model: str, layers: int, shape: tuple[int, ...], limit: float
) -> None:
    check_kept(traced(MODELS[model], shape, layers), limit, 0.4)


def test_with_time_enough_everything_is_done() -> None:
    """And the plan is that of no limit."""
    logical = small()
    plan, phases = planned(logical, 1000.0, 1.0)
    names = {p.name for p in phases.done}
    assert {"model of all signatures", "search", "look", "step in XLA's order", "report"} <= names
    assert "model of few signatures" not in names
    free = replace(logical.request.terms, time_limit_seconds=None)
    other: PlanData = chain.PLACEMENT.run(replace(logical, request=replace(logical.request, terms=free)))
    assert (plan.seconds, plan.step_seconds, plan.bound) == (other.seconds, other.step_seconds, other.bound)


def test_a_late_plan_says_what_it_took() -> None:
    plan, phases = planned(small(), 1.0, 2.0)
    (said,) = (note for note in plan.notes if note.startswith("planning took"))
    assert (
        "more than Options(time_limit=1): to read this program, to find any plan and to write it down" in said
    )
    assert not any(p.name == "look" for p in phases.done)


def test_phases_inside_of_others_count_once() -> None:
    ticks = iter(range(100))
    phases = Phases(lambda: float(next(ticks)))
    with phases.of("all"), phases.of("search", needed=False), phases.of("look", needed=False):
        pass
    look, search, whole = phases.done
    assert (look.inside, search.inside, whole.inside) == (2, 1, 0)
    assert (look.seconds, search.seconds, whole.seconds) == (1.0, 3.0, 5.0)
    assert phases.optional_seconds == search.seconds


def test_a_request_without_a_limit_has_a_clock_too() -> None:
    hardware = sbp.hardware.hardware_for("cpu")
    request = Request("f", sbp.placement("cpu", shape=(1,)), hardware, (), (), ())
    assert request.timed().phases is not request.phases and request.timed().seconds_left is None


@pytest.mark.full
def test_what_fits_is_found_without_a_search_where_time_is_short() -> None:
    """The model under a limit on memory is not begun, and the plan says what it is instead."""
    fastest, _ = planned(small(), 1000.0, 0.1)
    limit = 0.87 * fastest.memory_bytes
    plan, phases = planned(small(limit), 1.0, 0.4)
    assert plan.memory_bytes <= limit < fastest.memory_bytes
    assert not any("under the limit on memory" in p.name for p in phases.done)
    assert any("no time to search under the limit on memory; this is" in note for note in plan.notes)
    searched, phases = planned(small(limit), 1000.0, 0.1)
    assert searched.memory_bytes <= limit and searched.seconds <= plan.seconds
    assert any("under the limit on memory" in p.name for p in phases.done)
    assert not any("no time to search" in note for note in searched.notes)


def test_what_no_known_layout_fits_is_searched_for_late() -> None:
    """A program that fits is not refused because its time is over."""
    fastest, _ = planned(small(), 1000.0, 0.1)
    plan, phases = planned(small(0.8 * fastest.memory_bytes), 1.0, 1.0)
    assert plan.memory_bytes <= 0.8 * fastest.memory_bytes
    names = {p.name for p in phases.done if p.needed}
    assert "layers that compute again" in names


def test_what_is_kept_is_no_more_than_a_plan_needs() -> None:
    """Else layouts that fit would be passed over; and most of what it needs, so that few are looked at."""
    logical = small()
    listed: Any = chain.list_candidates(logical)
    ends = boundary(logical.graph, logical.asked_inputs, (None,) * 3, logical.request.ties, GRID)
    model = model_of_few(listed.candidates, ends, logical.boxings)
    network = model.build()
    tensors, clock = tensors_of(model.graph, ends.ties), Clock(listed.candidates, logical.boxings)
    for use in FITTING:
        unary = restricted(model, (use, use), tensors)
        states = solve(CostNetwork(unary, network.edges)).states
        takes = clock.program(model.chosen(states, 0.0, 0.0), logical.request.donated)
        assert 0.5 * takes.peak_bytes() < kept_bytes(model, states) <= takes.peak_bytes()
