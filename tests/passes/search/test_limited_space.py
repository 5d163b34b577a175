"""The shortest step within a limit on memory, against every assignment of tiny programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbp import P, S
from sbp.hardware.catalogue import Hardware
from sbp.passes.physical.evaluate import HOLES, Evaluator
from sbp.passes.physical.exposure import Clock, Exposure
from sbp.passes.physical.insert import insert_boxing
from sbp.passes.physical.kernel_merges import merge_ops
from sbp.passes.physical.memory import Live, SmallestPeak
from sbp.passes.plan.budget import Budget, Load
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.flat_network import all_costs
from sbp.passes.plan.model import Model
from sbp.passes.plan.network import CostNetwork
from sbp.passes.plan.recompute import RecomputingModel
from sbp.passes.plan.solve import solve
from sbp.passes.program.trace import trace
from sbp.passes.search.limited_space import (
    LimitedProblem,
    LimitedSpace,
    missed_loads,
    time_of_peak,
    unsent_loads,
)
from sbp.passes.search.pool import PlanCandidate, Pool
from sbp.placement import placement
from tests.passes.physical.test_recompute import GIVEN, PLAIN
from tests.passes.plan.cheapest import choose
from tests.passes.plan.test_optimal import problem as plain_problem
from tests.passes.search.test_explore import HARDWARE, SLOW, beside, chain, problem, searched, sent_twice

WITHIN = 1.1
"""Of the shortest step of all assignments that fit. What a plan hides that is unlike all that were looked at
is not known: 9 % for `chain` and SLOW."""
Limited = tuple[Model, CostNetwork, float, Clock]


def limited(fn: Callable[..., Any], hardware: Hardware, part: float) -> Limited:
    """The problem, and a limit so far from the least peak to that of the cheapest plan."""
    plain, _, _ = problem(fn, hardware)
    candidates = replace(plain.c, **vars(merge_ops(plain.graph)))
    model = Model(candidates, plain.boundary, plain.boxings)
    network, clock = model.build(), Clock(candidates, plain.boxings)
    states, costs = all_costs(network)
    order = np.argsort(costs, kind="stable")
    finite = np.flatnonzero(costs < 4 * costs[order[0]])
    sample = np.random.default_rng(0).permutation(finite)[:200]
    peaks = [
        clock.program(model.chosen_signatures(states[:, k].tolist(), 0.0, 0.0)).peak_bytes() for k in sample
    ]
    most = clock.program(model.chosen_signatures(states[:, order[0]].tolist(), 0.0, 0.0)).peak_bytes()
    return model, network, min(peaks) + part * (most - min(peaks)), clock


def shortest_that_fits(given: Limited, found_seconds: float) -> float:
    """The shortest step of every assignment that keeps the limit."""
    model, network, limit, clock = given
    states, total = all_costs(network)
    best = found_seconds
    for k in np.flatnonzero(total <= 2.0 * found_seconds):
        assignment = model.chosen_signatures(states[:, k].tolist(), 0.0, 0.0)
        takes = clock.program(assignment)
        if takes.peak_bytes() <= limit:
            best = min(best, clock.times_of(takes, assignment.beyond_seconds).step_seconds)
    return best


@pytest.mark.some(1)
@pytest.mark.parametrize("fn", [beside, chain])
@pytest.mark.parametrize("hardware", [HARDWARE, SLOW])
def test_step_is_near_the_shortest_that_fits(fn: Callable[..., Any], hardware: Hardware) -> None:
    given = limited(fn, hardware, 0.5)
    model, _, limit, clock = given
    found = searched(model, hardware, limit)
    assert found.smallest is None and found.takes is not None
    assert found.takes.peak_bytes() <= limit
    seconds = clock.times_of(found.takes, found.assignment.beyond_seconds).step_seconds
    assert seconds <= WITHIN * shortest_that_fits(given, seconds)


def test_a_looser_limit_is_never_worse() -> None:
    """What was looked at before the limit was seen to bind is looked at under every limit."""
    steps = list[float]()
    for part in (0.5, 1.0, 4.0):
        model, _, limit, clock = limited(sent_twice, SLOW, part)
        found = searched(model, SLOW, limit)
        steps.append(clock.times(found.assignment).step_seconds)
    assert steps == sorted(steps, reverse=True)


def space_of(fn: Callable[..., Any], hardware: Hardware, part: float) -> LimitedSpace:
    model, _, limit, clock = limited(fn, hardware, part)
    asked = LimitedProblem(model.c, model.boundary, model.boxings, (), limit)
    pool = Pool(limit, Effort().count)
    pool.bind()
    return LimitedSpace(asked, pool, clock, 0.0)


def test_what_cannot_fit_has_a_smallest_peak_and_a_bound_on_it() -> None:
    space = space_of(chain, HARDWARE, 0.5)
    base = space.look(solve(space.network).states, "any")
    space.problem = replace(space.problem, limit_bytes=1.0)
    space.pool.limit_bytes = 1.0
    found = space.fit(base, Effort())
    assert isinstance(found, SmallestPeak)
    assert 1.0 < found.bound_bytes <= found.bytes == min(x.memory_bytes for x in space.pool.candidates)


def test_some_plans_alone_prove_nothing() -> None:
    """The smallest peak of some signatures is no bound of all."""
    space = space_of(chain, HARDWARE, 0.5)
    base = space.look(solve(space.network).states, "any")
    space.problem = replace(space.problem, limit_bytes=1.0, proves=False)
    space.pool.limit_bytes = 1.0
    found = space.fit(base, Effort())
    assert isinstance(found, SmallestPeak) and found.bound_bytes == found.bytes and space.bound == 0.0


def test_what_the_search_begins_at_is_a_candidate() -> None:
    """It may wait for less than what is cheaper one thing after the other."""
    space = space_of(chain, HARDWARE, 0.9)
    found = space.fit(space.look(solve(space.network).states, "any"), Effort())
    own = [x for x in space.pool.counted if x.states in space.seen]
    assert isinstance(found, PlanCandidate)
    assert "at prices" in {x.source for x in space.pool.candidates}
    assert space.best(found).times.step_seconds == min(x.times.step_seconds for x in own)


def test_near_a_plan_as_much_counts_as_keeps_the_limit_there() -> None:
    """What the search counts of a plan stands to its limit as what the evaluator says does to the user's."""
    space = space_of(chain, HARDWARE, 0.5)
    at = space.look(solve(space.network).states, "any")
    limit, budget = space.counted_limit(at), space.budget
    assert limit is not None and at.memory_bytes > space.problem.limit_bytes
    counted, needed = limit / budget.peak_bytes(at.states), space.problem.limit_bytes / at.memory_bytes
    assert counted == pytest.approx(needed, rel=0.01) and counted <= needed


