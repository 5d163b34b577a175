"""A planning problem under a limit on memory: its plans keep the limit, as the evaluator says.

Collectives count as far as they are exposed in the shortest of the plans that it starts from. What the search
counts (plan/memory_problem.py) is not what the evaluator finds. So the search is told what a solution needs
beyond its count, and goes on, until the evaluator agrees. It counts values, the evaluator what XLA's kernels
leave, in XLA's order: less room at the time of a plan's peak is all that is wrong then, and at other times
nothing changes.
"""

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sbp.passes.boxing.paths import Boxings
from sbp.passes.physical.evaluate import HOLES, Evaluator
from sbp.passes.physical.exposure import Clock
from sbp.passes.physical.memory import SmallestPeak
from sbp.passes.physical.program import Compute, Version
from sbp.passes.plan import constants
from sbp.passes.plan.budget import Budget, BudgetSolution, Load
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.descent import Descent
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.memory_problem import RoomModel
from sbp.passes.plan.model import Boundary
from sbp.passes.plan.network import CostNetwork
from sbp.passes.plan.prices import NO_PRICES
from sbp.passes.plan.recompute import RecomputingModel
from sbp.passes.plan.seeds import SEQUENCE_3, TENSOR, ZERO_3, ZERO_3_ANY, SeedUse, seed_name
from sbp.passes.plan.solve import Progress, Solver
from sbp.passes.plan.start_points import priced_starts
from sbp.passes.program.graph import Const
from sbp.passes.search.pool import PlanCandidate, Pool, Space
from sbp.signature import NdSbp

FITTING = (ZERO_3, ZERO_3_ANY, SEQUENCE_3, TENSOR)
"""Parallelisms that keep parts of what others keep whole, for all axes alike."""


@dataclass(frozen=True)
class LimitedProblem:
    """A program that is planned under a limit.

    Arguments:
      donated: positions of the inputs whose memory the results may take.
      limit_bytes: per device.
      progress: is told of the search.
      recomputes, by_chain: whether ops may run again, and how that is counted (`RecomputingModel`).
      proves: whether these are all plans, so that what no plan of these does is proven.
    """

    candidates: Candidates
    boundary: Boundary
    boxings: Boxings
    donated: Sequence[int]
    limit_bytes: float
    progress: Progress | None = None
    recomputes: bool = True
    by_chain: bool = False
    proves: bool = True

    def model(self) -> RoomModel:
        """The model of the program with its loads, not built."""
        given = self.candidates, self.boundary, self.boxings, self.limit_bytes, self.donated, HOLES
        return RecomputingModel(*given, self.by_chain) if self.recomputes else RoomModel(*given)


