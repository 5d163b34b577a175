"""Where a search under a limit begins."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp import S
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.paths import Boxings
from sbp.passes.physical.kernel_merges import merge_ops
from sbp.passes.plan.budget import Budget, Load
from sbp.passes.plan.candidates import enumerate_candidates
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.model import ChosenSignatures
from sbp.passes.plan.network import CostNetwork
from sbp.passes.plan.pins import boundary
from sbp.passes.plan.recompute import RecomputingModel
from sbp.passes.plan.start_points import _starts_among, priced_starts
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
    assert free and all(network.cost(x) == pytest.approx(fastest.seconds, rel=1e-6) for x in free)
    limit = 0.6 * Budget(tuple(model.loads), 1e12).peak_bytes(free[0])
    budget = Budget(tuple(model.loads), limit)
    starts = priced_starts(model, network, budget, fastest, Effort())
    peaks, costs = [budget.peak_bytes(s) for s in starts], [network.cost(s) for s in starts]
    fits = np.array(peaks) <= limit
    assert fits[-1] and costs[-1] == min(np.array(costs)[fits]) >= fastest.seconds * (1 - 1e-9)
    # Products are as in the fastest plan.
    chosen = model.chosen_signatures(starts[-1], costs[-1], 0.0)
    assert products_of(model)
    assert all(chosen.strategies[i] is fastest.strategies[i] for i in products_of(model))


@pytest.mark.parametrize("seed", range(6))
def test_the_last_start_is_the_corner_of_the_hull_below_the_limit(seed: int) -> None:
    """Against all assignments: costs and bytes of states, at one time."""
    random = np.random.default_rng(seed)
    costs, sizes = random.integers(1, 100, (2, 6, 3)).astype(float)
    network = CostNetwork(tuple(costs), ((0, 1, random.integers(0, 9, (3, 3)).astype(float)),))
    loads = tuple(Load(k, 0, 1, x) for k, x in enumerate(sizes))
    every = list(itertools.product(range(3), repeat=6))
    points = {x: (Budget(loads, 0.0).peak_bytes(x), network.cost(x)) for x in every}
    dearest = min(points.values(), key=lambda p: (p[1], p[0]))[0]
    limit = 0.5 * (dearest + min(points.values())[0])

    def corner(price: float) -> tuple[float, float]:
        return min(points.values(), key=lambda p: (p[1] + price * p[0], p[0]))

    # Prices near enough to each other for every corner.
    corners = {corner(price) for price in np.geomspace(1e-3, 1e3, 2000)}
    asked = cast(ChosenSignatures, SimpleNamespace(seconds=100.0))
    kept = [np.arange(3)] * 6
    found = _starts_among(kept, network, Budget(loads, limit), asked, Effort())
    fitting = [points[x] for x in found if points[x][0] <= limit]
    assert min(fitting, key=lambda p: p[1]) == max(p for p in corners if p[0] <= limit)


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
    chosen = model.chosen_signatures(found[-1], cost, 0.0)
    assert all(chosen.strategies[i] is fastest.strategies[i] for i in products_of(model))
