"""Parallelisms compared on what equal layers have in common, where each cannot be looked at."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbp.passes.physical import hidden
from sbp.passes.physical.compared import compared, is_alike
from sbp.passes.physical.exposure import Clock, Exposure
from sbp.passes.physical.hidden import COMPARED_LOOKS, shortest_step
from sbp.passes.plan.fold import fold, fold_alike
from sbp.passes.plan.network import CostNetwork
from sbp.passes.plan.seeds import restricted, seed_name, seeds_compared, tensors_of
from sbp.passes.plan.solve import solve
from tests.passes.physical.test_hidden import SLOW, problem


def layers(x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
    """A step of several products with one weight."""

    def loss(w: jax.Array) -> jax.Array:
        z = x
        for _ in range(4):
            z = jnp.tanh(z @ w)
        return (z * y).sum()

    return w - jax.grad(loss)(w)


def test_what_a_parallelism_costs_is_the_cost_of_its_plan() -> None:
    """In the network of all layers, under the shares of the cheapest plan; and none is below the optimum."""
    model, network, base = problem(layers, SLOW)
    exposure, tensors = Exposure(model, network), tensors_of(model.graph, model.boundary.ties)
    shares, seeds = exposure.shares(Clock(model.c, model.boxings).times(base)), seeds_compared(1)
    found = compared(model, exposure, shares, seeds, tensors, lambda: math.inf)
    assert 1 < len(found) <= len(seeds) == 8
    assert [x.cost for x in found] == sorted(x.cost for x in found)
    for x in found:
        weighted = exposure.weighted(shares, restricted(model, x.seed, tensors))
        assert weighted.cost(x.states) == pytest.approx(x.cost, rel=1e-9)
        assert x.cost >= solve(weighted).cost * (1 - 1e-9)
    assert not compared(model, exposure, shares, seeds, tensors, lambda: 0.0)


def test_the_best_of_eight_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    model, network, base = problem(layers, SLOW)
    plain = shortest_step(model, network, base, lambda _: True, looks=2)
    assert not is_alike(network) and not plain.compared
    monkeypatch.setattr(hidden, "is_alike", lambda _: True)
    found = shortest_step(model, network, base, lambda _: True, looks=2)
    assert 1 < len(found.compared) <= 8 and found.looked == found.compared[:COMPARED_LOOKS]
    assert not {*found.compared} & {*found.left}
    many = shortest_step(model, network, base, lambda _: True, looks=len(seeds_compared(1)))
    assert not many.compared
    late = shortest_step(model, network, base, lambda _: True, 0.0, looks=2)
    assert late.assignment is base and not late.compared


def test_many_equal_parts_are_alike() -> None:
    """By what nodes cost, wherever that is written down."""
    rows = [np.zeros(3), np.ones(3)]
    assert is_alike(CostNetwork(tuple(rows[k % 2].copy() for k in range(200)), ()))
    assert not is_alike(CostNetwork(tuple(np.full(3, float(k)) for k in range(200)), ()))


def test_networks_with_the_same_edges_have_the_same_classes() -> None:
    """Nodes are one only if they are in each of the networks."""
    theta, other, table = np.zeros(2), np.ones(2), np.eye(2)
    edges = tuple((i, i + 1, table) for i in range(8))
    first, second = (theta,) * 9, (theta,) * 4 + (other,) + (theta,) * 4
    one, two = fold_alike((first, second), edges, 1)
    assert one.classes == two.classes == fold(CostNetwork(second, edges), 1).classes
    for folded, unary in ((one, first), (two, second)):
        states = solve(folded.network).states
        assert CostNetwork(unary, edges).cost(folded.expand(states)) == folded.network.cost(states)
    assert [seed_name(s) for s in seeds_compared(1)][:2] == ["data", "ZeRO-3"]
