"""The plan with the shortest step, where collectives run beside kernels: the search, told what is exposed.

The cheapest plan one thing after the other may wait for collectives that a dearer one hides. From it, and from
parallelisms by name (plan/seeds.py), each a point to start at, the problem is solved again and again with every
move counting as far as it was exposed (exposure.py), and what is kept is the plan with the shortest step of all
that were looked at. How many that are depends on the size of the program alone, so that the same program has the
same plan however busy the machine is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sbp.passes.boxing.paths import Boxings
from sbp.passes.physical.evaluate import OVERLAPPING
from sbp.passes.physical.exposure import Clock, Exposure, Shares, StepTimes
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.model import ChosenSignatures, Model
from sbp.passes.plan.network import CostNetwork, Infeasible
from sbp.passes.plan.seeds import restricted, seed_name, seeds_for, tensors_of
from sbp.passes.plan.solve import solve

ROUNDS = 4
"""Solutions from one starting point; it ends before where a plan comes back."""
POINTS = 3
"""Seeds that are started at, of all that were looked at."""
LOOKS_EDGES = 40_000
"""Looks at a plan, times the edges of the network, that fit into half a second of CPU."""
FEWEST_LOOKS, MOST_LOOKS = 3, 32
SAME_STEP = 1e-6
"""Steps that differ by less, relatively, are the same; then the fewer seconds count."""


@dataclass(frozen=True)
class ShortestStep:
    """What was found.

    Arguments:
      assignment: with the shortest step of those that fit.
      step_seconds: of it.
      cheapest_seconds: what the plan takes that the search began with, one thing after the other.
      looked, left: names of the starting points that were looked at, and of those for which there was no time.
    """

    assignment: ChosenSignatures
    step_seconds: float
    cheapest_seconds: float
    looked: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Look:
    """A plan that was looked at."""

    assignment: ChosenSignatures
    times: StepTimes

    @property
    def rank(self) -> tuple[float, float]:
        step = self.times.step_seconds
        return float(f"{step:.6e}"), self.times.seconds


class _Search:
    """What was looked at so far, and how much may still be."""

    def __init__(
        self, model: Model, network: CostNetwork, cheapest: ChosenSignatures, seconds: float | None
    ) -> None:
        self.model, self.network, self.bound = model, network, cheapest.bound
        self.clock = Clock(model.c, model.boxings)
        self.deadline = None if seconds is None else time.monotonic() + seconds
        self.left = min(MOST_LOOKS, max(FEWEST_LOOKS, LOOKS_EDGES // max(1, len(network.edges))))
        self.seen: dict[tuple[int, ...], _Look] = {}
        self.cheapest = self.look(cheapest)

    @property
    def spent(self) -> bool:
        return self.left <= 0 or (self.deadline is not None and time.monotonic() >= self.deadline)

    def look(self, assignment: ChosenSignatures) -> _Look:
        return _Look(assignment, self.clock.times(assignment))

    def solved(self, network: CostNetwork) -> _Look | None:
        """The plan that solves a network; None if it has none, or was looked at already."""
        self.left -= 1
        remaining = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        try:
            states = solve(network, time_limit_seconds=remaining).states
        except Infeasible:
            return None
        if states in self.seen:
            return None
        assignment = self.model.chosen(states, self.network.cost(states), self.bound)
        self.seen[states] = self.look(replace(assignment, bound=self.bound))
        return self.seen[states]

    def descend(self, start: _Look, exposure: Exposure) -> None:
        """Solves anew with what is exposed, until a plan comes back."""
        at: _Look | None = start
        shares: Shares | None = None
        for _ in range(ROUNDS):
            if self.spent or at is None:
                break
            shares = exposure.shares(at.times, shares)
            at = self.solved(exposure.weighted(shares))


def shortest_step(
    model: Model,
    network: CostNetwork,
    cheapest: ChosenSignatures,
    fits: Callable[[ChosenSignatures], bool],
    time_limit_seconds: float | None = None,
) -> ShortestStep:
    """The plan with the shortest step that is found.

    Arguments:
      model, network: of the search, as `Model.build` has made them.
      cheapest: what the search has found.
      fits: whether a plan keeps the limit on memory; asked of the few that are better than `cheapest`.
      time_limit_seconds: after which no other plan is looked at.
    """
    search = _Search(model, network, cheapest, time_limit_seconds)
    base = search.cheapest
    if model.boxings.network.hardware.platform not in OVERLAPPING or not (base.times.sent or base.times.talked):
        return ShortestStep(cheapest, base.times.step_seconds, base.times.seconds)
    exposure = Exposure(model, network)
    search.descend(base, exposure)
    tensors = tensors_of(model.graph, model.boundary.ties)
    looked, points, seeds = list[str](), list[_Look](), list(seeds_for(model.c.placement.ndim))
    while seeds and not search.spent:
        seed = seeds.pop(0)
        looked.append(seed_name(seed))
        at = search.solved(CostNetwork(restricted(model, seed, tensors), network.edges))
        if at is not None:
            points.append(at)
    for at in sorted(points, key=lambda x: x.rank)[:POINTS]:
        search.descend(at, exposure)
    best = base
    for at in sorted(search.seen.values(), key=lambda x: x.rank):
        if at.rank >= base.rank:
            break
        if fits(at.assignment):
            best = at
            break
    left = tuple(seed_name(seed) for seed in seeds)
    return ShortestStep(
        best.assignment, best.times.step_seconds, base.times.seconds, tuple(looked), left
    )
