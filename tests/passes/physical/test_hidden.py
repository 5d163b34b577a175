"""The choice of the plan with the shortest step, against every assignment of tiny programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbp.hardware.catalogue import Hardware, Link
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.paths import Boxings
from sbp.passes.physical import hidden
from sbp.passes.physical.exposure import LEAST_SHARE, Clock, Exposure, phases_of
from sbp.passes.physical.hidden import (
    BESIDE,
    FEWEST_LOOKS,
    MANY_LOOKS,
    MOST_LOOKS,
    STAGE_WORK,
    WORK,
    WORTH,
    look_size,
    looks_for,
    shortest_step,
)
from sbp.passes.plan.candidates import enumerate_candidates
from sbp.passes.plan.cheapest import cheapest
from sbp.passes.plan.every import all_costs
from sbp.passes.plan.model import ChosenSignatures, Model
from sbp.passes.plan.network import CostNetwork, Infeasible
from sbp.passes.plan.pins import boundary
from sbp.passes.program.trace import trace
from sbp.placement import placement
from sbp.signature import Split

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
    return model, network.dense(), cheapest(model, network, None)


def shortest_of_all(model: Model, network: CostNetwork, found_seconds: float) -> float:
    """The shortest step of every assignment.

    Those that take more than twice as long as one that was found, one thing after the other, are left out:
    of two streams one is busy at least half of the time.
    """
    states, total = all_costs(network)
    clock = Clock(model.c, model.boxings)
    wanted = np.flatnonzero(total <= 2.0 * found_seconds)
    found = (model.chosen(tuple(states[:, k].tolist()), 0.0, 0.0) for k in wanted)
    return min(map(clock.scheduled_seconds, found))


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
    found = shortest_step(model, network, base, lambda _: True)
    clock = Clock(model.c, model.boxings)
    assert clock.scheduled_seconds(found.assignment) == found.step_seconds
    assert found.step_seconds <= clock.scheduled_seconds(base)
    assert found.step_seconds <= WITHIN * shortest_of_all(model, network, found.step_seconds)


def test_overlap_changes_the_choice() -> None:
    """A dearer plan that hides what it sends; both figures are told."""
    model, network, base = problem(sent_twice, SLOW)
    found = shortest_step(model, network, base, lambda _: True)
    clock = Clock(model.c, model.boxings)
    assert found.step_seconds < WORTH * clock.scheduled_seconds(base)
    assert clock.times(found.assignment).seconds >= clock.times(base).seconds
    assert found.assignment.cheapest_seconds == clock.times(base).seconds
    assert found.assignment.bound == base.bound


def test_nothing_changes_where_nothing_overlaps_or_fits() -> None:
    """On CPUs ops wait for collectives; and no plan over the limit is taken."""
    for hardware, fits in ((replace(SLOW, platform="cpu"), True), (SLOW, False)):
        model, network, base = problem(two_products, hardware)
        assert shortest_step(model, network, base, lambda _, fits=fits: fits).assignment is base


def test_the_same_plan_again() -> None:
    """How long the search took does not matter."""
    first, second = (shortest_step(*problem(two_products, SLOW), lambda _: True) for _ in range(2))
    assert (first.step_seconds, first.assignment.inputs) == (second.step_seconds, second.assignment.inputs)


def test_no_time_is_no_seed() -> None:
    """A limit that has passed leaves the cheapest plan, and all seeds are left."""
    model, network, base = problem(two_products, SLOW)
    found = shortest_step(model, network, base, lambda _: True, 0.0)
    assert found.assignment is base and not found.looked and "data" in found.left


def test_shares() -> None:
    """Hidden moves count little, exposed ones whole; forbidden pairs stay forbidden."""
    model, network, base = problem(two_products, SLOW)
    exposure, times = Exposure(model, network), Clock(model.c, model.boxings).times(base)
    shares = exposure.shares(times, damping=0.0)
    assert all(LEAST_SHARE <= share <= 1.0 for share in shares.values())
    weighted = exposure.weighted(shares, network.unary)
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


def test_looks_are_fewer_for_larger_programs() -> None:
    """By the size of the network alone."""
    _, network, _ = problem(chain)
    twice = CostNetwork(network.unary * 2, network.edges)
    assert 0 < look_size(network) <= look_size(twice)
    assert WORK / look_size(network) - BESIDE > MOST_LOOKS > MANY_LOOKS > FEWEST_LOOKS
    assert looks_for(network) == MOST_LOOKS
    many = CostNetwork(network.unary, network.edges * 20_000)
    assert looks_for(many) == FEWEST_LOOKS
    some = CostNetwork(network.unary, network.edges * int(WORK / 6 / len(network.edges)))
    assert FEWEST_LOOKS <= looks_for(some) < looks_for(some, STAGE_WORK) < MOST_LOOKS


def test_the_finalists_are_the_shortest_of_the_list_schedule() -> None:
    """None of the other plans is run in XLA's own order, and the best of those that are is taken."""
    model, network, base = problem(sent_twice, SLOW)
    found = shortest_step(model, network, base, lambda _: True)
    clock = Clock(model.c, model.boxings)
    assert found.step_seconds == clock.scheduled_seconds(found.assignment)
    assert found.step_seconds <= clock.scheduled_seconds(base)


def test_what_no_time_was_left_to_find_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that time has ended may have found nothing but states that cannot be: no program has them."""
    never = np.array([[np.inf, 1.0], [1.0, np.inf]])
    network = CostNetwork((np.zeros(2), np.zeros(2)), ((0, 1, never),))
    assert network.cost(hidden.solved_alike(network, None)) == 1.0
    ended = SimpleNamespace(states=(0, 0))
    monkeypatch.setattr(hidden, "solve", lambda *_, **__: ended)
    with pytest.raises(Infeasible):
        hidden.solved_alike(network, 0.0)
