"""Under a limit: the assignments known of a network, and moves from one to better ones.

The network is reduced first, as far as that is exact whatever loads add up to; what is left is the kernel.
"""

import math

import numpy as np

from sbp.passes.plan import forests, sweeps
from sbp.passes.plan.budget import Budget, flat_budget
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.flat import Indices, flat_network
from sbp.passes.plan.network import CostNetwork, Table
from sbp.passes.plan.parts import ceiling_of, least_of
from sbp.passes.plan.prices import Prices
from sbp.passes.plan.reduce import reduce_network

_CHUNK_MOVES = 200
"""Moves at one discount, between two looks at the clock."""
_POLISH_MOVES = 6000
"""No more moves than this on one assignment in a round; it ends when no discount gains anything."""
_POLISH_VISITS = 8
"""How often they visit each node, on the average; fewer than steps of prices do in a round, since prices
bring more where states are many. Work is counted, not time: the same problem has the same answer."""
_POLISH_CHUNKS = 9
"""... and in how many chunks at least."""
_EVERY_NODE = 1 << 60
_DISCOUNTS = (1.0, 0.5, 0.0)
"""Parts of the prices, in turn: at full ones nobody takes the room that is left for what is little worth."""
REDUCING_SHARE = 0.3
"""Of the effort, for reducing a network at the most."""
_VISIT_SECONDS = 2e-9
"""What moving a node takes for each cell of its tables."""
_FOREST_NODES = 4096
"""Largest forest of a move."""


class Improving:
    """The kernel of a network, the best of its assignments that is known, and what bytes cost.

    Arguments as of `solve_within`.
    """

    def __init__(self, network: CostNetwork, budget: Budget, effort: Effort, good_gap: float) -> None:
        self.network, self.budget, self.good_gap = network, budget, good_gap
        self.effort = effort
        self.reduction = reduce_network(network, effort.part(REDUCING_SHARE), budget.loads)
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
        self.noise = self.least_gain = 0.0

    def _polish(self, states: Indices) -> None:
        """Moves from these states on, at the prices of now; higher ones where they do not fit."""
        states = states.copy()
        use = forests.use_of(self.flat_budget, states)
        visits = _POLISH_VISITS * states.size if self.hastens else _EVERY_NODE
        nodes = max(1, visits // _POLISH_CHUNKS)
        prices, idle = self.prices.at, 0
        for chunk in range(_POLISH_MOVES // _CHUNK_MOVES):
            if self.effort.is_spent or chunk * nodes >= visits or idle == len(_DISCOUNTS):
                break
            fits = bool((use <= self.flat_budget.room).all())
            theta = self._priced(prices * _DISCOUNTS[chunk % len(_DISCOUNTS)] if fits else prices)
            gained, nearer = forests.improve(
                self.flat, self.flat_budget, theta, self.work, states, use, _CHUNK_MOVES, nodes,
                _FOREST_NODES, self.noise,
            )  # fmt: skip
            self._moved(nodes)
            idle = idle + 1 if nearer == 0.0 and gained >= -self.least_gain else 0
            over = use > self.flat_budget.room
            if over.any():
                prices = prices.copy()
                typical = prices[prices > 0.0].mean() if prices.any() else self._typical_price()
                prices[over] = 1.5 * prices[over] + 0.5 * typical
        self._offer(states)

    def _cheapest_near(self, states: Indices) -> Indices:
        """About the cheapest states at the prices of now, whatever they need."""
        states = states.copy()
        free = self.flat_budget._replace(room=np.full(self.flat_budget.room.size, np.inf))
        use, theta = forests.use_of(free, states), self._priced(self.prices.at)
        for _ in range(_POLISH_CHUNKS):
            gained, _ = forests.improve(
                self.flat, free, theta, self.work, states, use, _CHUNK_MOVES, states.size,
                _FOREST_NODES, self.noise,
            )  # fmt: skip
            self._moved(states.size)
            if gained >= -self.least_gain:
                break
        return states

    def _mixed(self, states: Indices, others: Indices) -> Indices:
        """The states with those of the others on a random forest."""
        mixed = states.copy()
        most = min(mixed.size, 1 << (1 + forests.draw(self.work, 12)))
        taken = forests.grow(self.flat, self.work, most, 1, 2)
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

    def _typical_price(self) -> float:
        """About a hundredth of the cost for the whole limit."""
        return 0.01 * abs(self.reduction.constant + self.prices.lower) / max(self.budget.limit, 1.0)

    def _priced(self, prices: Table) -> Table:
        theta = self.flat.theta.copy()
        forests.price_loads(self.flat_budget, prices, theta, self.flat.offsets)
        return theta

    def _moved(self, nodes: int) -> None:
        """Counts moves of so many nodes; where there are few of them each is visited many times."""
        visits = min(nodes, _CHUNK_MOVES * self.flat.turn.size)
        self.effort.count.add(_VISIT_SECONDS * visits * (1 + self.flat.cells / max(1, self.flat.turn.size)))

    @property
    def hastens(self) -> bool:
        """Whether it ends before nothing improves any more."""
        return math.isfinite(self.effort.end) or self.good_gap > 0.0