def test_values_for_later_uses_have_the_phase_of_these() -> None:
    """They are beyond the program's own values; every group of moves has a share."""

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = x + jax.nn.softmax(x @ w)
        return (x**2).mean()

    ws, x = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3, jax.ShapeDtypeStruct((256, 64), jnp.float32)
    place = placement("cpu", shape=(4,))
    given = plain_problem(trace(jax.grad(loss), (ws, x), {}).graph, place)
    model = RecomputingModel(*given, 1e5)
    network = model.build()
    later = {v for v in model.edge_values if v >= len(given[0].graph.values)}
    exposure = Exposure(model, network)
    assert later and {exposure.phases[v] for v in later} <= {"forward", "backward", ""}
    clock, states = Clock(model.c, model.boxings), solve(network).states
    times = clock.times(model.chosen_signatures(states, 0.0, 0.0))
    assert max(times.sent_seconds, default=0) < len(model.c.graph.values)
    assert set(exposure.shares(times)) >= set(exposure.groups)


MODEL = RecomputingModel(*GIVEN, 1e6, (), HOLES)
NETWORK = MODEL.build()
STATES = solve(NETWORK).states
EVALUATOR = Evaluator(insert_boxing(GIVEN[0], PLAIN, GIVEN[2]), GIVEN[2].network)


def test_the_time_of_the_peak_is_when_the_last_is_made_of_what_is_there() -> None:
    at = time_of_peak(EVALUATOR, MODEL)
    assert at is not None and 0 <= at <= MODEL.end
    graph = EVALUATOR.physical.graph
    # Results have spaces of their own all the time.
    makers = {v: n for v, n in graph.producers().items() if v not in graph.outputs}
    made = [makers[x.version[0]] for x in EVALUATOR.at_peak if x.version[0] in makers]
    assert at == max(MODEL.times[n.id][0] for n in made if n.id in MODEL.times)


