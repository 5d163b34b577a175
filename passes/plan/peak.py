"""The smallest peak: what to say of a budget that nothing is found to fit into."""

import numpy as np

from sbp.passes.plan import constants, forests, sweeps
from sbp.passes.plan.budget import FlatBudget
from sbp.passes.plan.dual import Dual
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.flat import FlatNetwork, Indices
from sbp.passes.plan.network import RELATIVE_NOISE, Table


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
        search.weigh(constants.PEAK_SHARPNESS * (number + 1.0) ** 0.5)
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
        self.dual = Dual(self.flat, 0.0, effort.count)
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
            self.lower = max(self.lower, self.dual.bound() + float(self.weights @ self.fixed))
            states = self.dual.decode(True)
            self.offer(states)
            use = forests.use_of(self.budget, states) + self.fixed
            self.average = use if self.average is None else 0.9 * self.average + 0.1 * use
            scaled = sharpness * self.average / max(float(self.average.max(initial=0.0)), 1e-300)
            weights = np.exp(scaled - scaled.max(initial=0.0))
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
