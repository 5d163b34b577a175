"""Every combination of the states of a few nodes, under a limit on what lives at once."""

import math

import numpy as np
from numpy.typing import NDArray

from sbp.passes.plan.budget import FlatBudget
from sbp.passes.plan.flat import FlatNetwork, Indices
from sbp.passes.plan.network import CostNetwork, Infeasible, Table


def combinations(sizes: tuple[int, ...]) -> Indices:
    """All combinations of so many states, `[nodes, combinations]` in lexicographic order.

    A node of one state is no dim: NumPy's arrays have 64 at most, and a network that is all but decided has
    thousands of such nodes.
    """
    states = np.zeros((len(sizes), math.prod(sizes)), np.int64)
    free = [node for node, size in enumerate(sizes) if size > 1]
    if free:
        states[free] = np.indices([sizes[node] for node in free]).reshape(len(free), -1)
    return states


def cheapest_of_all(
    flat: FlatNetwork, budget: FlatBudget, finite: float, limit: float
) -> tuple[Indices, float, float]:
    """The cheapest states that keep the limit, or those nearest to it: what they cost, and by how many bytes
    they are above it.

    Arguments:
      finite: what costs as much has an infinite entry.
      limit: stands for what is free where there are no times.

    Raises Infeasible when every combination costs as much as that.
    """
    sizes, offsets = tuple(flat.sizes.tolist()), flat.offsets
    states = combinations(sizes)
    cost = np.zeros(states.shape[1])
    change = np.zeros((budget.room.size + 1, states.shape[1]))
    for node, size in enumerate(sizes):
        cost += flat.theta[offsets[node] + states[node]]
        for entry in range(flat.first[node], flat.turn[node]):
            cost += flat.pool[flat.table[entry] + states[flat.other[entry]] * size + states[node]]
        for load in range(budget.first[node], budget.first[node + 1]):
            size_of = budget.bytes[budget.at[load] + states[node]]
            change[budget.start[load]] += size_of
            change[budget.end[load]] -= size_of
    over = (np.cumsum(change, axis=0)[:-1] - budget.room[:, None]).max(axis=0, initial=-limit)
    possible = cost < finite
    if not possible.any():
        raise Infeasible()
    least = over[possible].min()
    best = np.where(possible & (over <= max(least, 0.0)), cost, np.inf).argmin()
    return states[:, best], float(cost[best]), float(least)


def all_costs(network: CostNetwork) -> tuple[NDArray[np.intp], Table]:
    """All combinations, `[nodes, combinations]` in lexicographic order, and what they cost."""
    sizes = tuple(theta.size for theta in network.unary)
    states = combinations(sizes)
    total = np.zeros(states.shape[1])
    for node, theta in enumerate(network.unary):
        total += theta[states[node]]
    for i, j, table in network.edges:
        total += table[states[i], states[j]]
    return states, total
