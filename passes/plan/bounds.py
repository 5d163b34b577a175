"""Bounds that hold however versions of a value are made from each other."""

from collections.abc import Callable, Sequence

from sbp.passes.boxing.paths import Boxings
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.cost import Shards, kernel_seconds_of, seconds_of
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.model import Boundary, Model
from sbp.passes.plan.narrow import solve_indexed
from sbp.passes.program.control import assumed_trips
from sbp.passes.program.graph import Node


def relaxed_bound(
    candidates: Candidates, boundary: Boundary, boxings: Boxings, effort: Effort | None
) -> float:
    """What no plan can be cheaper than, whatever versions of a value others are made from; not tight."""
    model = Model(candidates, boundary, boxings, relaxed=True)
    network = model.build_indexed()
    ends = {x for x in (*model.inputs, *model.outputs) if x is not None}
    sent = sum(float(model.unary[x].max()) for x in ends)
    return solve_indexed(network, effort=effort).bound - sent


def least_seconds(candidates: Candidates, boxings: Boxings) -> float:
    """What the ops of a program take at least, however values are boxed: no plan takes less."""
    return _least(candidates, boxings, seconds_of)


def least_kernel_seconds(candidates: Candidates, boxings: Boxings) -> float:
    """What its kernels take at least: no step is shorter, whatever runs beside them."""
    return _least(candidates, boxings, kernel_seconds_of)


def _least(candidates: Candidates, boxings: Boxings, seconds: Callable[..., list[float]]) -> float:
    """The least time of each op, summed."""
    found, known, shards = 0.0, dict[object, float](), Shards()

    def add(nodes: Sequence[Node], times: int) -> None:
        nonlocal found
        for node in nodes:
            for body in node.bodies:
                add(body.nodes, times * assumed_trips(node))
            if node.bodies:
                continue
            strategies, traffic = candidates.strategies[node.id], candidates.traffic.get(node.id)
            key = id(strategies), traffic
            if key not in known:
                known[key] = min(
                    seconds(candidates.graph, node, strategies, boxings.network, traffic, shards)
                )
            found += times * known[key]

    add(candidates.graph.nodes, 1)
    return found
