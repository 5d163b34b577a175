"""The whole planner against brute force: random small programs on 1-D, 2-D and 3-D placements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbp.hardware.catalogue import Hardware, Link
from sbp.layout import rest_signatures
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.paths import Boxings
from sbp.passes.explain.plan import SAME
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.insert import insert_boxing
from sbp.passes.physical.kernel_merges import merge_ops
from sbp.passes.plan.bounds import relaxed_bound
from sbp.passes.plan.candidates import Candidates, enumerate_candidates
from sbp.passes.plan.model import Boundary, Model
from sbp.passes.plan.network import CostNetwork
from sbp.passes.plan.pins import boundary
from sbp.passes.program.graph import Graph
from sbp.passes.program.trace import trace
from sbp.placement import Placement, placement
from tests.passes.plan.cheapest import choose
from tests.passes.plan.trees import least_seconds

# Fast and slow links, compute that matters: optima that are neither all split nor all whole.
HARDWARE = Hardware("test", ((8, 3e6),), 3e6, 1e8, 1e12, (Link(2, 4e6, 1e-6), Link(1 << 60, 1e6, 3e-6)), 1.0)
PLACEMENTS = (placement("cpu", shape=(4,)), placement("cpu", shape=(2, 2)), placement("cpu", shape=(2, 2, 2)))
PER_PLACEMENT = (300, 176, 24)

UNARY: Sequence[Callable[[Any], Any]] = (jnp.tanh, jnp.negative, jnp.transpose, lambda x: x * 2.0)
BINARY: Sequence[Callable[[Any, Any], Any]] = (jnp.add, jnp.multiply, jnp.matmul)


def program(seed: int, n_ops: int) -> Callable[..., Any]:
    """A random program of square matrices; its value is a matrix or a sum."""

    def f(a: Any, b: Any) -> Any:
        rng = np.random.default_rng(seed)
        values = [a, b]
        for _ in range(n_ops):
            x, y = (values[i] for i in rng.integers(0, len(values), 2))
            if rng.random() < 0.4:
                values.append(UNARY[rng.integers(len(UNARY))](x))
            else:
                values.append(BINARY[rng.integers(len(BINARY))](x, y))
        return values[-1].sum() if rng.random() < 0.3 else values[-1]

    return f


def brute_force(network: CostNetwork) -> float:
    """The least cost, by depth-first search over all assignments that can still be cheaper than the best."""
    n = len(network.unary)
    tables: list[list[tuple[int, np.ndarray[Any, Any]]]] = [[] for _ in range(n)]
    for i, j, t in network.edges:
        if i == j:
            network.unary[i][:] += np.diagonal(t)
        else:
            tables[i].append((j, t))
            tables[j].append((i, t.T))
    order = _order(tables, n)
    best = np.inf

    def descend(k: int, costs: list[np.ndarray[Any, Any]], spent: float) -> None:
        nonlocal best
        if k == n:
            best = min(best, spent)
            return
        rest = sum(float(costs[v].min()) for v in order[k + 1 :])
        v = order[k]
        for state in np.argsort(costs[v], kind="stable"):
            total = spent + float(costs[v][state])
            if total + rest >= best - 1e-18:
                break
            narrowed = list(costs)
            for w, t in tables[v]:
                if w in order[k + 1 :]:
                    narrowed[w] = narrowed[w] + t[state]
            descend(k + 1, narrowed, total)

    descend(0, [u.copy() for u in network.unary], 0.0)
    return best


def _order(tables: Sequence[Sequence[tuple[int, Any]]], n: int) -> list[int]:
    """Connected variables after each other, the best connected first."""
    order: list[int] = []
    while len(order) < n:
        left = [v for v in range(n) if v not in order]
        order.append(max(left, key=lambda v: (sum(w in order for w, _ in tables[v]), len(tables[v]))))
    return order


def problem(graph: Graph, place: Placement) -> tuple[Candidates, Boundary, Boxings]:
    """What is planned: a data-parallel argument, so that there is something to plan."""
    merged = merge_ops(graph)
    candidates = replace(enumerate_candidates(graph, place, {}), **vars(merged))
    first = rest_signatures(graph.values[graph.inputs[0]].shape, np.float32, place)
    pins = [first[-1], *[None] * (len(graph.inputs) - 1)]
    free = [None] * len(graph.outputs)
    return candidates, boundary(graph, pins, free, free, place), Boxings(Network(place, HARDWARE))


@pytest.mark.some(1)
@pytest.mark.parametrize("which", range(len(PLACEMENTS)))
def test_random_programs(which: int) -> None:
    """500 programs in all: the planner's cost equals brute force, and its bound proves it."""
    place = PLACEMENTS[which]
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    for seed in range(PER_PLACEMENT[which]):
        given = problem(trace(program(seed, 1 + seed % 8), (x, x), {}).graph, place)
        chosen, expected = choose(*given), brute_force(Model(*given).build())
        assert chosen.seconds == pytest.approx(expected, rel=1e-9), seed
        assert chosen.bound == pytest.approx(expected, rel=1e-6), seed


@pytest.mark.parametrize(
    ("which", "ops", "seeds"),
    [
        (0, 4, range(40)),
        (1, 2, range(20)),
        pytest.param(0, 5, range(40, 420), marks=pytest.mark.slow),
        pytest.param(1, 3, range(20, 140), marks=pytest.mark.slow),
    ],
)
def test_no_physical_program_is_cheaper(which: int, ops: int, seeds: range) -> None:
    """However versions are made from each other: the bound holds, and the plan reaches it."""
    x, equal = jax.ShapeDtypeStruct((8, 8), jnp.float32), []
    for seed in seeds:
        given = problem(trace(program(seed, 1 + seed % ops), (x, x), {}).graph, PLACEMENTS[which])
        try:
            least = least_seconds(Model(*given))
        except ValueError:
            continue  # too many combinations
        chosen = choose(*given)
        takes = Evaluator(insert_boxing(given[0], chosen, given[2]), given[2].network).seconds()
        assert chosen.bound <= least * (1 + SAME), seed
        assert relaxed_bound(*given, None) <= least * (1 + SAME), seed
        assert least <= takes * (1 + SAME), seed
        equal.append(takes <= least * (1 + SAME))
    assert len(equal) > 0.8 * len(seeds) and sum(equal) >= 0.95 * len(equal)
