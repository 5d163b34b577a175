"""The plan with the shortest step, against every assignment of tiny programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest

from sbp.hardware.catalogue import Hardware, Link
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.paths import Boxings
from sbp.passes.physical.exposure import Clock, Exposure, phases_of
from sbp.passes.plan import constants
from sbp.passes.plan.candidates import enumerate_candidates
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.flat_network import all_costs
from sbp.passes.plan.model import ChosenSignatures, Model
from sbp.passes.plan.network import CostNetwork
from sbp.passes.plan.pins import boundary
from sbp.passes.plan.seeds import seeds_for
from sbp.passes.program.trace import trace
from sbp.passes.request import Request, Terms
from sbp.passes.search import pool as pools
from sbp.passes.search.explore import Crossover, Explorer, PlanChain, with_part
from sbp.passes.search.pool import PlanCandidate, Pool, Space
from sbp.passes.search.search import FoundSignatures, Search
from sbp.placement import placement
from sbp.signature import Split
from tests.passes.plan.cheapest import cheapest

LINE = placement("cpu", shape=(4,))
# Sending takes about as long as computing, so that it matters what runs beside what.
HARDWARE = Hardware("test", ((8, 3e6),), 3e6, 1e8, 1e12, (Link(1 << 60, 4e6, 1e-6),), 1.0, platform="gpu")
SLOW = replace(HARDWARE, links=(Link(1 << 60, 1e6, 1e-6),))
FAST = replace(HARDWARE, links=(Link(1 << 60, 16e6, 1e-6),))
WITHIN = 1.03
"""Of the shortest step of all assignments."""


def problem(
    fn: Callable[..., Any], hardware: Hardware = HARDWARE
) -> tuple[Model, CostNetwork, ChosenSignatures]:
    """The model of a function of three square matrices, the first of which lies by rows."""
    xs = tuple(jax.ShapeDtypeStruct((64, 64), jnp.float32) for _ in range(3))
    graph = trace(fn, xs, {}).graph
    pins = [(Split(0),), *[None] * (len(graph.inputs) - 1)]
    free = [None] * len(graph.outputs)
    candidates = enumerate_candidates(graph, LINE, {})
    model = Model(candidates, boundary(graph, pins, free, free, LINE), Boxings(Network(LINE, hardware)))
    network = model.build_indexed()
    return model, network.dense(), cheapest(model, network)


def shortest_of_all(model: Model, network: CostNetwork, found_seconds: float) -> float:
    """The shortest step of every assignment.

    Those that take more than twice as long as one that was found, one thing after the other, are left out:
    of two streams one is busy at least half of the time.
    """
    states, total = all_costs(network)
    clock = Clock(model.c, model.boxings)
    wanted = np.flatnonzero(total <= 2.0 * found_seconds)
    found = (model.chosen_signatures(tuple(states[:, k].tolist()), 0.0, 0.0) for k in wanted)
    return min(clock.times(assignment).step_seconds for assignment in found)


def searched(
    model: Model, hardware: Hardware = HARDWARE, limit: float = np.inf, effort: float = 1.0
) -> FoundSignatures:
    """What the search finds for a problem."""
    free = (None,) * len(model.graph.inputs), (None,) * len(model.graph.outputs)
    terms = Terms(memory_limit_bytes=limit, effort=effort)
    request = Request("f", LINE, hardware, *free, free[1], terms=terms)
    return Search(model.c, model.boundary, model.boxings, request).run()


def two_products(x: Any, w: Any, y: Any) -> Any:
    """A sum that may hide behind a product that does not need it."""
    return x.T @ w, y @ y


def beside(x: Any, w: Any, y: Any) -> Any:
    """The same, behind work that takes little."""
    return x.T @ w, jnp.tanh(y)


def summed(x: Any, w: Any, y: Any) -> Any:
    """A sum of a sum."""
    return (x.T @ w).sum(), jnp.tanh(y)


def sent_twice(x: Any, w: Any, y: Any) -> Any:
    """What the cheapest way sends is waited for; a dearer one sends behind the second product."""
    return (x.T @ w).T @ y, y @ w


def chain(x: Any, w: Any, y: Any) -> Any:
    """Nothing to hide behind."""
    return (x @ w) @ y


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("fn", "hardware"),
    [
        *((fn, hardware) for fn in (beside, chain) for hardware in (HARDWARE, SLOW, FAST)),
        (summed, SLOW),
        pytest.param(two_products, SLOW, marks=pytest.mark.slow),
        pytest.param(two_products, HARDWARE, marks=pytest.mark.slow),
    ],
)
def test_step_is_near_the_shortest_of_all(fn: Callable[..., Any], hardware: Hardware) -> None:
    """Within three per cent of the best of every assignment, and never longer than that of the cheapest."""
    model, network, base = problem(fn, hardware)
    clock = Clock(model.c, model.boxings)
    seconds = clock.times(searched(model, hardware).assignment).step_seconds
    assert seconds <= clock.times(base).step_seconds
    assert seconds <= WITHIN * shortest_of_all(model, network, seconds)


def test_overlap_changes_the_choice() -> None:
    """A dearer plan that hides what it sends; both figures are told."""
    model, _, base = problem(sent_twice, SLOW)
    found, clock = searched(model, SLOW), Clock(model.c, model.boxings)
    times, cheapest_times = clock.times(found.assignment), clock.times(base)
    assert times.step_seconds < 0.99 * cheapest_times.step_seconds
    assert times.seconds >= cheapest_times.seconds
    assert found.assignment.cheapest_seconds == cheapest_times.seconds
    assert found.assignment.bound == base.bound


def test_nothing_is_explored_where_nothing_overlaps() -> None:
    """On CPUs ops wait for collectives."""
    hardware = replace(SLOW, platform="cpu")
    model, _, base = problem(two_products, hardware)
    found = searched(model, hardware)
    assert (found.assignment.inputs, found.assignment.seconds) == (base.inputs, base.seconds)
    assert found.assignment.cheapest_seconds is None


def test_the_same_plan_again() -> None:
    first, second = (searched(problem(two_products, SLOW)[0], SLOW).assignment for _ in range(2))
    assert (first.seconds, first.inputs, first.outputs) == (second.seconds, second.inputs, second.outputs)


def explorer(fn: Callable[..., Any], hardware: Hardware) -> Explorer:
    """A space, the cheapest plan of which is all that was looked at."""
    model, network, base = problem(fn, hardware)
    space = Space(model, network, Clock(model.c, model.boxings), (), base.bound)
    pool = Pool(np.inf, Effort().count)
    candidate = space.solve(network.unary, "cheapest", Effort())
    assert candidate is not None
    return Explorer(space, pool, pool.add(candidate), seeds_for(1), Effort(pool.count))


def test_more_effort_looks_at_the_same_plans_and_then_more() -> None:
    """So it is never worse. What a search under a limit begins at is the best of an effort of 1."""
    found, starts = [], []
    for times in (0.5, 1.0, 2.0, 4.0):
        e = explorer(sent_twice, SLOW)
        e.run(8, times)
        found.append([(x.source, x.states) for x in e.pool.candidates])
        assert e.pool.best is not None
        assert (e.first is None) == (times <= 1.0)
        starts.append((e.first or e.pool.best).states)
        least = min(x.times.step_seconds for x in e.pool.candidates)
        assert e.pool.best.times.step_seconds <= least * (1 + constants.SAME_STEP)
    assert len(found[0]) < len(found[-1])
    assert all(more[: len(few)] == few for few, more in pairwise(found))
    assert starts[1] == starts[2] == starts[3]


def test_the_last_turns_of_a_round_cross() -> None:
    """Of the turns of an effort of 1 the last quarter, and of those that twice the effort adds too."""
    crossed = []
    e = explorer(sent_twice, SLOW)
    e.turn = lambda: crossed.append(False) or count()  # type: ignore[method-assign, func-returns-value]
    e.cross = lambda _: not crossed.append(True)  # type: ignore[method-assign, func-returns-value]

    def count() -> bool:
        e.turns += 1
        return True

    e.run(16, 2.0)
    part = round(16 * constants.TURNS_PART)
    whole = [False] * part + [True] * (16 - part)
    assert crossed == whole + [False] * (2 * part - 16) + [True] * (32 - 2 * part)


def longer_by(seconds: float, plan: PlanCandidate) -> PlanCandidate:
    """The same plan with a longer step."""
    return replace(plan, assignment=replace(plan.assignment, beyond_seconds=seconds))


@pytest.mark.parametrize("is_longer", [False, True])
def test_a_parallelism_that_is_longer_waits(is_longer: bool) -> None:
    """The turn after it goes to the chain that promises most, not to what it leads to."""
    e, gone_on = explorer(sent_twice, SLOW), list[str]()
    found = longer_by(float(is_longer), e.base)
    e.chains.append(PlanChain("found", e.space.network.unary, found, found))
    e.turns = constants.PERIOD - 2
    e.go_on = lambda chain: gone_on.append(chain.name)  # type: ignore[method-assign]
    e.turn()
    assert gone_on == ["cheapest" if is_longer else "found"]


@pytest.mark.parametrize(("seconds", "turns"), [(0.0, 0), (1e-9, 1)])
def test_turns_end_with_the_effort(seconds: float, turns: int) -> None:
    """What is begun is ended."""
    e = explorer(sent_twice, SLOW)
    e.effort = e.effort.at_most(seconds)
    e.run(24)
    assert e.turns == turns


def test_whole_problems_take_a_part_of_the_work() -> None:
    """The first parallelism comes at once; others wait while those before have taken more; all come."""
    e = explorer(sent_twice, SLOW)
    e.solved_seconds = np.inf
    e.run(2)
    assert len(e.chains) == 3
    e.run(7)
    assert len(e.chains) == 3
    e.solved_seconds = 0.0
    e.run(200)
    assert not e.seeds


def test_near_the_best_plan() -> None:
    """In turn plans that cost about the same and parts of others; where one finds nothing, the other."""
    e, looked = explorer(sent_twice, SLOW), list[str]()
    e.shake = lambda _: looked.append("shake") or len(looked) < 3  # type: ignore[method-assign, func-returns-value]
    e.cross = lambda _: looked.append("cross") or len(looked) < 3  # type: ignore[method-assign, func-returns-value]
    assert [e.look_near() for _ in range(3)] == [True, True, False]
    assert looked == ["shake", "cross", "shake", "cross"]


def test_shaken_shares_are_about_those_of_the_plan() -> None:
    e, counted = explorer(sent_twice, SLOW), []
    e.space.solve_near = lambda unary, shares, *_: counted.append(shares)  # type: ignore[method-assign]
    shares = {g: 0.1 * k for k, g in enumerate(e.space.exposure.values)}
    assert not e.shake(replace(e.base, shares=shares))
    (shaken,) = counted
    assert shaken != shares
    assert shaken == pytest.approx(shares, rel=6 * constants.TIE)


def test_chains_begin_at_the_best_of_each_source_that_fits() -> None:
    """Beside two at the base, so that it does not matter which of several was a little shorter."""
    e = explorer(sent_twice, SLOW)
    e.pool.fits = lambda x: x.source != "large"  # type: ignore[method-assign]
    longer, best, large = (replace(e.base, source=name) for name in ("prices", "prices", "large"))
    for x in (longer_by(1.0, longer), best, large):
        e.pool.add(x)
    chains = Explorer(e.space, e.pool, e.base, (), e.effort).chains
    assert [(x.name, x.by_phase) for x in chains[:2]] == [("cheapest", False), ("cheapest", True)]
    assert [(x.name, x.at is best) for x in chains[2:]] == [("prices", True)]


def test_parts_of_others_are_tried_once() -> None:
    """Each of them by itself, also when more plans are known."""
    e = explorer(sent_twice, SLOW)
    for _ in range(6):
        e.turn()
    best, looked = e.best, []
    e.space.look_once = lambda states, _: looked.append(states)  # type: ignore[method-assign]
    assert not e.cross(best)
    parts = {tuple(np.flatnonzero(np.array(best.states) != states)) for states in looked}
    others = [np.array(x.states) for x in e.own if x is not best]
    whole = [set(np.flatnonzero(other != best.states)) for other in others]
    assert looked and all(any(x >= set(part) for x in whole) for part in parts)
    assert len(looked) == len(set(looked))
    e.pool.add(longer_by(1.0, best))
    assert not e.cross(best)
    assert len(looked) == len(set(looked))


def test_shares() -> None:
    """Hidden moves count little, exposed ones whole; forbidden pairs stay forbidden."""
    model, network, base = problem(two_products, SLOW)
    exposure, times = Exposure(model, network), Clock(model.c, model.boxings).times(base)
    shares = exposure.shares(times, damping=0.0)
    assert all(0.0 <= share <= 1.0 for share in shares.values())
    weighted = exposure.weighted_network(shares, network.unary)
    for (i, j, table), (a, b, own) in zip(weighted.edges, network.edges, strict=True):
        assert (i, j) == (a, b) and np.array_equal(np.isinf(table), np.isinf(own))
        assert (table <= own).all()
    assert set(exposure.shares(times, damping=1.0).values()) == {1.0}


def test_groups_are_phases() -> None:
    """What the backward pass makes is weighted apart from what is given."""

    def loss(x: Any, w: Any, y: Any) -> Any:
        return jax.grad(lambda w: jnp.tanh(x @ w).sum())(w) + y

    model, _, _ = problem(loss)
    assert {"given", "forward", "backward"} <= set(phases_of(model.graph).values())


def test_a_trip_of_a_loop_hides_what_is_sent_in_it() -> None:
    def fn(ws: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] * 2

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 4, 4), (4, 4))]
    graph = trace(fn, args, {}).graph
    phases, (loop,) = phases_of(graph), [n for n in graph.nodes if n.bodies]
    outside = {phases[v] for n in graph.nodes for v in n.outputs}
    (inside,) = {phases[v] for n in loop.bodies[0].nodes for v in n.outputs}
    assert inside not in outside and {phases[v] for v in loop.bodies[0].inputs} == {inside}


def test_what_cannot_be_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that was ended may have found nothing but states that cannot be: no program has them."""
    e = explorer(sent_twice, SLOW)
    space, at = e.space, e.chains[0].at
    both = zip(space.network.unary, at.states, strict=True)
    never = tuple(np.where((np.arange(x.size) == k) & (x.size > 1), np.inf, x) for x, k in both)
    forbidden = Space(space.model, CostNetwork(never, space.network.edges), space.clock)
    monkeypatch.setattr(pools, "solve", lambda *_, **__: SimpleNamespace(states=at.states))
    monkeypatch.setattr(forbidden.descent, "run", lambda *_: at.states)
    assert forbidden.solve(never, "ended", Effort()) is None
    assert forbidden.solve_near(never, space.exposure.shares(at.times), at, "ended", Effort()) is None


