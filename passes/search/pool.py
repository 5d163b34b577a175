"""The pool: every plan that a search has looked at. The answer is its best, and nothing leaves it."""

import math
from dataclasses import dataclass
from functools import cached_property

from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.exposure import Clock, Shares, StepTimes
from sbp.passes.plan import constants
from sbp.passes.plan.effort import WorkCount
from sbp.passes.plan.model import ChosenSignatures


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
