"""The model under a limit: clusters of uses, and a search that goes on under another limit."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.passes.plan.budget import Budget
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.memory_problem import RoomModel
from sbp.passes.plan.model import Model
from sbp.passes.plan.solve import Solver, solve, solve_within
from sbp.passes.plan.traffic import OperandCopy
from sbp.passes.program.trace import trace
from sbp.signature import Split
from tests.passes.plan.test_optimal import problem

PLACE = sbp.placement("cpu", shape=(4,))


def loss(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def model_of(limit: float = 1.0) -> tuple[RoomModel, Any]:
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    given = problem(trace(jax.grad(loss), ([x] * 6, x), {}).graph, PLACE)
    return RoomModel(*given, limit), given


def test_uses_in_the_forward_and_in_the_backward_are_clusters() -> None:
    model, _ = model_of()
    model.build()
    weights = model.graph.inputs[:6]
    # The last layer's backward follows its forward at once; nobody asks for the gradient of x.
    assert {len(model.near[w]) for w in weights[1:4]} == {2}
    for w in weights[1:4]:
        (_, first), (_, second) = model.near[w]
        assert model.when(first[0])[1] < model.when(second[0])[0]
    small, _ = model_of(1e12)
    small.build()
    assert not small.near and not any(load.node >= len(small.unary) for load in small.loads)


def test_clusters_cost_nothing_where_nothing_is_short() -> None:
    model, given = model_of()
    network = model.build()
    usual = Model(*given)
    best = solve(usual.build()).cost
    assert solve(network).cost == pytest.approx(best, rel=1e-6)
    chosen = model.chosen_signatures(solve(network).states, best, best)
    assert set(chosen.clusters) == set(model.near)
    assert all(len(cs) > 1 and all(c.users for c in cs) for cs in chosen.clusters.values())


def test_copies_for_libraries_are_loads() -> None:
    """As large as the operand under the signature of the op that has it copied, times their factor."""
    _, (candidates, *others) = model_of()
    first = next(n for n in candidates.graph.nodes if n.op == "dot_general")
    copy = OperandCopy(first.inputs[1], first.id, 1, 2.0, 5, 9)
    model = RoomModel(replace(candidates, operand_copies=(copy,)), *others, 1.0)
    model.build()
    (load,) = (x for x in model.loads if (x.start, x.end) == (5, 9))
    assert load.node == model.nodes[first.id]
    split = [sum(isinstance(s, Split) for s in strategy.operands[1]) for strategy in model.states[load.node]]
    assert load.bytes.tolist() == [2.0 * 64 * 64 * 4 / 4**n for n in split]


def test_a_search_goes_on_under_another_limit() -> None:
    model, _ = model_of()
    network = model.build()
    loads = tuple(model.loads)
    everything = Budget(loads, np.inf).peak_bytes(solve(network).states)
    search = Solver(network, Budget(loads, everything), Effort().at_most(2.0), good_gap=0.01)
    assert search.run().fits
    again = search.go_on(0.95 * everything, Effort().at_most(2.0))
    alone = solve_within(
        network, Budget(loads, 0.95 * everything), effort=Effort().at_most(2.0), good_gap=0.01
    )
    assert again.fits and alone.fits
    assert max(again.bound, alone.bound) <= min(again.cost, alone.cost) * (1 + 1e-9)
    least = search.smallest(Effort(), 2.0)
    assert least.least_peak_bytes <= least.peak_bytes <= again.peak_bytes
