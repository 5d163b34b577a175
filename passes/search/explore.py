"""Exploring a space: parallelisms by name, and from each plan the problem told what is exposed.

The cheapest plan one thing after the other may wait for collectives that a dearer one hides. So from each
plan that is worth it the problem is solved again with every move counting as far as it was exposed there
(exposure.py). Plans that come from one another are a chain; it begins at the best plan of each source so far,
or at that of a parallelism (plan/seeds.py). Turn by turn one plan more is looked at: of a new chain, or of
the chain that promises most. What comes in a turn depends on those before it alone, so that with more effort
the same plans are looked at, and then more.

Where two plans differ they mostly differ in several places that have nothing to do with each other: a layer
here, the optimizer of a weight there. Each of these places by itself may make the better plan better still,
which only the clock can say: what is cheap one thing after the other may be waited for. So the places are
tried one by one, those first that cost least by what is exposed in the best plan (path relinking: Glover,
1996).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from sbp.passes.physical.exposure import Shares
from sbp.passes.plan import constants
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.network import CostNetwork, Table, labels_of
from sbp.passes.plan.seeds import SeedUse, seed_name
from sbp.passes.search.pool import PlanCandidate, Pool, Space


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
      is_over: whether nothing new comes of it.
    """

    name: str
    unary: tuple[Table, ...]
    at: PlanCandidate
    best: PlanCandidate
    by_phase: bool = False
    looks: int = 0
    is_over: bool = False

    @property
    def promise(self) -> float:
        """The lower, the sooner it is gone on with."""
        return self.best.times.step_seconds * (1.0 + constants.PATIENCE * self.looks)


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
        # What is begun is ended: else a turn would depend on how many follow.
        self.seeds, self.turns, self.no_end = list(seeds), 0, Effort(effort.count)
        self.began, self.solved_seconds = effort.count.seconds, 0.0
        free, known = space.network.unary, {x.source: x for x in reversed(self.own) if pool.fits(x)}
        self.chains = [PlanChain(base.source, free, base, base, by_phase=x) for x in (False, True)]
        self.chains += [PlanChain(name, free, x, x) for name, x in known.items() if x is not base]
        self.crossover, self.parts, self.tried = Crossover(space.network), list[Part](), set[Part]()
        self.near, self.known, self.looks_near, self.random = base, 0, 0, np.random.default_rng(0)
        self.first: PlanCandidate | None = None
        """The best plan of the first round, where others followed."""

    def run(self, most: int, times: float = 1.0) -> None:
        """Takes turns until the effort is spent, or nothing is left.

        Turns are in rounds, each as long as all before it: with more effort there are the same ones, and then
        more. The last of a round put parts of other plans into the best one.

        Arguments:
          most: turns, of an effort of 1.
          times: the effort.
        """
        count, begun, seconds = self.effort.count, self.effort.count.seconds, self.effort.seconds_left / times
        length, crosses = 1.0, True
        while not count.is_over():
            done = max((count.seconds - begun) / seconds if seconds else math.inf, self.turns / most)
            if done >= times:
                return
            if done >= length:
                self.first = self.first or self.pool.best
                length, crosses = 2.0 * length, True
            if crosses and done >= constants.TURNS_PART * length:
                crosses = self.cross(self.best)
                self.turns += crosses
            elif not (self.turn() or self.cross(self.best)):
                return

    def turn(self) -> bool:
        """Looks at one plan more; whether there was any.

        The chain that promises most, a parallelism, what that leads to when it is told what is exposed, and
        what is near the best plan take turns (`PERIOD`). The first parallelism comes at once; one that is
        longer than the plan that all begins at waits until its chain promises most.
        """
        self.turns += 1
        turn, last = self.turns % constants.PERIOD, self.chains[-1]
        chain = min((c for c in self.chains if not c.is_over), key=lambda c: c.promise, default=None)
        begins = turn == 2 and (self.may_solve or self.turns == 2)
        if turn == 0 and self.look_near():
            pass
        elif (chain is None or begins) and self.seeds:
            self.begin(self.seeds.pop(0))
        elif turn == 3 and not last.looks and last.at.times.step_seconds <= self.base.times.step_seconds:
            self.go_on(last)
        elif chain is not None:
            self.go_on(chain)
        else:
            return False
        return True

    def begin(self, seed: Sequence[SeedUse]) -> None:
        """A chain that begins with a parallelism."""
        name, unary = seed_name(seed), self.space.restriction(seed)
        found = self.solve_whole(unary, name)
        if found is not None:
            self.pool.add(found)
            self.chains.append(PlanChain(name, unary, found, found))

    def go_on(self, chain: PlanChain) -> None:
        """One plan more of a chain. Where its parallelism has no other, it goes on without."""
        at, free = chain.at, self.space.network.unary
        shares = self.space.exposure.shares(at.times, at.shares, by_phase=chain.by_phase)
        found = self.next_plan(chain, shares)
        chain.looks += 1
        if found is None:
            chain.is_over, chain.unary, chain.at = chain.unary is free, free, chain.best
            return
        self.pool.add(found)
        chain.at = found
        if found.times.step_seconds < chain.best.times.step_seconds:
            chain.best = found

    def next_plan(self, chain: PlanChain, shares: Shares) -> PlanCandidate | None:
        """The plan that a chain leads to: one near its last, or the cheapest of all.

        A chain that goes move by move begins with the latter.
        """
        near = partial(self.space.solve_near, chain.unary, shares, chain.at, chain.name, self.no_end)

        def whole() -> PlanCandidate | None:
            return self.solve_whole(chain.unary, chain.name, shares) if self.may_solve else None

        return near() or whole() if chain.by_phase or chain.looks else whole() or near()

    @property
    def may_solve(self) -> bool:
        """Whether whole problems have not taken more than their part of the work yet, nor would one."""
        return self.space.solves and self.solved_seconds <= constants.SOLVED_PART * (
            self.effort.count.seconds - self.began
        )

    def solve_whole(
        self, unary: tuple[Table, ...], source: str, shares: Shares | None = None
    ) -> PlanCandidate | None:
        """The cheapest plan of all, and what it took."""
        before = self.effort.count.seconds
        found = self.space.solve(unary, source, self.no_end.at_most(constants.TRY_SECONDS), shares)
        self.solved_seconds += self.effort.count.seconds - before
        return found

    @property
    def own(self) -> list[PlanCandidate]:
        """The plans of this space, the shortest first; last what cannot be the answer."""
        known = (x for x in self.pool.candidates if x.states in self.space.seen)
        return sorted((self.base, *known), key=self.pool.rank)

    @property
    def best(self) -> PlanCandidate:
        """The shortest of them that keeps the limit."""
        return next((x for x in self.own if self.pool.fits(x)), self.base)

    def took(self, found: PlanCandidate | None) -> bool:
        """Whether a plan was found, which is taken up."""
        return found is not None and self.pool.add(found) is found

    def look_near(self) -> bool:
        """A plan near the best one, if there is another: in turn one that costs about the same, and one with
        a part of another plan."""
        best, self.looks_near = self.best, self.looks_near + 1
        looks = (self.shake, self.cross) if self.looks_near % 2 else (self.cross, self.shake)
        return any(look(best) for look in looks)

    def shake(self, best: PlanCandidate) -> bool:
        """The best plan's own problem with shares that are shaken a little; whether it leads elsewhere."""
        s = self.space
        before = best.shares or dict.fromkeys(s.exposure.shares(best.times), 1.0)
        noise = self.random.uniform(1.0 - constants.TIE, 1.0 + constants.TIE, len(before))
        shares = {g: x * float(y) for (g, x), y in zip(before.items(), noise, strict=True)}
        return self.took(s.solve_near(s.network.unary, shares, best, "near the best", self.no_end))

    def cross(self, best: PlanCandidate) -> bool:
        """The best plan with a part of another one that was not tried, if there is one."""
        self.approach(best)
        found = None
        while self.parts and found is None:
            part = self.parts.pop(0)
            states = with_part(best.states, part)
            if part not in self.tried and self.space.keeps_limit(states, best):
                found = self.space.look_once(states, "parts of others")
            self.tried.add(part)
        return self.took(found)

    def approach(self, best: PlanCandidate) -> None:
        """Finds the parts of other plans to try: of a new best plan, and when all are tried and more plans
        are known."""
        if best is self.near and (self.parts or self.known == len(self.pool.candidates)):
            return
        self.near, self.known, s = best, len(self.pool.candidates), self.space
        shares, exposure = s.exposure.shares(best.times), s.exposure
        others = [x.states for x in self.own if x is not best][: constants.CROSSOVER_PLANS]
        costs = exposure.weighted_unary(shares, s.network.unary), exposure.parts(shares)[exposure.kinds]
        self.parts = self.crossover.cheaper(best.states, others, *costs)


