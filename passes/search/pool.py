"""A planning problem as the search explores it (`Space`), and the pool: every plan that a search has looked
at. The answer is its best, and nothing leaves it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.exposure import Clock, Exposure, Shares, StepTimes
from sbp.passes.plan import constants
from sbp.passes.plan.descent import Descent
from sbp.passes.plan.effort import Effort, WorkCount
from sbp.passes.plan.folding import fold_if_alike
from sbp.passes.plan.model import ChosenSignatures, Model
from sbp.passes.plan.network import CostNetwork, Infeasible, Table
from sbp.passes.plan.seeds import SeedTensors, SeedUse, restriction, tensors_of
from sbp.passes.plan.solve import solve


@dataclass(frozen=True)
class PlanCandidate:
    """A plan that was looked at.

    Arguments:
      assignment: its signatures.
      takes: the figures of its program.
      clock: that the program was made with.
      source: what it was found from.
      states: of the problem that it solves.
      shares: what part of moves counted there; None for all of them.
      is_over: whether it is known to need far too much, which takes long to be evaluated.
    """

    assignment: ChosenSignatures
    takes: Evaluator
    clock: Clock
    source: str = ""
    states: tuple[int, ...] = ()
    shares: Shares | None = None
    is_over: bool = False

    @cached_property
    def times(self) -> StepTimes:
        """What it takes, and what kernels wait for."""
        return self.clock.times_of(self.takes, self.assignment.beyond_seconds)

    @property
    def memory_bytes(self) -> float:
        """What a device needs."""
        return self.takes.peak_bytes()


class Pool:
    """The candidates of a search.

    Arguments:
      limit_bytes: what a plan may need.
      count: of the search's work.
    """

    def __init__(self, limit_bytes: float, count: WorkCount) -> None:
        self.limit_bytes, self.count = limit_bytes, count
        self.candidates: list[PlanCandidate] = []
        self.counted: list[PlanCandidate] = []
        """Those of which the best is the answer."""
        self.binds = False

    @property
    def best(self) -> PlanCandidate | None:
        """The one with the shortest step; of steps that are about the same, that with the least work."""
        least = min((x.times.step_seconds for x in self.counted), default=math.inf)
        same = [x for x in self.counted if x.times.step_seconds <= least * (1.0 + constants.SAME_STEP)]
        return min(same, key=lambda x: (x.times.seconds, x.times.step_seconds), default=None)

    def add(self, candidate: PlanCandidate) -> PlanCandidate:
        """Takes a candidate up."""
        self.count.add(constants.LOOKED_STEP_SECONDS * len(candidate.takes.physical.steps))
        self.candidates.append(candidate)
        if self.may_win(candidate):
            self.counted.append(candidate)
        return candidate

    def may_win(self, candidate: PlanCandidate) -> bool:
        """Whether a candidate may be the answer."""
        return not self.binds or self.fits(candidate)

    def rank(self, candidate: PlanCandidate) -> tuple[bool, float]:
        """The less, the better: by the step, and last what cannot be the answer, by its work alone: a step
        takes long to find."""
        wins = self.may_win(candidate)
        return not wins, candidate.times.step_seconds if wins else candidate.assignment.seconds

    def bind(self) -> None:
        """From now on only what keeps the limit on memory counts."""
        self.binds, self.counted = True, [x for x in self.candidates if self.fits(x)]

    def fits(self, candidate: PlanCandidate) -> bool:
        """Whether a candidate keeps the limit on memory."""
        return math.isinf(self.limit_bytes) or not (
            candidate.is_over or candidate.memory_bytes > self.limit_bytes
        )


class Space:
    """A planning problem without a limit on memory.

    Arguments:
      model, network: of the problem.
      clock: makes the programs of its plans.
      donated: positions of the inputs whose memory the results may take.
      bound: what no plan of it can be cheaper than.
    """

    solves = True
    """Whether the cheapest plan, told what is exposed, may be worth more than one near the last."""

    def __init__(
        self,
        model: Model,
        network: CostNetwork,
        clock: Clock,
        donated: Sequence[int] = (),
        bound: float = 0.0,
    ) -> None:
        self.model, self.network, self.clock, self.donated = model, network, clock, donated
        self.bound = bound
        self.seen: set[tuple[int, ...]] = set()

    @cached_property
    def exposure(self) -> Exposure:
        """Problems in which collectives count as far as they are exposed."""
        return Exposure(self.model, self.network)

    @cached_property
    def tensors(self) -> SeedTensors:
        """What the tensors of the program are."""
        return tensors_of(self.model.graph, self.model.boundary.ties)

    def restriction(self, seed: Sequence[SeedUse]) -> tuple[Table, ...]:
        """The costs of states, infinite where a parallelism does not allow them."""
        return restriction(self.model, seed, self.tensors)

    def solve(
        self,
        unary: tuple[Table, ...],
        source: str,
        effort: Effort,
        shares: Shares | None = None,
    ) -> PlanCandidate | None:
        """The cheapest plan; None if there is none, or it was looked at before.

        Arguments:
          unary: what states cost, infinite where they are not wanted.
          shares: what part of moves counts; None for all of them.
        """
        network = CostNetwork(unary, self.network.edges)
        folded = fold_if_alike(network if shares is None else self.exposure.weighted_network(shares, unary))
        try:
            found = solve(folded.network, effort=effort)
        except Infeasible:
            return None
        return self.look_once(folded.expand(found.states), source, shares)

    @cached_property
    def descent(self) -> Descent:
        """Looks for plans near known ones."""
        return Descent(self.network, self.exposure.kinds)

    def solve_near(
        self, unary: tuple[Table, ...], shares: Shares, at: PlanCandidate, source: str, effort: Effort
    ) -> PlanCandidate | None:
        """A cheap plan near another one; None if it was looked at before.

        Arguments:
          unary: what states cost, infinite where they are not wanted.
          shares: what part of moves counts.
        """
        costs, parts = self.exposure.weighted_unary(shares, unary), self.exposure.parts(shares)
        limit = self.counted_limit(at)
        states = self.descent.run(costs, parts, at.states, at.times.seconds, effort, limit)
        return self.look_once(states, source, shares)

    def counted_limit(self, at: PlanCandidate) -> float | None:
        """What may be counted near a plan; None for no limit of its own."""
        return None

    def keeps_limit(self, states: Sequence[int], at: PlanCandidate) -> bool:
        """Whether states near a plan seem to keep what limit there is."""
        return True

    def look_once(
        self, states: tuple[int, ...], source: str, shares: Shares | None = None
    ) -> PlanCandidate | None:
        """The plan of some states; None if there is none, or it was looked at before."""
        if states in self.seen or not math.isfinite(self.network.cost(states)):
            return None
        return self.look(states, source, shares)

    def look(self, states: tuple[int, ...], source: str, shares: Shares | None = None) -> PlanCandidate:
        """The plan of some states."""
        self.seen.add(states)
        assignment = self.model.chosen_signatures(states, self.network.cost(states), self.bound)
        takes = self.clock.program(assignment, self.donated)
        return PlanCandidate(assignment, takes, self.clock, source, states, shares)
