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

import pytest

from benchmarks import cases
from benchmarks.musts import MODELS, traced
from sbp.passes import chain
from sbp.passes.explain.plan import PlanData
from sbp.passes.plan.phases import Phases
from sbp.passes.request import Request

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


def small(model: str, layers: int, shape: tuple[int, ...]) -> Any:
    """A program of which nothing is annotated, for a device with room."""
    make = {"gpt-small": cases.gpt_case, **MODELS}[model]
    return traced(make, shape, layers)


def planned(logical: Any, limit: float, unit: float) -> tuple[PlanData, WorkPhases]:
    """The plan of a program under a limit, and its phases."""
    phases = WorkPhases(unit, 2 * len(logical.graph.nodes))
    request = logical.request
    terms = replace(request.terms, time_limit_seconds=limit)
    request = replace(request, terms=terms, phases=phases).timed()
    plan: PlanData = chain.PLACEMENT.run(replace(logical, request=request), phases=phases)
    return plan, phases


PROGRAMS = [
    ("gpt-small", 1, (8,)),
    ("gpt-small", 1, (2, 2, 2)),
    *(
        pytest.param(*row, marks=pytest.mark.slow)
        for row in (
            ("llama-remat", 1, (8,)),
            ("llama-remat", 1, (2, 2, 2)),
            ("llama-scan", 2, (8,)),
            ("llama-scan", 2, (2, 2, 2)),
            ("mixture", 1, (8,)),
            ("mixture", 1, (2, 2, 2)),
            ("resnet", 50, (8,)),
            ("resnet", 50, (2, 2, 2)),
        )
    ),
]


@pytest.mark.parametrize(("model", "layers", "shape"), PROGRAMS)
def test_nothing_begins_after_the_limit_but_what_a_plan_needs(
    model: str, layers: int, shape: tuple[int, ...]
) -> None:
    logical = small(model, layers, shape)
    for unit in (0.1, 0.4, 2.0):
        for limit in (1.0, 2.0, 5.0):
            plan, phases = planned(logical, limit, unit)
            kept = chain.AFTER_SHARE * unit
            late = [p.name for p in phases.done if not p.needed and p.begun > limit - kept]
            assert not late, (unit, limit)
            needed = phases.at - phases.optional_seconds
            assert phases.at <= max(1.1 * limit, needed + 0.1 * limit), (unit, limit, phases.done)
            said = [note for note in plan.notes if "Options(time_limit=" in note and "took" in note]
            assert bool(said) == (phases.at > limit + max(0.1 * limit, 0.1)), (unit, limit)
            assert math.isfinite(plan.step_seconds) and plan.bound <= plan.seconds


def test_with_time_enough_everything_is_done() -> None:
    """And the plan is that of no limit."""
    logical = small("gpt-small", 1, (2, 2, 2))
    plan, phases = planned(logical, 1000.0, 1.0)
    names = {p.name for p in phases.done}
    assert {"model of all signatures", "search", "look", "step in XLA's order", "report"} <= names
    assert "model of few signatures" not in names
    free = replace(logical.request.terms, time_limit_seconds=None)
    other: PlanData = chain.PLACEMENT.run(replace(logical, request=replace(logical.request, terms=free)))
    assert (plan.seconds, plan.step_seconds, plan.bound) == (other.seconds, other.step_seconds, other.bound)


def test_a_late_plan_says_what_it_took() -> None:
    plan, phases = planned(small("gpt-small", 1, (2, 2, 2)), 1.0, 2.0)
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
    import sbp

    hardware = sbp.hardware.hardware_for("cpu")
    request = Request("f", sbp.placement("cpu", shape=(1,)), hardware, (), (), ())
    assert request.timed().phases is not request.phases and request.timed().seconds_left is None
