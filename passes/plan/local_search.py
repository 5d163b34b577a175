"""Under a limit: the assignments known of a network, and moves from one to better ones.

The network is reduced first, as far as that is exact whatever loads add up to; what is left is the kernel.

What is cheapest at some prices of bytes needs too much or too little, since equal layers choose alike at
prices. Together such assignments have what a good one takes: some layers as here, some as there. So a network
of which each node has only the states that some of them have, and those that cost least by the bound, has an
answer nearly as good as the whole, and is a tenth of it or less (a column generation: Dantzig and Wolfe,
1960).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sbp.passes.plan import constants, forests, sweeps
from sbp.passes.plan.budget import Budget, FlatBudget, Load, flat_budget, loads_on
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.eliminate import eliminate_parts
from sbp.passes.plan.flat_network import flat_network
from sbp.passes.plan.network import CostNetwork, Indices, Table, ceiling_of, least_of, restriction
from sbp.passes.plan.prices import Prices
from sbp.passes.plan.reduce import reduce_network


class LocalSearch:
    """The kernel of a network, the best of its assignments that is known, and what bytes cost.

    Arguments as of `solve_within`.
    """

    def __init__(self, network: CostNetwork, budget: Budget, effort: Effort, good_gap: float) -> None:
        self.network, self.budget, self.good_gap = network, budget, good_gap
        self.effort = effort
        part = effort.part(constants.PART_SHARE) if budget.loads else effort
        self.reduction = eliminate_parts(reduce_network(network, part, budget.loads), effort)
        kernel = self.reduction.kernel
        self.loads = self.reduction.loads
        """Of the kernel's nodes."""
        ceiling = ceiling_of(kernel)
        self.flat = flat = flat_network(kernel, ceiling)
        self.flat_budget = flat_budget(flat, self.loads, budget.limit)
        self.finite = least_of(kernel) + 0.9999 * ceiling
        """What is dearer has an infinite entry."""
        self.prices = Prices(flat, self.flat_budget, self.reduction.constant, effort)
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


@dataclass(frozen=True, slots=True)
class JointNetwork:
    """A network on the states that some assignments have.

    Arguments:
      network, loads: on these states.
      states: per node the states.
    """

    network: CostNetwork
    loads: tuple[Load, ...]
    states: tuple[Indices, ...]

    def to_joint(self, states: Indices) -> list[int]:
        """One of the assignments in terms of this network."""
        return [int(keep.searchsorted(state)) for keep, state in zip(self.states, states, strict=True)]

    def to_whole(self, states: Sequence[int]) -> Indices:
        """States of this network in terms of the whole."""
        return np.array(
            [keep[state] for keep, state in zip(self.states, states, strict=True)], dtype=np.int64
        )


def joint_network(network: CostNetwork, loads: Sequence[Load], among: Sequence[Indices]) -> JointNetwork:
    """The network on the states that some assignments have.

    >>> network = CostNetwork((np.arange(3.0), np.arange(3.0)), ())
    >>> found = joint_network(network, (), [np.array([0, 2]), np.array([1, 2])])
    >>> [theta.tolist() for theta in found.network.unary]
    [[0.0, 1.0], [2.0]]
    """
    columns = np.sort(np.stack(among), axis=0)
    is_new = np.ones(columns.shape, dtype=np.bool_)
    is_new[1:] = columns[1:] != columns[:-1]
    return on_states(network, loads, [columns[is_new[:, k], k] for k in range(columns.shape[1])])


def on_states(network: CostNetwork, loads: Sequence[Load], kept: Sequence[Indices]) -> JointNetwork:
    """The network on some of the states of each node, in ascending order."""
    return JointNetwork(restriction(network, kept), loads_on(loads, kept), tuple(kept))


def cheapest_states(excess: Sequence[Table], count: int) -> list[Indices]:
    """So many assignments: of every node the state that adds the least to the bound, the next one, and so on.

    >>> [states.tolist() for states in cheapest_states([np.array([2.0, 0.0, 1.0]), np.array([0.0])], 2)]
    [[1, 0], [2, 0]]
    """
    order = [np.argsort(added, kind="stable") for added in excess]
    return [np.array([x[min(k, x.size - 1)] for x in order], dtype=np.int64) for k in range(count)]


class Known:
    """Assignments of a network that were seen, and which of them were brought together last."""

    def __init__(self) -> None:
        self.states: list[Indices] = []
        self.seen, self.last = set[bytes](), set[bytes]()
        self.lower = -np.inf

    def forget(self) -> None:
        """That any were brought together: what they come to is another thing under another limit."""
        self.last, self.lower = set(), -np.inf

    def add(self, states: Indices) -> None:
        """Keeps an assignment, if it is a new one."""
        key = states.tobytes()
        if key not in self.seen:
            self.seen.add(key)
            self.states.append(states.copy())

    def closest(
        self, values: Sequence[float], cost: float, lower: float, best: Indices | None
    ) -> list[Indices]:
        """Those with the least values, and the best one; nothing if these are those of the last time. What
        is far from the best is forgotten.

        Arguments:
          values: of all that are kept, at the prices of now.
          cost: of the best one.
          lower: the bound. What is worth as much more than the cost as this is below it is far away.
        """
        most = 2.0 * cost - lower if np.isfinite(cost) else np.inf
        order = [
            k for k in np.argsort(np.array(values), kind="stable")[: constants.KEPT] if values[k] <= most
        ]
        self.states = [self.states[k] for k in order]
        among = list[Indices]()
        for states in [*([] if best is None else [best]), *self.states]:
            far = constants.APART * states.size
            if len(among) < constants.TOGETHER and all(np.count_nonzero(states != x) > far for x in among):
                among.append(states)
        keys = {x.tobytes() for x in among}
        if keys <= self.last:
            return []
        self.last = keys
        return among

    def has_risen(self, cost: float, lower: float) -> bool:
        """Whether the bound has risen much since the last time that it had."""
        if not lower - self.lower > constants.RISEN * (cost - lower):
            return False
        self.lower = lower
        return True
