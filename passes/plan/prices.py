"""Prices on bytes at the times that bind: the Lagrangian bound of a cost network under a budget.

With a price per byte and time the limit is part of the costs: what lives at a time costs its bytes, what may
live there is paid back. Any prices give a lower bound. The best are sought by steps along what is used too
much, of a length that grows while it pays and else shrinks (a level method: Goffin and Kiwiel, 1999). Between
steps there are only two sweeps of TRW-S, so that neither waits for the other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sbp.passes.plan import constants, forests, sweeps
from sbp.passes.plan.budget import FlatBudget, Load
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.flat_network import FlatNetwork
from sbp.passes.plan.network import RELATIVE_NOISE, Indices, Table
from sbp.passes.plan.sweeps import Dual


@dataclass(frozen=True)
class TimePrices:
    """What a byte costs at some times, in seconds; at all others nothing.

    >>> prices = TimePrices(np.array([1, 5]), np.array([2.0, 3.0]))
    >>> loads = [Load(0, 0, 4, np.array([1.0, 0.0])), Load(0, 4, 6, np.array([0.0, 1.0]))]
    >>> prices.priced_unary([np.array([0.0, 0.5])], loads)
    (array([2. , 3.5]),)
    """

    times: Indices
    prices: Table

    def priced_unary(self, unary: Sequence[Table], loads: Sequence[Load]) -> tuple[Table, ...]:
        """Costs of nodes' states with those of their bytes; equal ones stay one object."""
        until = np.concatenate([[0.0], np.cumsum(self.prices)])
        begin, end = (np.searchsorted(self.times, [getattr(x, f) for x in loads]) for f in ("start", "end"))
        costs, known = list(unary), dict[tuple[int, int, float], Table]()
        for load, price in zip(loads, (until[end] - until[begin]).tolist(), strict=True):
            if price > 0.0 and load.node >= 0:
                key = id(costs[load.node]), id(load.bytes), price
                if key not in known:
                    known[key] = costs[load.node] + price * load.bytes
                costs[load.node] = known[key]
        return tuple(costs)

    def with_time(self, time: int, price: float) -> "TimePrices":
        """The same, and bytes at a time cost more.

        >>> TimePrices(np.array([1, 5]), np.array([2.0, 3.0])).with_time(4, 1.0).times.tolist()
        [1, 4, 5]
        """
        at = np.searchsorted(self.times, time)
        return TimePrices(np.insert(self.times, at, time), np.insert(self.prices, at, price))


NO_PRICES = TimePrices(np.zeros(0, dtype=np.int64), np.zeros(0))


class Prices:
    """Raises the bound step by step; `at` are the prices per byte and time, `best` those of its best.

    Arguments:
      flat: the network, with finite costs only.
    """

    def __init__(self, flat: FlatNetwork, budget: FlatBudget, constant: float, effort: Effort) -> None:
        self.flat, self.budget, self.constant = flat, budget, constant
        self.dual = Dual(flat, effort.count)
        self.at = np.zeros(budget.room.size)
        self.best = self.at
        self.lower = -np.inf
        self.use: Table | None = None
        self.hope = 0.0
        self.waited = 0
        self.reached = -np.inf

    def step(self, cost: float) -> Indices:
        """Two sweeps, states that go with them, new prices. `cost` is the least known of what fits."""
        self.dual.sweep(True)
        swept = self.dual.sweep(False) - self._paid_back()
        if swept > self.lower:
            proven = self.dual.lower_bound() - self._paid_back()
            if proven > self.lower:
                self.lower, self.best = proven, self.at
        states = self.dual.decode(True)
        now = forests.use_of(self.budget, states)
        self.use = now if self.use is None else self.use + constants.LATEST_USE * (now - self.use)
        self._level(swept, cost)
        return states

    def excess(self) -> Table:
        """What each state of each node at least adds to the bound, at the prices of now."""
        excess = np.zeros(self.dual.theta.size)
        for forward in (True, False):
            self.dual.sweep(forward, excess)
        return excess

    def at_least(self) -> list[Table]:
        """Per node, a lower bound on what costs each assignment with a state, at the prices of now."""
        bound = self.dual.lower_bound() - self._paid_back()
        return self.flat.split(bound + self.excess())

    def to_budget(self, budget: FlatBudget, more: float) -> None:
        """Goes on with other loads, whose times may be others.

        Arguments:
          more: bytes that there may be more than before, at all times. What loads are there beside those of
            before does not lower the bound.
        """
        at, best = (self._dear(prices) for prices in (self.at, self.best))
        self.lower -= more * float(self.best.sum())
        self.charge(np.zeros(self.at.size))
        self.budget, self.at, self.use = budget, np.zeros(budget.room.size), None
        self.charge(self._at_times(at))
        self.best = self._at_times(best)
        self.hope, self.waited, self.reached = 0.0, 0, -np.inf

    def begin_at(self, known: TimePrices) -> None:
        """Prices to begin with, each at the last time here that is not after its own."""
        self.charge(self._at_times(known))

    def best_prices(self) -> TimePrices:
        """The prices of the best bound."""
        return self._dear(self.best)

    def _dear(self, prices: Table) -> TimePrices:
        dear = prices > 0.0
        return TimePrices(self.budget.tightest[dear], prices[dear])

    def _at_times(self, known: TimePrices) -> Table:
        prices = np.zeros(self.budget.room.size)
        at = np.searchsorted(self.budget.times, known.times, side="right") - 1
        np.add.at(prices, np.maximum(at, 0), known.prices)
        return prices

    def _level(self, swept: float, cost: float) -> None:
        """A step toward the level hoped for, or back to the best prices with less hope."""
        size = abs(self.lower + self.constant)
        if self.hope <= constants.LEAST_HOPE * size:
            self.hope = constants.FIRST_HOPE * size if np.isinf(cost) else 0.2 * (cost - self.lower)
        if swept >= self.reached + 0.5 * self.hope:
            self.reached, self.waited = swept, 0
            # Where nothing fits the bound has no end; prices must have one.
            most = cost - self.lower if np.isfinite(cost) else constants.MOST_HOPE * size
            self.hope = min((1.0 + constants.HOPE_GROWTH) * self.hope, most)
        else:
            self.waited += 1
        if self.waited > constants.PRICE_PATIENCE:
            self.waited, self.reached = 0, self.lower
            self.hope *= 0.5
            self.charge(self.best)
        assert self.use is not None
        over = self.use - self.budget.room
        over[(over < 0.0) & (self.at == 0.0)] = 0.0
        # Averages come near to the room and never to it; a step is as long as this is little.
        over[np.abs(over) <= RELATIVE_NOISE * np.abs(self.budget.room)] = 0.0
        square = float((over * over).sum())
        if square > 0.0:
            self.charge(np.maximum(0.0, self.at + self.hope / square * over))

    def _paid_back(self) -> float:
        return float((self.at * self.budget.room).sum())

    def charge(self, prices: Table) -> None:
        """Goes to other prices."""
        forests.price_loads(self.budget, prices - self.at, self.dual.theta, self.flat.offsets)
        self.at = prices