def test_a_peak_in_a_loop_is_at_the_time_of_the_op_in_its_body() -> None:
    """What precedes the loop is there too, and would be a time at which nothing is missed."""

    def loss(ws: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return x + jax.nn.softmax(jnp.tile(x, 4) @ w), None

        return (jax.lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2).mean()

    ws, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in [(3, 256, 64), (512, 64)])
    given = plain_problem(trace(jax.grad(loss), (ws, x), {}).graph, placement("cpu", shape=(2,)))
    model = RecomputingModel(*given, 1e6, (), HOLES)
    model.build()
    evaluator = Evaluator(insert_boxing(given[0], choose(*given), given[2]), given[2].network)
    loops = [n for n in given[0].graph.nodes if n.bodies]
    inside = {v: n for loop in loops for b in loop.bodies for n in b.nodes for v in n.outputs}
    assert any(x.version[0] in inside for x in evaluator.at_peak)
    at = time_of_peak(evaluator, model)
    assert at is not None and any(model.times[n.id][0] < at < model.times[n.id][1] for n in loops)


def test_what_is_not_counted_is_added_around_that_time() -> None:
    at = time_of_peak(EVALUATOR, MODEL)
    assert at is not None
    nothing = Budget((), 1.0)
    found = missed_loads(EVALUATOR, MODEL, nothing, STATES)
    *waiting, missed = found
    assert missed.node == -1 and missed.start < at < missed.end
    assert all(x.node >= 0 for x in waiting)
    # With it the count is what the evaluator finds, and nothing is missed any more.
    counted = Budget(found, 1.0).peak_bytes(STATES, missed.start, missed.end)
    assert counted == pytest.approx(EVALUATOR.peak_bytes()) and missed.bytes[0] > 0.0
    left = missed_loads(EVALUATOR, MODEL, Budget(found, 1.0), STATES)
    assert sum(float(x.bytes.max()) for x in left) < 1e-6
    # What is alive at other times only does not count.
    other = Load(-1, missed.end, missed.end + 5, np.array([1e9]))
    again = missed_loads(EVALUATOR, MODEL, Budget((other,), 1.0), STATES)
    assert again[-1].bytes[0] == missed.bytes[0]


def test_what_waits_until_it_is_sent_with_others_is_counted_for_all_of_its_kind() -> None:
    """Gradients of layers that are alike: of one it is seen, and to send the other would free no more."""
    kinds = dict[Any, list[int]]()
    for v, once in MODEL.boxed_once.items():
        if (P,) in once.supply.needs and (S(0),) in MODEL.states[once.copy]:
            kinds.setdefault(MODEL.graph.values[v].shape, []).append(v)
    seen, other = next(own for own in kinds.values() if len(own) > 1)[:2]
    states = list(STATES)

    def choose(v: int, is_sent: bool) -> None:
        once = MODEL.boxed_once[v]
        lies = MODEL.states[once.copy]
        states[once.supply.variable] = once.supply.needs.index((P,))
        states[once.copy] = lies.index((S(0),)) + (0 if is_sent else len(lies) // 2)

    evaluator: Any = SimpleNamespace(at_peak=[Live((seen, (P,)), 1.0)])
    end = MODEL.end

    def waiting(loads: Sequence[Load]) -> dict[int, Load]:
        found = unsent_loads(evaluator, MODEL, Budget(tuple(loads), 1.0), states, end)
        alike = {MODEL.boxed_once[v].copy for v in (seen, other)}
        return {x.node: x for x in found if x.node in alike}

    choose(seen, True)
    choose(other, False)
    found = waiting(MODEL.loads)
    for v in (seen, other):
        once, load = MODEL.boxed_once[v], found[MODEL.boxed_once[v].copy]
        half = load.bytes.size // 2
        assert (load.start, load.end) == (once.at + 1, end)
        assert set(load.bytes[:half]) == set(MODEL.held_bytes(v, ((P,),))) and not load.bytes[half:].any()
    # It is counted once, and not for what was sent and is gone.
    assert waiting([*MODEL.loads, *found.values()]) == {}
    choose(other, True)
    assert set(waiting(MODEL.loads)) == {MODEL.boxed_once[seen].copy}
    choose(seen, False)
    assert waiting(MODEL.loads) == {}
