"""Exploring a space: parallelisms by name, and from each plan the problem told what is exposed.

The cheapest plan one thing after the other may wait for collectives that a dearer one hides. So from each
plan that is worth it the problem is solved again with every move counting as far as it was exposed there
(exposure.py). Plans that come from one another are a chain; it begins at the cheapest plan, or at that of a
parallelism (plan/seeds.py). Turn by turn one plan more is looked at: of a new chain, or of the chain that
promises most. What comes in a turn depends on those before it alone, so that with more effort the same plans
are looked at, and then more.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from sbp.passes.physical.exposure import Shares
from sbp.passes.plan import constants
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.network import Table
from sbp.passes.plan.seeds import SeedUse, seed_name
from sbp.passes.search.pool import PlanCandidate, Pool
from sbp.passes.search.space import Space


@dataclass
class PlanChain:
    """Plans that come from one another.

    Arguments:
      name: of the parallelism that it began with.
      unary: the costs of the states that this allows.
      at: its last plan.
      best: that with the shortest step.
      by_phase: whether it goes on with what is exposed of each phase of the step, not of each move.
      looks: how many plans were looked at from it.
      returns: how often nothing new came of it since it began, or went on without its parallelism.
      is_over: whether nothing new comes of it.
    """

    name: str
    unary: tuple[Table, ...]
    at: PlanCandidate
    best: PlanCandidate
    by_phase: bool = False
    looks: int = 0
    returns: int = 0
    is_over: bool = False

    def turn_back(self, free: tuple[Table, ...]) -> None:
        """Goes on from its best plan with another damping, after the last one without its parallelism."""
        self.returns, self.at = self.returns + 1, self.best
        if self.returns == len(constants.DAMPINGS):
            self.is_over, self.unary, self.returns = self.unary is free, free, 0


def _promise(chain: PlanChain) -> float:
    """The lower, the sooner a chain is gone on with."""
    return chain.best.priced_seconds * (1.0 + constants.PATIENCE) ** chain.looks


class Explorer:
    """A space that is explored, turn by turn.

    Arguments:
      space: the problem.
      pool: where candidates go.
      base: the plan to begin at.
      seeds: parallelisms to look at; they are taken out as they are.
      effort: for all turns together.
    """

    def __init__(
        self,
        space: Space,
        pool: Pool,
        base: PlanCandidate,
        seeds: Sequence[tuple[SeedUse, ...]],
        effort: Effort,
    ) -> None:
        self.space, self.pool, self.base, self.effort = space, pool, base, effort
        self.seeds, self.turns = list(seeds), 0
        self.began, self.solved_seconds = effort.count.seconds, 0.0
        # A whole solution takes about as long as the first did.
        self.leaps = space.leaps and self.began <= constants.EXPLORE_SECONDS
        given = "the cheapest plan", space.network.unary, base, base
        self.chains = [PlanChain(*given), PlanChain(*given, by_phase=True)]
        self.near: PlanCandidate | None = None
        self.waits: list[Hashable] = []
        self.looks_near = 0
        self.random = np.random.default_rng(0)

    def run(self, fewest: int, most: float) -> None:
        """Takes turns until the effort is spent, so many at the least and at the most, or nothing is left."""
        while self.turns < fewest or (self.turns < most and not self.effort.is_spent):
            if self.effort.count.is_over() or not self.turn():
                return

    def turn(self) -> bool:
        """Looks at one plan more; whether there was any.

        The chain that promises most, a parallelism, what that leads to when it is told what is exposed, and
        what is near the best plan take turns (`PERIOD`). A parallelism that is longer than the plan that all
        begins at waits until its chain promises most.
        """
        self.turns += 1
        turn, last = self.turns % constants.PERIOD, self.chains[-1]
        chain = min((c for c in self.chains if not c.is_over), key=_promise, default=None)
        if turn == 0:
            self.look_near()
        elif (chain is None or (turn == 2 and self.may_solve)) and (seed := self.next_seed()):
            self.begin(*seed)
        elif turn == 3 and not last.looks and last.at.priced_seconds <= self.base.priced_seconds:
            self.go_on(last)
        elif chain is not None:
            self.go_on(chain)
        else:
            return False
        return True

    def next_seed(self) -> tuple[str, tuple[Table, ...]] | None:
        """A parallelism that leads elsewhere, and the costs of the states that it allows: where it allows the
        cheapest plan of all, that is its cheapest too."""
        while self.seeds:
            seed = self.seeds.pop(0)
            unary = self.space.restricted(seed)
            if not self.space.allows_cheapest(unary):
                return seed_name(seed), unary
        return None

    def begin(self, name: str, unary: tuple[Table, ...]) -> None:
        """A chain that begins with a parallelism."""
        found = self.solved(unary, name)
        if found is not None:
            self.pool.add(found)
            self.chains.append(PlanChain(name, unary, found, found))

    def go_on(self, chain: PlanChain) -> None:
        """One plan more of a chain. Where its parallelism has no other, it goes on without."""
        at, damping = chain.at, constants.DAMPINGS[chain.returns]
        shares = self.space.exposure.shares(at.times, at.shares, damping, by_phase=chain.by_phase)
        found = self.found(chain, shares)
        chain.looks += 1
        if found is None:
            chain.turn_back(self.space.network.unary)
            return
        self.pool.add(found)
        chain.at = found
        if found.priced_seconds < chain.best.priced_seconds:
            chain.best = found

    def found(self, chain: PlanChain, shares: Shares) -> PlanCandidate | None:
        """The plan that a chain leads to: one near its last, or the cheapest of all.

        A chain that goes move by move begins with the latter.
        """
        s, found = self.space, None
        leaps = self.leaps and not chain.by_phase and not chain.looks and self.may_solve
        if leaps:
            found = self.solved(chain.unary, chain.name, shares)
        if found is None:
            found = s.near(chain.unary, shares, chain.at, chain.name, self.effort)
        if found is None and self.may_solve and not leaps:
            found = self.solved(chain.unary, chain.name, shares)
        return found

    @property
    def may_solve(self) -> bool:
        """Whether whole problems have not taken more than their part of the work yet, nor would one."""
        return self.space.solves and self.solved_seconds <= constants.SOLVED_PART * (
            self.effort.count.seconds - self.began
        )

    def solved(
        self, unary: tuple[Table, ...], source: str, shares: Shares | None = None
    ) -> PlanCandidate | None:
        """The cheapest plan of all, and what it took."""
        before = self.effort.count.seconds
        found = self.space.solved(unary, source, Effort(self.effort.count), shares)
        self.solved_seconds += self.effort.count.seconds - before
        return found

    def look_near(self) -> None:
        """A plan near the best one: one that costs the same, or, with what kernels wait for in it, one whose
        moves are dearer that they wait for, or with shares that are shaken."""
        best, s = self.pool.best or self.chains[0].at, self.space
        usual = s.exposure.shares(best.times)
        if best is not self.near:
            self.near, least = best, constants.EXPOSED * best.times.step_seconds
            waits = s.exposure.waits(best.times).items()
            self.waits = [g for g, x in waits if x > least][: constants.MOST_MOVES]
        self.looks_near += 1
        if self.looks_near % 2 == 0:
            shares = self.shaken({g: (best.shares or {}).get(g, 1.0) for g in usual}, constants.TIE)
        elif self.waits:
            group = self.waits.pop(0)
            shares = {**usual, group: constants.DEARER * usual[group]}
        else:
            shares = self.shaken(usual, constants.SHAKEN)
        found = s.near(s.network.unary, shares, best, "near the best", self.effort)
        if found is not None:
            self.pool.add(found)

    def shaken(self, shares: Shares, deviation: float) -> Shares:
        """Shares that differ a little."""
        noise = np.exp(deviation * self.random.standard_normal(len(shares)))
        return {g: x * float(y) for (g, x), y in zip(shares.items(), noise, strict=True)}


def shortest(space: Space, pool: Pool, base: PlanCandidate, effort: Effort) -> PlanCandidate:
    """The plan of a space with the shortest step that is found near one.

    Arguments:
      effort: for all that is looked at.
    """
    if base.times.sent or base.times.talked:
        Explorer(space, pool, base, (), effort.at_most(constants.NEAR_SECONDS)).run(0, constants.NEAR_TURNS)
    return pool.best or base
