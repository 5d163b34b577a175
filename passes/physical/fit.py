"""The cheapest plan that fits: the search under a limit, until the evaluator agrees that it is kept."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sbp.passes.boxing.paths import Boxings
from sbp.passes.physical.enumerated import Weighed, cheapest_by_trying
from sbp.passes.physical.evaluate import HOLES, Evaluator
from sbp.passes.physical.insert import insert_boxing
from sbp.passes.physical.missed import missed_loads
from sbp.passes.physical.program import Physical
from sbp.passes.plan.budget import Budget, Fitted, Load
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.cost import local_bytes
from sbp.passes.plan.model import Boundary, ChosenSignatures
from sbp.passes.plan.network import CostNetwork
from sbp.passes.plan.priced import priced_starts
from sbp.passes.plan.prices import NO_PRICES, TimePrices
from sbp.passes.plan.recompute import RecomputingModel
from sbp.passes.plan.room import RoomModel
from sbp.passes.plan.solve import Progress
from sbp.passes.plan.within import LimitedSearch
from sbp.passes.program.graph import Graph

LEAST_TRIES, TRIES = 2, 12
"""How often the search is asked for less, because what it found needs more than it counted; the first also
if the time is over."""
CORRECTED_TRIES = 8
"""Of these, the first ones are asked for less only around the time at which what they found needs more."""
MARGIN = 0.998
"""Of what the next try may use."""
HELPED = 0.995
"""Of the smallest peak yet: what is found needs no more than this, or the next try may use much less."""
MOST_STEP = 0.85
"""Of what the last try was counted to use, then."""
UNFIT_SECONDS = 60.0
"""For a search under which nothing fits, where no time limit is given."""
SMALLEST_SECONDS = 4.0
"""For each look at the smallest peak, at the most."""
LAST_SHARE = 0.05
"""Of the time, for the last tries if none is left."""
NEAR = 1.005
"""Of the smallest peak: what a plan that is about as small may use."""
STARTS_SHARE = 0.25
"""Of the time, to find where to begin."""
GOOD_GAP = 0.005
"""The search for what fits ends this near to its bound."""


@dataclass(frozen=True)
class SmallestPeak:
    """The least memory that plans are known to need.

    Arguments:
      physical: the program with the smallest peak that was found.
      bytes: what it needs, by the evaluator.
      bound_bytes: what every plan needs, as the search counts it.
    """

    physical: Physical
    bytes: float
    bound_bytes: float


FASTEST_SHARE = 1 / 2
"""Of a limit on time, for the search without a limit on memory, where what it finds may not fit."""
ROOM_LEFT, ROOM_SHARE = 0.995, 1 / 3
"""A plan that needs less than this part of the limit has room left: the search is asked for more once, for no
longer than this part of the time that is left."""
SEARCH_SHARE = 0.5
"""Of the time, for the first search once it is known where to begin: prices and the bound are of this one."""


@dataclass(frozen=True)
class LimitedStart:
    """What a search under a limit has left to go on from.

    Arguments:
      model, network: of the program.
      loads: what states keep in memory, and what is there beside that.
      counted_bytes: what loads may add up to, so that the evaluator finds the plan to keep the limit.
      prices: of bytes.
    """

    model: RoomModel
    network: CostNetwork
    loads: tuple[Load, ...]
    counted_bytes: float
    prices: TimePrices


@dataclass(frozen=True)
class LimitedTries:
    """Tries to fit under way: what is searched, with what, from which states, and until when
    (`time.monotonic`)."""

    model: RoomModel
    network: CostNetwork
    search: LimitedSearch
    starts: tuple[tuple[int, ...], ...]
    until: float


@dataclass(frozen=True)
class FittedSignatures:
    """What was found under a limit.

    Arguments:
      assignment: the cheapest that fits, its bound that of all that fit; the fastest of any size if none.
      needed_bytes: what the fastest one needs.
      smallest: where none was found that fits, the nearest.
      start: to go on from, if one was searched for.
    """

    assignment: ChosenSignatures
    needed_bytes: float = 0.0
    smallest: SmallestPeak | None = None
    start: LimitedStart | None = None


@dataclass(frozen=True)
class LimitedProblem:
    """A program that is planned under a limit.

    Arguments:
      donated: positions of the inputs whose memory the results may take.
      limit_bytes: per device.
      time_limit_seconds: for the search.
      progress: is told of it.
      recomputes: whether ops may run again.
    """

    candidates: Candidates
    asked: Boundary
    boxings: Boxings
    donated: Sequence[int]
    limit_bytes: float
    time_limit_seconds: float | None = None
    progress: Progress | None = None
    recomputes: bool = True

    def keep_limit(self, fastest: ChosenSignatures) -> FittedSignatures:
        """The fastest assignment if it fits, else the cheapest that is found to."""
        if math.isinf(self.limit_bytes):
            return FittedSignatures(fastest)
        needed = self.peak_bytes(fastest)
        if needed <= self.limit_bytes:
            return FittedSignatures(fastest, needed)
        return replace(self.tried_out(self.fitted(fastest), fastest), needed_bytes=needed)

    def fitted(self, fastest: ChosenSignatures) -> FittedSignatures:
        """What `fit` finds; if nothing fits, what it finds of plans in which no op runs again."""
        began, found = time.monotonic(), self.fit(fastest)
        if found.smallest is None or not self.recomputes:
            return found
        left = None
        if self.time_limit_seconds is not None:
            left = self.time_limit_seconds - (time.monotonic() - began)
            left = max(left, LAST_SHARE * self.time_limit_seconds)
        plain = replace(self, recomputes=False, time_limit_seconds=left).fit(fastest)
        if plain.smallest is None:
            # Its bound is of plans in which no op runs again.
            return replace(plain, assignment=replace(plain.assignment, bound=fastest.bound))
        smallest = min(found.smallest, plain.smallest, key=lambda x: x.bytes)
        bound = min(found.smallest.bound_bytes, smallest.bytes)
        return replace(found, smallest=replace(smallest, bound_bytes=bound))

    def tried_out(self, found: FittedSignatures, fastest: ChosenSignatures) -> FittedSignatures:
        """The same, or what is cheaper and fits in a program so small that all plans can be looked at."""
        none = found.smallest is not None
        below, bound = (
            (math.inf, fastest.bound) if none else (found.assignment.seconds, found.assignment.bound)
        )
        given = self.candidates, self.asked, self.boxings
        better = cheapest_by_trying(*given, self.weighed, below, bound, recomputes=self.recomputes)
        return found if better is None else replace(found, assignment=better, smallest=None)

    def weighed(self, assignment: ChosenSignatures) -> Weighed:
        """What the plan of an assignment takes, and whether it keeps the limit."""
        looked = self.looked_at(assignment)
        seconds = Evaluator(looked.physical, self.boxings.network, self.donated).seconds()
        return Weighed(seconds, looked.bytes <= self.limit_bytes)

    def fits(self, assignment: ChosenSignatures) -> bool:
        """Whether the plan of an assignment keeps the limit."""
        return math.isinf(self.limit_bytes) or self.peak_bytes(assignment) <= self.limit_bytes

    def fits_program(self, takes: Evaluator) -> bool:
        """Whether a program keeps the limit."""
        return math.isinf(self.limit_bytes) or takes.peak_bytes() <= self.limit_bytes

    def peak_bytes(self, assignment: ChosenSignatures) -> float:
        """What one device needs at most under an assignment."""
        return self.looked_at(assignment).bytes

    def looked_at(self, assignment: ChosenSignatures) -> SmallestPeak:
        """The program of an assignment, with what it needs."""
        physical = insert_boxing(self.candidates, assignment, self.boxings)
        return SmallestPeak(
            physical, Evaluator(physical, self.boxings.network, self.donated).peak_bytes(), 0.0
        )

    def model(self) -> RoomModel:
        """The model of the program with its loads, not built."""
        given = self.candidates, self.asked, self.boxings
        kind = RecomputingModel if self.recomputes else RoomModel
        return kind(*given, self.limit_bytes, self.donated, HOLES)

    def fit(self, fastest: ChosenSignatures) -> FittedSignatures:
        """The cheapest assignment found whose plan keeps the limit; what it costs is proven against the bound
        of all that fit, and of all there are."""
        model = self.model()
        network = model.build()
        seconds = math.inf if self.time_limit_seconds is None else self.time_limit_seconds
        until = time.monotonic() + seconds
        budget = Budget(tuple(model.loads), self.limit_bytes)
        unfit = UNFIT_SECONDS if self.time_limit_seconds is None else math.inf
        starts = priced_starts(model, network, budget, fastest, STARTS_SHARE * seconds)
        search = LimitedSearch(network, budget, SEARCH_SHARE * seconds, self.progress, GOOD_GAP, unfit)
        for states in starts.states:
            search.start_from(states)
        if starts.price:
            search.charge(starts.free, starts.price)
        tries = LimitedTries(model, network, search, tuple(dict.fromkeys(starts.states)), until)
        found, bound, power = search.run(), fastest.bound, 1
        low, high = 0.0, math.inf  # what is counted of plans: none was found with this, one with that
        smallest: SmallestPeak | None = None
        for k in range(TRIES):
            assignment = _chosen(model, found, found.bound, fastest)
            tried = self.looked_at(assignment)
            if k == 0 and math.isfinite(found.bound):
                bound = max(bound, assignment.bound)
            if tried.bytes <= self.limit_bytes:
                return self.with_room_left(tries, replace(assignment, bound=bound), tried.bytes)
            last = smallest
            smallest = tried if smallest is None or tried.bytes < smallest.bytes else smallest
            seconds_left = max((until - time.monotonic()) / 2, LAST_SHARE * seconds)
            missed = self.missed(model, search.budget, found, tried) if k < CORRECTED_TRIES else ()
            if missed and (k < LEAST_TRIES or time.monotonic() < until):
                found = search.go_on(search.budget.limit, seconds_left, missed)
                continue
            if last is not None and tried.bytes > HELPED * last.bytes:
                power *= 2  # less of what is counted was not less of what is needed
            if found.fits:
                high = min(found.peak_bytes, search.budget.limit)
            else:
                low = search.budget.limit
            if high < NEAR * low or math.isinf(high) or (k >= LEAST_TRIES and time.monotonic() > until):
                break
            part = max((MARGIN * self.limit_bytes / tried.bytes) ** power, MOST_STEP if power > 1 else 0.0)
            target = max(high * min(part, MARGIN), math.sqrt(low * high))
            found = search.go_on(target, seconds_left)
        assert smallest is not None
        left = max((until - time.monotonic()) / 2, LAST_SHARE * seconds)
        return self.smallest_of(tries, fastest, smallest, min(left, SMALLEST_SECONDS))

    def missed(
        self, model: RoomModel, budget: Budget, found: Fitted, tried: SmallestPeak
    ) -> tuple[Load, ...]:
        """What is not counted of a plan that keeps the limit by the count."""
        if not found.fits:
            return ()
        evaluator = Evaluator(tried.physical, self.boxings.network, self.donated)
        return missed_loads(evaluator, model, budget, found.states)

    def with_room_left(
        self, tries: LimitedTries, assignment: ChosenSignatures, bytes: float
    ) -> FittedSignatures:
        """An assignment that fits, or a cheaper one where the search counts more than the evaluator.

        Arguments:
          bytes: what its plan needs.
        """
        search = tries.search
        counted, left = search.budget.limit, tries.until - time.monotonic()
        if bytes < ROOM_LEFT * self.limit_bytes and left > 0.0:
            found = search.go_on(counted * MARGIN * self.limit_bytes / bytes, ROOM_SHARE * left)
            more = tries.model.chosen(found.states, found.cost, assignment.bound)
            if found.fits and more.seconds < assignment.seconds and self.fits(more):
                counted, assignment = search.budget.limit, replace(more, bound=assignment.bound)
        loads = search.budget.loads
        start = LimitedStart(tries.model, tries.network, loads, counted, search.prices.found())
        assignment = replace(assignment, bound=min(assignment.bound, assignment.seconds))
        return FittedSignatures(assignment, start=start)

    def start(self) -> LimitedStart:
        """Where a search under the limit begins if the cheapest plan of all keeps it: bytes cost nothing."""
        model = self.model()
        network = model.build()
        return LimitedStart(model, network, tuple(model.loads), self.limit_bytes, NO_PRICES)

    def smallest_of(
        self, tries: LimitedTries, fastest: ChosenSignatures, smallest: SmallestPeak, seconds: float
    ) -> FittedSignatures:
        """The smallest peak, where nothing was found that fits; it may fit after all.

        Arguments:
          seconds: for each of two looks.
        """
        least = tries.search.smallest(seconds)
        # Of all that have about this peak a cheap one: nothing in it is larger than it must be.
        near = tries.search.go_on(NEAR * least.peak_bytes, seconds)
        for states in (least.states, near.states, *tries.starts):
            cost = tries.network.cost(states)
            if not math.isfinite(cost):  # the time was over before there was a plan
                continue
            assignment = tries.model.chosen(states, cost, fastest.bound)
            tried = self.looked_at(assignment)
            if tried.bytes <= self.limit_bytes:
                return self.with_room_left(tries, replace(assignment, bound=fastest.bound), tried.bytes)
            smallest = min(smallest, tried, key=lambda x: x.bytes)
        known = min(least.least_peak_bytes, smallest.bytes)
        return FittedSignatures(fastest, smallest=replace(smallest, bound_bytes=known))


def _chosen(model: RoomModel, found: Fitted, bound: float, fastest: ChosenSignatures) -> ChosenSignatures:
    """What a search has found; where its time was over before it had a plan at all, the fastest one."""
    return model.chosen(found.states, found.cost, bound) if math.isfinite(found.cost) else fastest


def seconds_of_fastest(graph: Graph, limit_bytes: float, left: float | None) -> float | None:
    """What of the time the search without a limit on memory may take: all, if every plan keeps the limit.

    Arguments:
      limit_bytes: per device.
      left: seconds until planning is to end; None for no limit on time.
    """
    # No plan needs more than all values whole, all at once.
    most = sum(local_bytes(v.shape, v.dtype, (), ()) for v in graph.values)
    return left if left is None or most <= limit_bytes else left * FASTEST_SHARE
