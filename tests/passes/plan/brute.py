"""The slow, evident solver: every combination of states. The oracle of the solver's tests."""

from __future__ import annotations

import math

import numpy as np

from sbp.passes.plan.budget import Budget, BudgetSolution
from sbp.passes.plan.flat_network import all_costs
from sbp.passes.plan.network import CostNetwork, Infeasible, Solution


def brute_force(network: CostNetwork) -> Solution:
    """Optimum by enumeration; of equally cheap assignments the first in lexicographic order.

    Raises ValueError above 2e6 combinations, Infeasible when every combination costs infinity.

    >>> brute_force(CostNetwork((np.array([2.0, 1.0]),), ())).states
    (1,)
    """
    states, total = all_costs(network)
    best = int(total.argmin())
    if math.isinf(total[best]):
        raise Infeasible()
    chosen = tuple(int(state) for state in states[:, best])
    cost = network.cost(chosen)
    return Solution(chosen, cost, cost)


def brute_force_within(network: CostNetwork, budget: Budget) -> BudgetSolution:
    """The optimum under a budget by enumeration; if nothing fits, the cheapest with the smallest peak.

    Raises ValueError above 2e6 combinations, Infeasible when every combination costs infinity.

    >>> from sbp.passes.plan.budget import Load
    >>> heavy = Load(0, 0, 1, np.array([3.0, 2.0]))
    >>> brute_force_within(CostNetwork((np.array([1.0, 9.0]),), ()), Budget((heavy,), 2.0)).states
    (1,)
    """
    states, total = all_costs(network)
    peak = np.zeros(total.size)
    for time in {load.start for load in budget.loads}:
        alive = np.zeros(total.size)
        for load in budget.loads:
            if load.start <= time < load.end:
                alive += load.bytes[states[load.node]]
        peak = np.maximum(peak, alive)
    finite = np.isfinite(total)
    if not finite.any():
        raise Infeasible()
    least = float(peak[finite].min())
    wanted = finite & (peak <= max(budget.limit, least))
    best = int(np.where(wanted, total, np.inf).argmin())
    chosen = tuple(int(state) for state in states[:, best])
    cost = network.cost(chosen)
    return BudgetSolution(
        chosen, cost, cost if least <= budget.limit else np.inf, float(peak[best]), least, budget.limit
    )
