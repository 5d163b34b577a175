"""Where a search under a limit begins."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp import S
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.paths import Boxings
from sbp.passes.physical.merged import merge_ops
from sbp.passes.plan.budget import Budget
from sbp.passes.plan.candidates import enumerate_candidates
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.pins import boundary
from sbp.passes.plan.priced import priced_starts
from sbp.passes.plan.recompute import RecomputingModel
from sbp.passes.program.trace import trace
from tests.passes.plan.cheapest import choose
from tests.passes.plan.test_optimal import HARDWARE
from tests.passes.plan.test_recompute import LIMIT, given_of

PLACE = sbp.placement("cpu", shape=(4,))
LAYERS, WIDTH, ROWS = 64, 64, 1024


def test_starts_end_with_the_cheapest_that_keeps_the_limit() -> None:
    given = given_of()
    model = RecomputingModel(*given, LIMIT)
    network = model.build()
    fastest = choose(*given)
    free = priced_starts(model, network, Budget(tuple(model.loads), 1e12), fastest, Effort())
    assert len(free) == 1 and network.cost(free[0]) == pytest.approx(fastest.seconds, rel=1e-6)
    limit = 0.6 * Budget(tuple(model.loads), 1e12).peak_bytes(free[0])
    budget = Budget(tuple(model.loads), limit)
    starts = priced_starts(model, network, budget, fastest, Effort())
    peaks, costs = [budget.peak_bytes(s) for s in starts], [network.cost(s) for s in starts]
    fits = np.array(peaks) <= limit
    assert fits[-1] and costs[-1] == min(np.array(costs)[fits]) >= fastest.seconds * (1 - 1e-9)
    # Products are as in the fastest plan.
    chosen = model.chosen(starts[-1], costs[-1], 0.0)
    assert products_of(model)
    assert all(chosen.strategies[i] is fastest.strategies[i] for i in products_of(model))


def products_of(model: RecomputingModel) -> list[int]:
    """The ops that are products of matrices."""
    return [n.id for n in model.graph.walk() if n.rule is not None and n.rule.matmul is not None]


def scanned(ws: Any, x: Any) -> Any:
    """Layers in a stack, which is cheapest gathered at once: a trip has one collective less."""
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)
    return jnp.square(x).mean()


def test_what_a_loop_gathers_is_no_op_of_the_fastest_plan() -> None:
    """In the fastest plan the stack is whole; which ops read it is left open."""
    shapes = (LAYERS, WIDTH, WIDTH), (ROWS, WIDTH)
    graph = trace(scanned, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes], {}).graph
    candidates = replace(enumerate_candidates(graph, PLACE, {}), **vars(merge_ops(graph)))
    given = (
        candidates,
        boundary(graph, [(S(1),), (S(0),)], [None], [None], PLACE),
        Boxings(Network(PLACE, HARDWARE)),
    )
    stack = 4.0 * LAYERS * WIDTH * WIDTH
    model = RecomputingModel(*given, stack)
    network = model.build()
    fastest = choose(*given)
    roomy = Budget(tuple(model.loads), 1e12)
    free_bytes = roomy.peak_bytes(priced_starts(model, network, roomy, fastest, Effort())[-1])
    budget = Budget(tuple(model.loads), free_bytes - 0.5 * stack)
    assert free_bytes > stack  # gathered before the loop
    found = priced_starts(model, network, budget, fastest, Effort())
    assert budget.peak_bytes(found[-1]) <= budget.limit
    cost = network.cost(found[-1])
    assert fastest.seconds < cost < 2 * fastest.seconds
    chosen = model.chosen(found[-1], cost, 0.0)
    assert all(chosen.strategies[i] is fastest.strategies[i] for i in products_of(model))
