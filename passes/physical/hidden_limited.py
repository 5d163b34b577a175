"""The plan with the shortest step within a limit on memory: the search of hidden.py, with what bytes cost.

Each problem with exposed shares is solved under the limit (plan/within.py), which takes much longer than
without one. So parallelisms are compared first at the prices of bytes that hold for the cheapest plan that
fits: one solution without a limit each, which needs about as much as that plan. Those with the shortest steps
are then brought within the limit. A parallelism that has no room is not thrown away: what it excludes costs
more, so that those tensors leave it that free the most memory for what it takes.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sbp.passes.physical.evaluate import OVERLAPPING
from sbp.passes.physical.exposure import Clock, Exposure, Shares
from sbp.passes.physical.fit import MARGIN, LimitedProblem, LimitedStart
from sbp.passes.physical.hidden import LOST, POINTS, ShortestStep, StepLook, solved_alike
from sbp.passes.plan.budget import Budget, Load
from sbp.passes.plan.model import ChosenSignatures
from sbp.passes.plan.network import CostNetwork, Infeasible, Table
from sbp.passes.plan.seeds import ZERO_3_ANY, SeedUse, restricted, seed_name, seeds_for, tensors_of
from sbp.passes.plan.within import LimitedSearch

SHARDED = SeedUse("sharded weights", batch=False, weights=True, moments=True)
MORE_PAIRS = ((ZERO_3_ANY, SHARDED),)
"""For the outermost axis, and for the others, beside those of plan/seeds.py: weights lie in as many parts as
there are devices, and the batch at rest in fewer (MaxText's layout on two axes)."""
WORTH = 0.999
"""Of the step that the search begins with: a longer one is not taken. That plan is not proven to be the
cheapest, as without a limit, so less has to be won than there."""
FIRST_ROUNDS, POINT_ROUNDS, LAST_ROUNDS = 8, 3, 4
"""Solutions within the limit at the plan that the search begins with, at each of the best parallelisms, and
at last at the best plan."""
FIRST_SHARE, COMPARED_SHARE, POINTS_SHARE = 0.4, 0.6, 0.9
"""Of the time, until when the first of these begin, parallelisms are compared, and theirs begin."""
GOOD_GAP = 0.01
"""A solution within the limit ends this near to its bound."""
MOST_SHARED = 3
"""Solutions to follow that one leaves time for."""
TRIES = 3
"""How often a solution is asked for less, because its plan needs more than the limit."""


def shortest_within(
    problem: LimitedProblem,
    start: LimitedStart,
    cheapest: ChosenSignatures,
    time_limit_seconds: float | None = None,
) -> ShortestStep:
    """The plan with the shortest step that is found and keeps the limit.

    Arguments:
      start: what the search for the cheapest has left.
      cheapest: that keeps the limit.
      time_limit_seconds: after which no other plan is looked at.
    """
    seconds = math.inf if time_limit_seconds is None else time_limit_seconds
    search = _LimitedLooks(problem, start, cheapest, seconds)
    base = search.best
    platform = problem.boxings.network.hardware.platform
    if platform not in OVERLAPPING or not (base.times.sent or base.times.talked):
        return ShortestStep(cheapest, base.times.step_seconds)
    looked, left = search.run()
    best = search.best
    if best.times.step_seconds > WORTH * base.times.step_seconds:
        return ShortestStep(cheapest, base.times.step_seconds, looked, left)
    known = cheapest.cheapest_seconds
    seconds = base.times.seconds if known is None else known
    chosen = replace(best.assignment, cheapest_seconds=seconds)
    return ShortestStep(chosen, best.times.step_seconds, looked, left)


@dataclass(frozen=True, slots=True)
class _Point:
    """A parallelism that was looked at: the costs of its states, and its plan, which may not fit."""

    unary: tuple[Table, ...]
    states: tuple[int, ...]
    look: StepLook
    rank: float


class _LimitedLooks:
    """What was looked at so far; `best` has the shortest step of those that fit."""

    def __init__(
        self, problem: LimitedProblem, start: LimitedStart, cheapest: ChosenSignatures, seconds: float
    ) -> None:
        self.problem, self.start = problem, start
        self.bound = cheapest.bound + cheapest.beyond_seconds
        self.model, self.network = start.model, start.network
        self.clock = Clock(self.model.c, self.model.boxings)
        self.exposure = Exposure(self.model, self.network)
        self.begun, self.seconds = time.monotonic(), seconds
        self.counted_bytes, self.prices = start.counted_bytes, start.prices
        self.seen: set[tuple[int, ...]] = set()
        self.best_shares: Shares | None = None
        self.best = StepLook(cheapest, self.clock.times(cheapest))

    def spent(self, share: float = 1.0) -> bool:
        return time.monotonic() >= self.begun + share * self.seconds

    def run(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the parallelisms that were looked at, and of those for which there was no time."""
        base = self.best
        self.descend(base, self.network.unary, FIRST_ROUNDS, FIRST_SHARE)
        points, looked, left = self.compared()
        for point in points[:POINTS]:
            if self.spent(POINTS_SHARE):
                break
            unary = self.roomy(point.unary, base)
            self.counted_bytes, self.prices = self.start.counted_bytes, self.start.prices
            at = self.within(CostNetwork(unary, self.network.edges), POINT_ROUNDS, point.states)
            self.descend(point.look if at is None else at, unary, POINT_ROUNDS, POINTS_SHARE)
        if self.best is not base:
            self.descend(self.best, self.network.unary, LAST_ROUNDS, 1.0, self.best_shares)
        return looked, left

    def compared(self) -> tuple[list[_Point], tuple[str, ...], tuple[str, ...]]:
        """The parallelisms at the prices of bytes, the shortest steps first."""
        tensors = tensors_of(self.model.graph, self.model.boundary.ties)
        axes = self.model.c.placement.ndim
        pairs = [(outer, *(inner,) * (axes - 1)) for outer, inner in MORE_PAIRS] if axes > 1 else []
        looked, seeds, points = list[str](), [*pairs, *seeds_for(axes)], list[_Point]()
        while seeds and not self.spent(COMPARED_SHARE):
            seed = seeds.pop(0)
            looked.append(seed_name(seed))
            unary = restricted(self.model, seed, tensors)
            point = self.priced(unary)
            if point is not None:
                points.append(point)
        points.sort(key=lambda x: x.rank)
        return points, tuple(looked), tuple(seed_name(seed) for seed in seeds)

    def priced(self, unary: tuple[Table, ...]) -> _Point | None:
        """The cheapest plan of these states where bytes have their prices; None if it was looked at."""
        costs = self.start.prices.charged(unary, self.start.loads)
        remaining = max(0.0, self.begun + self.seconds - time.monotonic())
        try:
            states = solved_alike(CostNetwork(costs, self.network.edges), remaining)
        except Infeasible:
            return None
        if states in self.seen:
            return None
        self.seen.add(states)
        look = self.look(states)
        if look.rank < self.best.rank and self.problem.fits(look.assignment):
            self.best = look
        over = self.start.prices.excess_seconds(self.start.loads, states, self.counted_bytes)
        return _Point(unary, states, look, look.times.step_seconds + over)

    def look(self, states: tuple[int, ...]) -> StepLook:
        chosen = self.model.chosen(states, self.network.cost(states), self.bound)
        return StepLook(chosen, self.clock.times(chosen))

    def roomy(self, unary: tuple[Table, ...], base: StepLook) -> tuple[Table, ...]:
        """The same where their least memory is within the limit; else what is excluded costs more instead.

        Leaving a parallelism altogether costs as much as the step.
        """
        if _least_peak(unary, self.start.loads) <= self.counted_bytes:
            return unary
        narrowed = [a is not b for a, b in zip(unary, self.network.unary, strict=True)]
        extra, known = base.times.seconds / max(1, sum(narrowed)), dict[tuple[int, int], Table]()
        for a, b in zip(unary, self.network.unary, strict=True):
            if (id(a), id(b)) not in known:
                known[id(a), id(b)] = a if a is b else np.where(np.isinf(a), b + extra, a)
        return tuple(known[id(a), id(b)] for a, b in zip(unary, self.network.unary, strict=True))

    def descend(
        self,
        at: StepLook | None,
        unary: Sequence[Table],
        rounds: int,
        until: float,
        shares: Shares | None = None,
    ) -> None:
        """Solves anew with what is exposed, until a plan comes back or is lost.

        Arguments:
          unary: costs of states.
          until: as a part of the time.
          shares: with which the plan to begin at was found.
        """
        for left in range(rounds, 0, -1):
            if at is None or self.spent(until) or at.times.step_seconds > LOST * self.best.times.step_seconds:
                break
            shares = self.exposure.shares(at.times, shares)
            before = self.best
            at = self.within(self.exposure.weighted(shares, unary), left)
            if self.best is not before:
                self.best_shares = shares

    def within(
        self, network: CostNetwork, left: int, states: tuple[int, ...] | None = None
    ) -> StepLook | None:
        """The plan that solves a network under the limit; None if none is found, or it was looked at.

        Arguments:
          left: solutions that are to follow.
          states: to begin at.
        """
        remaining = self.begun + self.seconds - time.monotonic()
        budget, seconds = (
            Budget(self.start.loads, self.counted_bytes),
            max(0.0, remaining / (min(left, MOST_SHARED) + 1)),
        )
        try:
            search = LimitedSearch(network, budget, seconds, None, GOOD_GAP)
        except Infeasible:
            return None
        search.begin_at(self.prices, states)
        found = search.run()
        for _ in range(TRIES):
            if not found.fits or found.states in self.seen:
                return None
            self.seen.add(found.states)
            look = self.look(found.states)
            peak = self.problem.peak_bytes(look.assignment)
            # What the search counts and what the evaluator does differ by the structure of the plan.
            counted = min(found.peak_bytes, search.budget.limit)
            self.counted_bytes = counted * MARGIN * self.problem.limit_bytes / peak
            if peak <= self.problem.limit_bytes:
                self.prices = search.prices.found()
                self.best = min(self.best, look, key=lambda x: x.rank)
                return look
            found = search.go_on(self.counted_bytes, seconds / TRIES)
        return None


def _least_peak(unary: Sequence[Table], loads: Sequence[Load]) -> float:
    """What states that are not excluded keep alive at least."""
    events = dict[int, float]()
    for load in loads:
        size = (
            load.bytes.min()
            if load.node < 0
            else load.bytes[np.isfinite(unary[load.node])].min(initial=np.inf)
        )
        events[load.start] = events.get(load.start, 0.0) + float(size)
        events[load.end] = events.get(load.end, 0.0) - float(size)
    return float(np.cumsum([events[t] for t in sorted(events)]).max(initial=0.0))
