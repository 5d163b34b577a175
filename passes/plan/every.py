"""Every combination of the states of a few nodes."""

import math

import numpy as np
from numpy.typing import NDArray

from sbp.passes.plan.flat import Indices
from sbp.passes.plan.network import CostNetwork, Table


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