STATES = 3


def network(seed: int, nodes: int = 12) -> CostNetwork:
    """One of random costs, with edges of a node to itself and several between two."""
    random = np.random.default_rng(seed)
    ends = random.integers(0, nodes, (nodes, 2)).tolist()
    edges = tuple((i, j, random.random((STATES, STATES))) for i, j in ends)
    return CostNetwork(tuple(random.random(STATES) for _ in range(nodes)), edges)


def assignments(seed: int, count: int, nodes: int = 12) -> list[tuple[int, ...]]:
    """Of random states."""
    return [tuple(x) for x in np.random.default_rng(seed).integers(0, STATES, (count, nodes)).tolist()]


@pytest.mark.parametrize("seed", range(8))
def test_parts_are_the_connected_nodes_that_differ(seed: int) -> None:
    net, (one, other) = network(seed), assignments(seed, 2)
    graph = nx.Graph([(i, j) for i, j, _ in net.edges])
    graph.add_nodes_from(range(len(one)))
    differ = [k for k, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    expected = {tuple(sorted(part)) for part in nx.connected_components(graph.subgraph(differ))}
    shares = np.ones(len(net.edges))
    gains = Crossover(net).gains(one, other, net.unary, shares)
    assert {tuple(n for n, _ in part) for part in gains} == expected
    assert sum(gains.values()) == pytest.approx(net.cost(other) - net.cost(one))
    assert all(state == other[n] for part in gains for n, state in part)


@pytest.mark.parametrize("seed", range(8))
def test_parts_that_cost_less_the_cheapest_first(seed: int) -> None:
    """By the shares of the edges, each part by itself."""
    net, (best, *others) = network(seed), assignments(seed, 6)
    shares = np.random.default_rng(seed).random(len(net.edges))
    counted = CostNetwork(
        net.unary, tuple((i, j, x * table) for x, (i, j, table) in zip(shares, net.edges, strict=True))
    )
    crossover = Crossover(net)
    parts = crossover.cheaper(best, others, net.unary, shares)
    costs = [counted.cost(with_part(best, part)) for part in parts]
    assert parts and costs == sorted(costs) and costs[-1] < counted.cost(best)
    every = {part for x in others for part in crossover.gains(best, x, net.unary, shares)}
    assert {part for part in every if counted.cost(with_part(best, part)) < counted.cost(best)} == set(parts)


def test_what_is_forbidden_is_no_part() -> None:
    """A part is next to what stays in the best, which may not go with it."""
    table = np.array([[0.0, 9.0], [np.inf, 0.0]])
    net = CostNetwork((np.array([1.0, 0.0]), np.zeros(2)), ((0, 1, table),))
    assert not Crossover(net).cheaper((0, 0), [(1, 0)], net.unary, np.ones(1))
