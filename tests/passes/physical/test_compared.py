"""Parallelisms compared on what equal layers have in common, where each cannot be looked at."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbp.passes.physical.compared import compared, is_alike
from sbp.passes.physical.exposure import Clock, Exposure
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.fold import fold, fold_alike
from sbp.passes.plan.network import CostNetwork
from sbp.passes.plan.seeds import restricted, seed_name, seeds_compared, tensors_of
from sbp.passes.plan.solve import solve
from sbp.passes.search import explore
from tests.passes.search.test_explore import SLOW, explorer, problem


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
    found = compared(model, exposure, shares, seeds, tensors, Effort())
    assert 1 < len(found) <= len(seeds) == 8
    assert [x.cost for x in found] == sorted(x.cost for x in found)
    for x in found:
        weighted = exposure.weighted(shares, restricted(model, x.seed, tensors))
        assert weighted.cost(x.states) == pytest.approx(x.cost, rel=1e-9)
        assert x.cost >= solve(weighted).cost * (1 - 1e-9)


def test_the_best_of_eight_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """In programs of many equal parts; of others the order is one for all."""
    e = explorer(layers, SLOW)
    usual = list(e.seeds)
    e.order_seeds(1)
    assert e.seeds == usual
    monkeypatch.setattr(explore, "is_alike", lambda _: True)
    e.order_seeds(1)
    assert {*map(seed_name, e.seeds)} == {*map(seed_name, usual), *map(seed_name, seeds_compared(1))}
    assert e.seeds != usual


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
