"""The solver: reduce, bound from below by sweeps, move from above, until the two meet.

Where what lives at once has a limit, prices of bytes are part of the bound; without one there are none.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from sbp.passes.plan import constants, forests, sweeps
from sbp.passes.plan.budget import Budget, BudgetSolution, Load, flat_budget
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.flat_network import all_costs, flat_network
from sbp.passes.plan.local_search import (
    JointNetwork,
    Known,
    LocalSearch,
    cheapest_states,
    joint_network,
    on_states,
)
from sbp.passes.plan.network import CostNetwork, Indices, Infeasible, Solution
from sbp.passes.plan.prices import least_peak

Progress = Callable[[float, float], None]
"""Is told, now and then: the least cost found so far, and the bound so far."""


def solve(
    network: CostNetwork, *, effort: Effort | None = None, progress: Progress | None = None
) -> Solution:
    """Cheapest assignment of the network, with a proven lower bound on the cost of any.

    The search ends when the gap is small (`PROVEN`), or neither cost nor bound improves any more; where its
    effort is spent before, the best assignment so far comes back with the bound so far (cost inf if none was
    found). The same network gives the same answer.

    Raises Infeasible (a ValueError) when every assignment contains an infinite cost.

    >>> equal = np.array([[0.0, np.inf], [np.inf, 0.0]])
    >>> solve(CostNetwork((np.array([0.0, 1.0]), np.array([3.0, 1.0])), ((0, 1, equal),)))
    Solution(states=(1, 1), cost=2.0, bound=2.0)
    """
    found = Solver(network, Budget((), math.inf), effort, progress, constants.PROVEN).run()
    if math.isinf(found.bound):
        raise Infeasible()
    return Solution(found.states, found.cost, found.bound)


def solve_within(
    network: CostNetwork,
    budget: Budget,
    *,
    effort: Effort | None = None,
    progress: Progress | None = None,
    good_gap: float = 0.0,
) -> BudgetSolution:
    """Cheapest assignment that fits into the budget, as far as it is found, with a proven lower bound.

    If none is found that fits: the one with the smallest peak found, and a lower bound on any peak. Where its
    effort has no end the search ends when neither cost nor bound improve.

    Arguments:
      good_gap: the search ends where the answer is proven to be this near to the best, as a part of its cost;
        with one it ends before its effort does too, when neither cost nor bound improve.

    Raises Infeasible (a ValueError) when every assignment contains an infinite cost.

    >>> from sbp.passes.plan.budget import Load
    >>> network = CostNetwork((np.array([0.0, 2.0]), np.array([0.0, 3.0])), ())
    >>> sizes = np.array([4.0, 1.0])
    >>> found = solve_within(network, Budget((Load(0, 0, 2, sizes), Load(1, 1, 3, sizes)), 5.0))
    >>> found.states, found.cost, found.peak_bytes
    ((1, 0), 2.0, 5.0)
    """
    return Solver(network, budget, effort, progress, good_gap).run()


class Solver(LocalSearch):
    """Rounds of steps of prices and of moves, on what is left of a network after reductions.

    Arguments as of `solve_within`; `is_part`: of another search, for some of its states; it ends where it
    improves no more.
    A search goes on under another limit from where it is.
    """

    def __init__(
        self,
        network: CostNetwork,
        budget: Budget,
        effort: Effort | None = None,
        progress: Progress | None = None,
        good_gap: float = 0.0,
        *,
        is_part: bool = False,
    ) -> None:
        super().__init__(network, budget, effort or Effort(), good_gap)
        self.is_part, self.progress = is_part, progress
        self.peaks = self.effort.part(1.0 - constants.PART_SHARE)
        self.known = Known()
        self.combined_seconds = 0.0
        """Of work that it took to bring together what is known, the last time."""
        self.begun_at: list[Indices] = []
        """Where it was told to begin: under another limit too."""
        self.rounds = 0
        self.rest_bound = -math.inf
        """Of what costs less than what is known, where that was solved by itself."""

    def go_on(self, limit: float, effort: Effort, taken: Sequence[Load] = ()) -> BudgetSolution:
        """The answer under another limit, with the prices and the states that were found so far.

        Arguments:
          taken: loads that are there too from now on. Where they are of nodes the bound is of the states that
            are left: a state that another could replace before is gone.
        """
        known = self.nearest if self.states is None else self.states
        if taken:
            self.loads = (*self.loads, *self._of_kernel(taken, known))
        more = limit - self.budget.limit
        self.budget = Budget((*self.budget.loads, *taken), limit)
        self.flat_budget = flat_budget(self.flat, self.loads, limit)
        self.prices.to_budget(self.flat_budget, more)
        self.work = forests.workplace(self.flat, self.flat_budget, int(self.work.random[0]))
        self._allow(effort)
        self.states, self.cost, self.excess = None, math.inf, (True, math.inf)
        self.known.add(known)
        self.known.forget()
        self.combined_seconds, self.rest_bound = 0.0, -math.inf
        for states in (*self.begun_at, known):
            self._offer(states)
        self._polish(known)
        return self.run()

    def _of_kernel(self, loads: Sequence[Load], known: Indices) -> list[Load]:
        """Loads in terms of the kernel; of nodes that are not left, as they are under the states known."""
        place = {node: k for k, node in enumerate(self.reduction.nodes)}
        states = self.reduction.expand(known.tolist())
        found = []
        for x in loads:
            if x.node in place:
                k = place[x.node]
                found.append(x._replace(node=k, bytes=x.bytes[self.reduction.labels[k]]))
            else:
                size = x.bytes[states[x.node] if x.node >= 0 else 0]
                found.append(x._replace(node=-1, bytes=np.array([size])))
        return found

    def start_from(self, states: Sequence[int]) -> None:
        """Looks at some states of the network and what fits near them, and at both from then on."""
        self.begun_at.append(np.array(self.reduction.project(states), dtype=np.int64))
        self._offer(self.begun_at[-1])
        self.known.add(self.begun_at[-1])
        if not self.is_part:
            self._polish(self.begun_at[-1])
            self.known.add(self.nearest if self.states is None else self.states)

    def smallest(self, effort: Effort, seconds: float) -> BudgetSolution:
        """States with the smallest peak found, and a lower bound on any by the loads that it was made with:
        those taken later are of one plan, and others may do without.

        Arguments:
          seconds: of work at the most, for each of the two.
        """
        self._allow(effort.at_most(seconds))
        least, self.states = self._least_peak(), None
        if self.loads is not self.reduction.loads:
            own = flat_budget(self.flat, self.reduction.loads, self.budget.limit)
            given = self.budget.limit, self.nearest, effort.at_most(seconds)
            least = least_peak(flat_network(self.reduction.kernel), own, *given)[1]
        return self._answer(least)

    def run(self) -> BudgetSolution:
        """The answer."""
        cells = (self.flat_budget.room.size + self.flat.twin.size + 1) * math.prod(self.flat.sizes.tolist())
        if cells <= constants.COMPARED_CELLS:
            return self._best_of_all()
        self._combine()
        self._rounds()
        least = 0.0
        if self.states is None and not self.is_part:
            least = self._least_peak()
            if self.states is not None:  # nothing but the peak was looked at
                self._polish(self.states)
                self._rounds()
        return self._answer(least)

    def _rounds(self) -> None:
        """Rounds until the effort is spent, or they bring nothing."""
        stalled = 0
        while stalled < constants.STALLED_ROUNDS or (math.isfinite(self.effort.end) and not self.good_gap):
            before = self.cost, self.prices.lower
            if self._round():
                break
            stalled = 0 if self._progressed(before) else stalled + 1

    def _least_peak(self) -> float:
        """A lower bound on any peak; the states with the smallest one that is found are known then."""
        given = self.flat_budget, self.budget.limit, self.nearest, self.effort
        self.nearest, least = least_peak(flat_network(self.reduction.kernel), *given)
        self._offer(self.nearest)
        return least

    def _round(self) -> bool:
        """Sweeps and moves; whether these were the last."""
        decoded: Indices = self.nearest
        for _ in range(constants.ROUND_SWEEPS):
            decoded = self.prices.step(self.cost)
            self._offer(decoded)
            if self._finished():
                break
        self.noise = constants.NOISE * abs(self.reduction.constant + self.prices.lower)
        self.rounds += 1
        self._polish(decoded)
        is_over = self._finished() or self._rest_is_solved()
        if not is_over:
            if not self.is_part:
                self.known.add(self._cheapest_near(decoded))
                self._combine()
            if self.states is not None:
                self._polish(self.states)
                for _ in range(constants.KICKS):
                    self._polish(self._mixed(self.states, decoded))
        if self.progress is not None:
            constant = self.reduction.constant
            self.progress(self.cost + constant, self.prices.lower + constant)
        return is_over or self._finished()

    def _combine(self) -> None:
        """The best of what is known together, and of that with what costs least by the bound."""
        begun, paid = self.effort.count.seconds, float((self.prices.best * self.flat_budget.room).sum())
        if self.is_part or self.combined_seconds > constants.PART_SHARE * self.effort.seconds_left:
            return
        priced = self.flat._replace(theta=self._priced(self.prices.best))
        values = [sweeps.total_cost(priced, x) - paid for x in self.known.states]
        among = self.known.closest(values, self.cost, self.prices.lower, self.states)
        if len(among) > 1:
            self._best_among(among, among)
        if self.known.has_risen(self.cost, self.prices.lower) and self.rounds:
            few = cheapest_states(self.flat.split(self.prices.excess()), constants.FEW_STATES)
            among = [
                *([] if self.states is None else [self.states]),
                *self.known.states[: constants.TOGETHER],
            ]
            self._best_among(among, [*among, *few])
        self.combined_seconds = self.effort.count.seconds - begun

    def _best_among(self, known: Sequence[Indices], among: Sequence[Indices]) -> None:
        """The best of the states that some assignments have, and the prices there.

        Arguments:
          known: where to begin.
        """
        effort, good = self.effort.part(constants.PART_SHARE), constants.COMBINED_GAP
        small = joint_network(self.reduction.kernel, self.loads, among)
        with suppress(Infeasible):  # each of them may have an infinite cost
            found = self._on(small, known, effort, good, is_part=True)
            if found.fits and math.isfinite(found.cost):
                self._polish(small.to_whole(found.states))

    def _rest_is_solved(self) -> bool:
        """Whether many states cost more than what is known: then the others alone are solved."""
        if self.is_part or self.states is None:
            return False
        kept = []
        for least, state in zip(self.prices.at_least(), self.states.tolist(), strict=True):
            pays = least < self.cost - self.noise
            pays[state] = True
            kept.append(np.flatnonzero(pays))
        if sum(map(len, kept)) > (1.0 - constants.SHRUNK) * self.flat.theta.size:
            return False
        good = self.good_gap * abs(self.cost + self.reduction.constant) / max(abs(self.cost), self.noise)
        rest = on_states(self.reduction.kernel, self.loads, kept)
        found = self._on(rest, [self.states], self.effort, good)
        self._offer(rest.to_whole(found.states))
        self.rest_bound = min(found.bound, self.cost)
        return True

    def _on(
        self,
        few: JointNetwork,
        known: Sequence[Indices],
        effort: Effort,
        good_gap: float,
        *,
        is_part: bool = False,
    ) -> BudgetSolution:
        """The answer on some of the states of each node.

        Arguments:
          known: where to begin, at the best prices.

        Raises Infeasible where each assignment of these has an infinite cost.
        """
        inner = Solver(
            few.network, Budget(few.loads, self.budget.limit), effort, None, good_gap, is_part=is_part
        )
        if inner.flat_budget.room.size:
            inner.prices.begin_at(self.prices.best_prices())
        for x in known:
            inner.start_from(few.to_joint(x))
        return inner.run()

    def _allow(self, effort: Effort) -> None:
        """Goes on with other effort."""
        self.effort = effort
        self.peaks = effort.part(1.0 - constants.PART_SHARE)

    def _best_of_all(self) -> BudgetSolution:
        """Every combination of states, where these are few."""
        states, costs = all_costs(self.reduction.kernel)
        over = Budget(self.loads, 0.0).alive(states).max(axis=0, initial=0.0) - self.budget.limit
        possible = np.isfinite(costs)
        if not possible.any():
            raise Infeasible()
        least = float(over[possible].min())
        best = int(np.where(possible & (over <= max(least, 0.0)), costs, np.inf).argmin())
        self.states, self.prices.lower = states[:, best], float(costs[best]) if least <= 0.0 else math.inf
        return self._answer(self.budget.limit + least)

    def _progressed(self, before: tuple[float, float]) -> bool:
        cost, lower = before
        if math.isinf(cost):
            return self.cost < cost
        least = constants.PROGRESS * abs(self.prices.lower + self.reduction.constant)
        return max(cost - self.cost, self.prices.lower - lower) > least

    def _finished(self) -> bool:
        if self.states is None:
            return self._nothing_fits() or self.peaks.is_spent
        good = max(self.noise, self.good_gap * abs(self.cost + self.reduction.constant))
        return self.cost - self.prices.lower <= good or self.effort.is_spent

    def _nothing_fits(self) -> bool:
        """Whether the bound is above what any assignment without an infinite entry costs."""
        return self.prices.lower > self.finite

    def _answer(self, least: float = 0.0) -> BudgetSolution:
        limit = self.budget.limit
        found = self.nearest if self.states is None else self.states
        states = self.reduction.expand(found.tolist())
        cost, peak = self.network.cost(states), self.budget.peak_bytes(states)
        proven = least > limit or self._nothing_fits()
        lower = max(self.prices.lower, self.rest_bound)
        bound = math.inf if proven else self.reduction.constant + lower
        if peak <= limit:
            bound = min(bound, cost)
        return BudgetSolution(states, cost, bound, peak, min(least, peak), limit)