class LimitedSpace(Space):
    """The plans of a program that keep a limit.

    Arguments:
      problem: what is planned.
      pool: says what fits, and takes what is tried.
      clock: makes the programs of its plans.
      bound: what no plan can be cheaper than.
    """

    solves = False

    def __init__(self, problem: LimitedProblem, pool: Pool, clock: Clock, bound: float) -> None:
        model = problem.model()
        super().__init__(model, model.build(), clock, problem.donated, bound)
        self.problem, self.pool = problem, pool
        self.budget, self.prices = Budget(tuple(model.loads), problem.limit_bytes), NO_PRICES
        self.room_model: RoomModel = model

    # The cheapest that fits.

    def fit(self, base: PlanCandidate, effort: Effort) -> PlanCandidate | SmallestPeak:
        """The cheapest plan found that keeps the limit, proven against the bound of all that do; or what is
        nearest to it."""
        limit, own = self.problem.limit_bytes, self.effort_part(effort, constants.STARTS_SECONDS)
        starts = priced_starts(self.room_model, self.network, self.budget, base.assignment, own)
        for states in starts:
            counted, most = self.budget.peak_bytes(states), (1.0 + constants.MOST_STEP) * limit
            self.pool.add(replace(self.look(states, "at prices"), is_over=counted > most))
        search = self.solver_from(base, starts, effort)
        found = search.run()
        if self.problem.proves and math.isfinite(found.bound):
            self.bound = max(self.bound, found.bound)
        tried = self.plan_of(found)
        for _ in range(constants.CORRECTED_TRIES):
            if tried is None or self.pool.fits(tried) or not found.fits:
                break
            taken = missed_loads(tried.takes, self.room_model, search.budget, found.states)
            if not taken:
                break
            found = search.go_on(limit, self.effort_part(effort, constants.TRY_SECONDS), taken)
            tried = self.plan_of(found)
        if tried is None or not self.pool.fits(tried):
            return self.smallest(search, effort)
        return self.with_more(search, tried, effort)

    def solver_from(self, base: PlanCandidate, starts: Sequence[tuple[int, ...]], effort: Effort) -> Solver:
        """A search with what it begins at."""
        network, seconds = self.exposed_network(self.best(base)), constants.SEARCH_SECONDS
        given = network, self.budget, self.effort_part(effort, seconds), self.problem.progress
        search = Solver(*given, constants.CLOSE)
        # What has no price is nearest to the plan: first, and once more in its turn, as moves are random.
        for states in (*sorted(starts, key=self.network.cost)[:1], *starts):
            search.start_from(states)
        return search

    def exposed_network(self, at: PlanCandidate) -> CostNetwork:
        """The network in which moves count as far as kernels wait for them in a plan: what hides them costs
        little. No assignment costs more in it, so that what bounds it bounds all."""
        if not at.takes.hides:
            return self.network
        return self.exposure.weighted_network(self.exposure.shares(at.times), self.network.unary)

    @cached_property
    def size(self) -> float:
        """How many times as much work the network takes as a small one."""
        return 1.0 + sum(t.size for _, _, t in self.network.edges) / constants.WRITTEN_CELLS

    def effort_part(self, effort: Effort, seconds: float) -> Effort:
        """A part of the effort: so many seconds, times the size."""
        return effort.at_most(seconds * self.size)

    def plan_of(self, found: BudgetSolution) -> PlanCandidate | None:
        """The plan that a search has found; None if it has found none at all."""
        if not math.isfinite(found.cost):
            return None
        return self.pool.add(self.look(found.states, "the cheapest that fits"))

    def with_more(self, search: Solver, fitted: PlanCandidate, effort: Effort) -> PlanCandidate:
        """A plan that fits, or a cheaper one where the search counts more than the evaluator.

        What is explored begins where the search has ended.
        """
        budget, limit = search.budget, self.problem.limit_bytes
        if fitted.memory_bytes < (1.0 - constants.FREE_PART) * limit and not effort.is_spent:
            target = budget.limit * (1.0 - constants.MARGIN) * limit / fitted.memory_bytes
            found = search.go_on(target, self.effort_part(effort, constants.TRY_SECONDS))
            more = (self.plan_of(found) if found.fits else None) or fitted
            if self.pool.fits(more) and more.times.step_seconds < fitted.times.step_seconds:
                budget, fitted = search.budget, more
        self.budget, self.prices = budget, search.prices.best_prices()
        return fitted

    def smallest(self, search: Solver, effort: Effort) -> PlanCandidate | SmallestPeak:
        """The smallest peak, where nothing was found that fits; it may fit after all."""
        effort = Effort(effort.count)  # a refusal has to be sure
        least = search.smallest(effort, constants.TRY_SECONDS)
        # Of all that have about this peak a cheap one: nothing in it is larger than it must be.
        near = search.go_on((1.0 + constants.CLOSE) * least.peak_bytes, effort.at_most(constants.TRY_SECONDS))
        self.budget, self.prices = (
            replace(search.budget, limit=self.problem.limit_bytes),
            search.prices.best_prices(),
        )
        tried = [self.look_once(x, "the smallest peak") for x in (least.states, near.states)]
        rounds = zip(*(self.with_less(use, effort) for use in FITTING), strict=True)
        for found in itertools.chain([tried], rounds):
            for x in filter(None, found):
                self.pool.add(x)
            fitting = [x for x in self.pool.counted if x.states in self.seen]
            if fitting and found is not tried:
                return min(fitting, key=lambda x: x.assignment.seconds)
        smallest = min(self.pool.candidates, key=lambda x: x.memory_bytes)
        bound = least.least_peak_bytes if self.problem.proves else math.inf
        return SmallestPeak(smallest.takes.physical, smallest.memory_bytes, min(bound, smallest.memory_bytes))

    def with_less(self, use: SeedUse, effort: Effort) -> Iterator[PlanCandidate | None]:
        """Plans of a parallelism along all axes, one after the other; None for none. At the time of the peak
        of the last, as the evaluator finds it, bytes cost more from then on."""
        seed, prices, at = (use,) * self.model.c.placement.ndim, self.prices, None
        unary, dear = self.restriction(seed), constants.LESS_PRICE / self.problem.limit_bytes
        for _ in range(max(1, round(constants.LESS_ROUNDS / self.size))):
            found = self.solve(
                prices.priced_unary(unary, self.budget.loads),
                seed_name(seed),
                self.effort_part(effort, constants.TRY_SECONDS),
            )
            yield found
            at = found or at
            if at is not None and (time := time_of_peak(at.takes, self.room_model)) is not None:
                prices = prices.with_time(time, dear * at.assignment.seconds)

    # What is explored.

    @cached_property
    def descent(self) -> Descent:
        """Looks for plans near known ones that keep the limit, as it is counted."""
        charged = self.prices.priced_unary(self.network.unary, self.budget.loads)
        return Descent(self.network, self.exposure.kinds, self.budget, charged)

    def counted_limit(self, at: PlanCandidate) -> float:
        """As much as keeps the limit there by the evaluator, which counts otherwise."""
        counted = self.budget.peak_bytes(at.states)
        return (1.0 - constants.MARGIN) * counted * self.problem.limit_bytes / at.memory_bytes

    def keeps_limit(self, states: Sequence[int], at: PlanCandidate) -> bool:
        """Whether states near a plan seem to keep the limit."""
        return self.budget.peak_bytes(states) <= self.counted_limit(at)

    def best(self, other: PlanCandidate) -> PlanCandidate:
        """The plan of this space with the shortest step; another one where there is none."""
        own = [x for x in self.pool.counted if x.states in self.seen]
        return min(own, key=lambda x: x.times.step_seconds, default=other)


