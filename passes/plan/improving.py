"""Under a limit: the assignments known of a network, and moves from one to better ones.

The network is reduced first, as far as that is exact whatever loads add up to; what is left is the kernel.
"""

import math
from collections.abc import Callable

import numpy as np

from sbp.passes.plan import constants, forests, sweeps
from sbp.passes.plan.budget import Budget, FlatBudget, flat_budget
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.eliminate import eliminate_parts
from sbp.passes.plan.flat import Indices, flat_network
from sbp.passes.plan.network import CostNetwork, Table
from sbp.passes.plan.parts import ceiling_of, least_of
from sbp.passes.plan.prices import Prices
from sbp.passes.plan.reduce import reduce_network


class Improving:
    """The kernel of a network, the best of its assignments that is known, and what bytes cost.

    Arguments as of `solve_within`.
    """

    def __init__(self, network: CostNetwork, budget: Budget, effort: Effort, good_gap: float) -> None:
        self.network, self.budget, self.good_gap = network, budget, good_gap
        self.effort = effort
        part = effort.part(constants.PART_SHARE) if budget.loads else effort
        self.reduction = eliminate_parts(reduce_network(network, part, budget.loads), effort)
        kernel = self.reduction.kernel
        flat = flat_network(kernel)
        self.loads = self.reduction.loads
        """Of the kernel's nodes."""
        self.flat_budget = flat_budget(flat, self.loads, budget.limit)
        ceiling = ceiling_of(kernel)
        self.flat = flat.filled(ceiling)
        self.finite = least_of(kernel) + 0.9999 * ceiling
        """What is dearer has an infinite entry."""
        self.prices = Prices(flat, self.flat_budget, ceiling, self.reduction.constant, effort)
        self.work = forests.workplace(flat, self.flat_budget, 1)
        self.states: Indices | None = None
        self.cost = math.inf
        self.nearest = np.zeros(flat.turn.size, dtype=np.int64)
        """The states that keep the limit, or come nearest to it."""
        self.excess = (True, math.inf)
        self.noise = 0.0

    def _polish(self, states: Indices) -> None:
        """Moves from these states on, at the prices of now; higher ones where they do not fit."""
        states, prices = states.copy(), self.prices.at
        room = self.flat_budget.room

        def priced(k: int, use: Table) -> Table:
            nonlocal prices
            over = use > room
            if not over.any():
                return self._priced(prices * constants.DISCOUNTS[k % len(constants.DISCOUNTS)])
            if k:
                prices = prices.copy()
                typical = prices[prices > 0.0].mean() if prices.any() else self._typical_price(states)
                prices[over] = 1.5 * prices[over] + 0.5 * typical
            return self._priced(prices)

        self._moved(states, self.flat_budget, priced, len(constants.DISCOUNTS))
        self._offer(states)

    def _cheapest_near(self, states: Indices) -> Indices:
        """About the cheapest states at the prices of now, whatever they need."""
        states = states.copy()
        free = self.flat_budget._replace(room=np.full(self.flat_budget.room.size, np.inf))
        theta = self._priced(self.prices.at)
        self._moved(states, free, lambda *_: theta)
        return states

    def _moved(
        self, states: Indices, budget: FlatBudget, priced: Callable[[int, Table], Table], kinds: int = 1
    ) -> None:
        """Moves from states on."""
        lower = self.prices.lower
        cost = abs(self.reduction.constant + lower) if math.isfinite(lower) else 0.0
        given = self.flat, budget, priced, self.work, states, cost, self.effort
        forests.improve_in_rounds(*given, constants.MOVE_ROUNDS, kinds)

    def _mixed(self, states: Indices, others: Indices) -> Indices:
        """The states with those of the others on a random forest."""
        mixed = states.copy()
        most = min(mixed.size, 1 << (1 + forests.draw(self.work, 12)))
        taken = forests.grow(self.flat, self.work, most, np.arange(mixed.size), 1, 2)
        region = self.work.order[:taken]
        mixed[region] = others[region]
        return mixed

    def _offer(self, states: Indices) -> None:
        over = forests.use_of(self.flat_budget, states) - self.flat_budget.room
        excess = float(np.maximum(over, 0.0).sum())
        cost = sweeps.total_cost(self.flat, states)
        if excess == 0.0 and cost < min(self.cost, self.finite):
            self.cost, self.states = cost, states
        if (cost >= self.finite, excess) < self.excess:
            self.excess, self.nearest = (cost >= self.finite, excess), states

    def _typical_price(self, states: Indices) -> float:
        """About a hundredth of the cost for the whole limit."""
        cost = min(sweeps.total_cost(self.flat, states), self.finite)
        return 0.01 * abs(self.reduction.constant + cost) / max(self.budget.limit, 1.0)

    def _priced(self, prices: Table) -> Table:
        theta = self.flat.theta.copy()
        forests.price_loads(self.flat_budget, prices, theta, self.flat.offsets)
        return theta
