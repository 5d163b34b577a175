"""The slow, evident solver: every combination of states. The oracle of the solver's tests."""

from __future__ import annotations

import math

import numpy as np

from sbp.passes.plan.network import CostNetwork, Infeasible, Solution

MAX_COMBINATIONS = 2_000_000


def brute_force(network: CostNetwork) -> Solution:
    """Optimum by enumeration; of equally cheap assignments the first in lexicographic order.

    Raises ValueError above 2e6 combinations, Infeasible when every combination costs infinity.

    >>> brute_force(CostNetwork((np.array([2.0, 1.0]),), ())).states
    (1,)
    """
    sizes = tuple(theta.size for theta in network.unary)
    combinations = math.prod(sizes)
    if combinations > MAX_COMBINATIONS:
        raise ValueError(f"brute_force: {combinations} combinations; at most {MAX_COMBINATIONS}: use solve")
    states = np.indices(sizes).reshape(len(sizes), combinations)
    total = np.zeros(combinations)
    for node, theta in enumerate(network.unary):
        total += theta[states[node]]
    for i, j, table in network.edges:
        total += table[states[i], states[j]]
    best = int(total.argmin())
    if math.isinf(total[best]):
        raise Infeasible()
    chosen = tuple(int(state) for state in states[:, best])
    cost = network.cost(chosen)
    return Solution(chosen, cost, cost)