def shortest(space: Space, pool: Pool, base: PlanCandidate, effort: Effort) -> PlanCandidate:
    """The plan of a space with the shortest step that is found near one.

    Arguments:
      effort: for all that is looked at.
    """
    if base.times.sent_seconds or base.times.body_sent_seconds:
        Explorer(space, pool, base, (), effort.at_most(constants.NEAR_SECONDS)).run(constants.NEAR_TURNS)
    return pool.best or base


Part = tuple[tuple[int, int], ...]
"""Nodes and their states."""


class Crossover:
    """Parts of assignments of a network, put into others."""

    def __init__(self, network: CostNetwork) -> None:
        self.network = network
        self.ends = np.array([(i, j) for i, j, _ in network.edges], np.int64).reshape(-1, 2)

    def gains(
        self,
        best: Sequence[int],
        other: Sequence[int],
        unary: Sequence[Table],
        shares: Table,
    ) -> dict[Part, float]:
        """The connected nodes in which another assignment differs, each with what it costs more there.

        Arguments:
          unary: what states cost.
          shares: what part of its table counts, per edge.

        >>> table = np.array([[0.0, 3.0], [3.0, 2.0]])
        >>> network = CostNetwork((np.zeros(2),) * 4, ((0, 1, table), (1, 2, table), (2, 3, table)))
        >>> Crossover(network).gains((0, 0, 0, 0), (1, 1, 0, 1), network.unary, np.array([1.0, 1.0, 0.5]))
        {((0, 1), (1, 1)): 5.0, ((3, 1),): 1.5}
        """
        differ = np.array(best) != np.array(other)
        at = differ[self.ends]
        labels = np.where(differ, labels_of(self.ends[at.all(axis=1)], differ.size), -1)
        nodes, gained = defaultdict[int, list[int]](list), defaultdict[int, float](float)
        for n in np.flatnonzero(differ).tolist():
            nodes[labels[n]].append(n)
            gained[labels[n]] += float(unary[n][other[n]] - unary[n][best[n]])
        for k in np.flatnonzero(at.any(axis=1)).tolist():
            i, j, table = self.network.edges[k]
            more = float(table[other[i], other[j]] - table[best[i], best[j]])
            gained[max(labels[i], labels[j])] += float(shares[k]) * more
        return {tuple((n, other[n]) for n in nodes[x]): gained[x] for x in nodes}

    def cheaper(
        self,
        best: Sequence[int],
        others: Iterable[Sequence[int]],
        unary: Sequence[Table],
        shares: Table,
    ) -> list[Part]:
        """The parts of others with which an assignment costs less, the cheapest first; arguments as of
        `gains`."""
        found = dict[Part, float]()
        for other in others:
            found |= self.gains(best, other, unary, shares)
        return sorted((part for part in found if found[part] < 0.0), key=lambda part: (found[part], part))


def with_part(states: Sequence[int], part: Part) -> tuple[int, ...]:
    """An assignment with another part."""
    return tuple((dict(enumerate(states)) | dict(part)).values())
