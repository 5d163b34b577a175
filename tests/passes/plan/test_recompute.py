"""The model under a limit in which ops may run again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.passes.physical.exposure import Clock
from sbp.passes.plan.budget import Budget
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.memory_problem import RoomModel
from sbp.passes.plan.model import Model
from sbp.passes.plan.network import restriction
from sbp.passes.plan.recompute import RecomputingModel
from sbp.passes.plan.solve import solve, solve_within
from sbp.passes.program.trace import trace
from tests.passes.plan.test_optimal import problem

PLACE = sbp.placement("cpu", shape=(4,))
LIMIT = 1e6


def loss(ws: Any, x: Any) -> Any:
    for w, u in ws:
        x = x + jax.nn.softmax(x @ w) @ u
    return (x**2).mean()


def given_of(layers: int = 3) -> Any:
    x, w, u = (jax.ShapeDtypeStruct(s, jnp.float32) for s in [(512, 64), (64, 256), (256, 64)])
    return problem(trace(jax.grad(loss), ([(w, u)] * layers, x), {}).graph, PLACE)


def test_what_may_be_recomputed_costs_nothing_where_nothing_is_short() -> None:
    given = given_of()
    model = RecomputingModel(*given, LIMIT)
    network = model.build()
    best = solve(Model(*given).build()).cost
    found = solve(network)
    assert found.cost == pytest.approx(best, rel=1e-9)
    chosen = model.chosen_signatures(found.states, best, best)
    count = model.count
    assert set(chosen.shares) <= set(range(len(given[0].graph.values)))
    assert not any(u >= 2 * count for near in chosen.clusters.values() for c in near for u in c.users)


def test_results_of_the_forward_that_the_backward_wants_may_be_recomputed() -> None:
    model = RecomputingModel(*given_of(), LIMIT)
    model.build()
    ops = {x.maker.op for x in model.later.values()}
    assert {"dot_general", "exp", "div"} <= ops
    assert all(not x.maker.role.undoes and x.since < x.start < x.until for x in model.later.values())
    small = RecomputingModel(*given_of(), 1e12)
    small.build()
    assert not small.later


def test_less_memory_is_enough_when_ops_may_run_again() -> None:
    given = given_of()
    peaks = []
    for kind in (RoomModel, RecomputingModel):
        model = kind(*given, LIMIT)
        network = model.build()
        found = solve_within(network, Budget(tuple(model.loads), 1.0), effort=Effort().at_most(3.0))
        peaks.append(found.peak_bytes)
    assert peaks[1] < 0.9 * peaks[0]
    assert model.chosen_signatures(found.states, found.cost, 0.0).recomputed


def chain(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


@pytest.mark.parametrize("layers", [4, 12])
def test_a_chain_that_is_made_again_is_there_from_its_first_op_on(layers: int) -> None:
    """Counted as the evaluator finds it; counted of each two alone it is half of that."""
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in [(512, 64), (64, 64)])
    given = problem(trace(jax.grad(chain), ([w] * layers, x), {}).graph, PLACE)
    counted = dict[bool, float]()
    for by_chain in (False, True):
        model = RecomputingModel(*given, 1e3, by_chain=by_chain)
        network = model.build()
        kept = [np.arange(len(states)) for states in model.states]
        for later in model.later.values():
            kept[later.variable] = np.flatnonzero(np.isfinite(later.begins))
        found = solve(restriction(network, kept))
        states = [int(own[k]) for own, k in zip(kept, found.states, strict=True)]
        chosen = model.chosen_signatures(states, found.cost, 0.0)
        assert model.has_chains and set(chosen.recomputed) == set(model.later)
        counted[by_chain] = Budget(tuple(model.loads), 1e12).peak_bytes(states)
    needed = Clock(given[0], given[2]).program(chosen).peak_bytes()
    assert 0.92 * needed < counted[True] <= needed
    assert counted[False] < (0.8 if layers == 4 else 0.6) * needed


def test_equal_layers_share_what_is_known_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What boxing a value makes is found once for all layers, not for each."""
    asked = list[int]()
    own = RecomputingModel.copy_mask

    def counted(model: RecomputingModel, *args: Any) -> Any:
        asked.append(1)
        return own(model, *args)

    monkeypatch.setattr(RecomputingModel, "copy_mask", counted)
    found = list[int]()
    for layers in (4, 8):
        asked.clear()
        RecomputingModel(*given_of(layers), LIMIT).build()
        found.append(len(asked))
    assert 0 < found[0] <= found[1] < 1.1 * found[0]


def test_what_nobody_reads_again_has_no_loads() -> None:
    """Of what is made again only for ops that do not run again themselves, as in scans of pairs."""

    def loss(w: Any, x: Any) -> Any:
        def after(a: Any, b: Any) -> Any:
            return a[0] * b[0], b[0] * a[1] + b[1]

        pairs = jnp.exp(-jax.nn.softplus(x @ w[0])), x * (x @ w[1])
        return (jax.lax.associative_scan(after, pairs, axis=0)[1] ** 2).mean()

    w, x = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2, jax.ShapeDtypeStruct((8, 64), jnp.float32)
    graph = trace(jax.value_and_grad(loss), (w, x), {}).graph
    model = RecomputingModel(*problem(graph, PLACE), 1e3)
    model.build_indexed()
    assert [v for v, uses in model.demand.items() if not uses and model.is_large(v)]