def missed_loads(
    evaluator: Evaluator, model: RoomModel, budget: Budget, states: Sequence[int]
) -> tuple[Load, ...]:
    """What is not counted around the time of a plan's peak; nothing where more is counted there, or nothing
    says when it is.

    Arguments:
      evaluator: of the plan's program.
      states: of the model, what was chosen.
    """
    at = time_of_peak(evaluator, model)
    if at is None:
        return ()
    around = max(1, round(constants.NEAR_PART * model.end))
    start, end = at - around, at + around + 1
    waiting = tuple(unsent_loads(evaluator, model, budget, states, end))
    counted = Budget((*budget.loads, *waiting), budget.limit).peak_bytes(states, start, end)
    more = evaluator.peak_bytes() - counted
    return (*waiting, Load(-1, start, end, np.array([more]))) if more > 0.0 else waiting


def unsent_loads(
    evaluator: Evaluator, model: RoomModel, budget: Budget, states: Sequence[int], end: int
) -> Iterator[Load]:
    """What waits until it is sent with others, such as gradients of several layers: choosing to send it
    frees nothing before.

    Arguments:
      end: of the time until which it was seen to wait.
    """
    own = set(map(id, model.loads))
    counted = {x.node: x.end for x in budget.loads if id(x) not in own}
    there, waits = {x.version for x in evaluator.at_peak}, set[Hashable]()
    sent = dict[int, tuple[Hashable, NdSbp]]()
    for v, once in model.boxed_once.items():
        lies, made = model.states[once.copy], once.supply.needs[states[once.supply.variable]]
        value = model.graph.values[v]
        sent[v] = (value.shape, str(value.dtype), made), made
        if states[once.copy] < len(lies) // 2 and (v, made) in there:
            waits.add(sent[v][0])
    for v, (kind, made) in sent.items():
        # Another one that would be sent waits too, as those of other layers do.
        once = model.boxed_once[v]
        half = len(model.states[once.copy]) // 2
        start = max(once.at + 1, counted.get(once.copy, 0))
        is_gone = states[once.copy] < half and (v, made) not in there
        if kind in waits and not is_gone and start < end:
            sizes = np.zeros(2 * half)
            sizes[:half] = model.held_bytes(v, (made,))[0]
            yield Load(once.copy, start, end, sizes)


def time_of_peak(evaluator: Evaluator, model: RoomModel) -> int | None:
    """When a plan has its peak, by the times of the model: when the last is made of what is there."""
    p = evaluator.physical
    makers = {v: s.node.id for s, _ in p.walk() if isinstance(s, Compute) for v in s.node.outputs}
    ends: set[Version] = {*zip(p.graph.inputs, p.inputs, strict=True)}
    ends |= {(x, nd) for x, nd in zip(p.graph.outputs, p.outputs, strict=True) if not isinstance(x, Const)}
    made = (makers.get(x.version[0], -1) for x in evaluator.at_peak if x.version not in ends)
    times = model.times
    return max((times[i][0] for i in made if i in times), default=None)