def least_peak(
    flat: FlatNetwork, budget: FlatBudget, limit: float, states: Indices, effort: Effort
) -> tuple[Indices, float]:
    """States with the smallest peak found, starting from some, and a lower bound on the peak of any.

    For weights of the times that add up to one, no assignment's peak is below the least weighted use; the
    weights follow the average of what the cheapest assignments use (multiplicative weights). Costs count only
    as finite or not.
    """
    search = _PeakSearch(flat, budget, limit - budget.room, states, effort)
    for number in range(constants.PEAK_ROUNDS):
        if effort.is_spent or search.peak <= search.lower * (1.0 + RELATIVE_NOISE):
            break
        search.weigh(constants.PEAK_SHARPNESS * math.sqrt(number + 1.0))
        search.move()
    return search.states, search.lower


class _PeakSearch:
    """Weights of times from below, moves from above."""

    def __init__(
        self, flat: FlatNetwork, budget: FlatBudget, fixed: Table, states: Indices, effort: Effort
    ) -> None:
        self.forbidden = 1.0 + float(budget.bytes.sum())
        self.flat = flat._replace(
            theta=np.where(np.isinf(flat.theta), self.forbidden, 0.0),
            pool=np.where(np.isinf(flat.pool), self.forbidden, 0.0),
        )
        self.budget, self.fixed = budget, fixed
        self.dual = Dual(self.flat, effort.count)
        self.weights = np.zeros(fixed.size)
        self.average: Table | None = None
        self.work = forests.workplace(flat, budget, 1)
        self.states, self.lower, self.peak, self.broken = states, 0.0, np.inf, np.inf
        self.offer(states)

    def offer(self, states: Indices) -> None:
        peak = float((forests.use_of(self.budget, states) + self.fixed).max(initial=0.0))
        broken = sweeps.total_cost(self.flat, states)
        if (broken, peak) < (self.broken, self.peak):
            self.states, self.peak, self.broken = states, peak, broken

    def weigh(self, sharpness: float) -> None:
        """Steps of the weights, with the bound of each."""
        for _ in range(constants.HELD_STEPS):
            self.dual.sweep(True)
            self.dual.sweep(False)
            self.lower = max(self.lower, self.dual.lower_bound() + float((self.weights * self.fixed).sum()))
            states = self.dual.decode(True)
            self.offer(states)
            use = forests.use_of(self.budget, states) + self.fixed
            self.average = use if self.average is None else 0.9 * self.average + 0.1 * use
            scaled = sharpness * self.average / max(float(self.average.max(initial=0.0)), 1e-300)
            weights = exponentials(scaled - scaled.max(initial=0.0))
            weights /= max(float(weights.sum()), 1e-300)
            forests.price_loads(self.budget, weights - self.weights, self.dual.theta, self.flat.offsets)
            self.weights = weights

    def move(self) -> None:
        """Moves toward a somewhat smaller peak."""
        budget = self.budget._replace(room=(1.0 - constants.CLOSE) * self.peak - self.fixed)
        states = self.states.copy()
        use = forests.use_of(budget, states)
        theta = self.flat.theta.copy()
        forests.price_loads(budget, self.weights, theta, self.flat.offsets)
        moves, most = constants.MOVES, constants.FOREST_NODES
        forests.improve(self.flat, budget, theta, self.work, states, use, moves, moves * most, most, 0.0)
        self.offer(states)


def exponentials(values: Table) -> Table:
    """About e to the power of values that are not positive, the same on every machine: (1 + x / 1024) to the
    power of 1024, and 0 below.

    >>> exponentials(np.array([0.0, -1.0, -2000.0])).round(3).tolist()
    [1.0, 0.368, 0.0]
    """
    powers = np.maximum(0.0, 1.0 + values / 1024)
    for _ in range(10):
        powers *= powers
    return powers
