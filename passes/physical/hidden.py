"""The plan with the shortest step, where collectives run beside kernels: the search, told what is exposed.

The cheapest plan one thing after the other may wait for collectives that a dearer one hides. From it, and
from parallelisms by name (plan/seeds.py), each a point to start at, the problem is solved again and again
with every move counting as far as it was exposed (exposure.py), and what is kept is the plan with the
shortest step of all that were looked at. How many that are depends on the size of the program alone, so that
the same program has the same plan however busy the machine is.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from sbp.passes.physical.compared import compared, is_alike
from sbp.passes.physical.evaluate import OVERLAPPING, Evaluator
from sbp.passes.physical.exposure import Clock, Exposure, Shares, StepTimes
from sbp.passes.physical.latency_hiding import have_walk_ready
from sbp.passes.physical.lone_collectives import lone_moves, network_without, sent_bytes
from sbp.passes.plan.fold import fold
from sbp.passes.plan.model import ChosenSignatures, Model
from sbp.passes.plan.network import CostNetwork, Infeasible, Table
from sbp.passes.plan.phases import Phases
from sbp.passes.plan.seeds import (
    SeedUse,
    restricted,
    seed_name,
    seeds_compared,
    seeds_for,
    tensors_of,
)
from sbp.passes.plan.solve import solve

FIRST_ROUNDS, SEED_ROUNDS, LAST_ROUNDS = 4, 2, 6
"""Solutions that begin at the cheapest plan before seeds are looked at, at each of the best seeds, within
what that allows, and at last at the best plan. Fewer where a plan comes back; of few looks the first take a
quarter, and the last a third."""
WORTH = 0.99
"""Of the cheapest plan's step: one with a longer step is not taken. The model of overlap is about a percent
off (docs/decisions/0014_overlap.md), and less than that is not worth more bytes."""
POINTS = 3
"""Seeds that are gone on from under a limit, those with the shortest steps; without one, as many as looks
allow."""
LOOKS_PER_FINALIST = 4
"""Of so many looks one plan is run in XLA's own order at the end (scheduled.py), those with the shortest
steps by the list schedule first."""
LOST = 1.1
"""Steps so many times as long as where one came from are not gone on from."""
WORK, BESIDE = 66_000, 7
"""The sizes of all looks (`look_size`) together, and how many all other planning takes. For a GPT of 12
layers on 8 x 8 that leaves three looks."""
STAGE_WORK = 3 * WORK
"""Of a placement that works on micro-batches: its program is part of one, and runs for each of them."""
COMPARED_LOOKS = 2
"""Of programs so large, and of so many equal layers, that eight parallelisms are only compared
(compared.py): looks, each at one of the best of these."""
FEWEST_LOOKS, MANY_LOOKS, MOST_LOOKS = 2, 24, 48
"""Beyond many of them a quarter of those that the work allows are looked at."""
MOST_CELLS = 2e7
"""Networks of more table cells, as on four axes, are not written down; axes are grouped there."""
GROUPED_WORK, GROUPED_LOOKS = 1_300_000, 18
"""What the looks at plans of a network of grouped axes may take, as finding the cheapest has taken more, and
how many they are at most: with them eight seeds are looked at."""
FOLDED = 0.6
"""A network is solved folded where at most this part of its nodes is left."""


@dataclass(frozen=True)
class ShortestStep:
    """The plan with the shortest step.

    Arguments:
      assignment: the signatures with the shortest step that fit; it has the time of the cheapest plan too.
      step_seconds: the step, if it was scheduled.
      looked, left: names of the candidates that were compared, and of those for which there was no time.
      passed_over: whether a plan with a shorter step was left out because it does not fit.
      takes: the figures of the finished program of this assignment, if it was made.
      compared: names of the parallelisms that were compared first, the cheapest first.
    """

    assignment: ChosenSignatures
    step_seconds: float = math.nan
    looked: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    passed_over: bool = False
    takes: Evaluator | None = None
    compared: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepLook:
    """A plan that was looked at; with its program, where it may be run once more."""

    assignment: ChosenSignatures
    times: StepTimes
    takes: Evaluator | None = None

    @property
    def rank(self) -> tuple[float, float]:
        # Steps that are the same to six digits are; then the fewer seconds count.
        return float(f"{self.times.step_seconds:.5e}"), self.times.seconds


def looks_for(network: CostNetwork, work: float = WORK) -> int:
    """How many plans of a program are looked at; that depends on its size alone.

    Arguments:
      work: the sizes of all looks together.
    """
    allowed = int(work / look_size(network)) - BESIDE
    more = max(0, allowed - MANY_LOOKS) // 4
    return max(FEWEST_LOOKS, min(allowed, MANY_LOOKS + more, MOST_LOOKS))


def grouped_looks(network: CostNetwork) -> int:
    """The same of a network of grouped axes."""
    return max(FEWEST_LOOKS, min(int(GROUPED_WORK / look_size(network)), GROUPED_LOOKS))


def look_size(network: CostNetwork) -> float:
    """The work of a look at a plan: edges that are run and nodes that are solved count alike, and the cells
    of tables by what they take beside (measured for GPTs of 2 and 12 layers on one axis and on two)."""
    distinct = {id(table): table.size for _, _, table in network.edges}
    return 1 + 0.5 * (len(network.edges) + len(fold(network).network.unary)) + sum(distinct.values()) / 150


def solved_alike(network: CostNetwork, time_limit_seconds: float | None) -> tuple[int, ...]:
    """States that solve a network, folded where it has many equal parts.

    Raises:
      Infeasible: if every assignment has an infinite cost, or none without was found in time.
    """
    folded = fold(network)
    is_folded = len(folded.network.unary) <= FOLDED * len(network.unary)
    given = folded.network if is_folded else network
    states = solve(given, time_limit_seconds=time_limit_seconds, proves=False).states
    if not math.isfinite(given.cost(states)):
        raise Infeasible
    return folded.expand(states) if is_folded else states


@dataclass(frozen=True, slots=True)
class Begun:
    """A parallelism that was looked at: its name, its plan, if that is a new one, and the costs of the states
    that it allows."""

    name: str
    look: StepLook | None
    unary: tuple[Table, ...]


class _Search:
    """What was looked at so far, and how much may still be."""

    def __init__(
        self,
        model: Model,
        network: CostNetwork,
        cheapest: ChosenSignatures,
        seconds: float | None,
        donated: Sequence[int],
        looks: int | None,
        phases: Phases,
        takes: Evaluator | None,
    ) -> None:
        self.model, self.network, self.phases = model, network, phases
        self.bound = cheapest.bound + cheapest.beyond_seconds
        self.donated = donated
        self.clock = Clock(model.c, model.boxings)
        have_walk_ready()  # a part of no plan: no limit on time ends in a worse one for that
        self.deadline = math.inf if seconds is None else phases.now() + seconds
        self.left = looks_for(network) if looks is None else looks
        self.finalists = max(1, self.left // LOOKS_PER_FINALIST)
        self.seen: dict[tuple[int, ...], StepLook] = {}
        self.look_seconds = self.run_seconds = 0.0
        with self.timed("look_seconds", "cheapest plan looked at"):
            self.cheapest = self.look(cheapest, takes)

    @contextmanager
    def timed(self, which: str, name: str) -> Iterator[None]:
        """Notes what is done meanwhile, and how long one of its kind takes."""
        began = self.phases.now()
        with self.phases.of(name, needed=False):
            yield
        setattr(self, which, self.phases.now() - began)

    @property
    def spent(self) -> bool:
        """Whether there is no time for one more look, and to run what it finds."""
        return self.left <= 0 or self.phases.now() + self.look_seconds > self.deadline - self.run_seconds

    def look(self, assignment: ChosenSignatures, takes: Evaluator | None = None) -> StepLook:
        takes = self.clock.program(assignment, self.donated) if takes is None else takes
        return StepLook(assignment, self.clock.times_of(takes, assignment.beyond_seconds), takes)

    def solved(self, network: CostNetwork) -> StepLook | None:
        """The plan that solves a network; None if it has none, or was looked at already."""
        self.left -= 1
        remaining = None if math.isinf(self.deadline) else max(0.0, self.deadline - self.phases.now())
        with self.timed("look_seconds", "look"):
            try:
                return self.looked_at(solved_alike(network, remaining))
            except Infeasible:
                return None

    def looked_at(self, states: tuple[int, ...]) -> StepLook | None:
        """The plan for an assignment of states; None if that plan was compared before."""
        if states in self.seen:
            return None
        assignment = self.model.chosen(states, self.network.cost(states), self.bound)
        self.seen[states] = self.look(assignment)
        return self.seen[states]

    def descend(self, start: StepLook, exposure: Exposure, unary: Sequence[Table], rounds: int) -> None:
        """Solves anew with what is exposed, until a plan comes back or is lost."""
        at: StepLook | None = start
        shares: Shares | None = None
        for _ in range(rounds):
            if self.spent or at is None or at.times.step_seconds > LOST * start.times.step_seconds:
                break
            shares = exposure.shares(at.times, shares)
            at = self.solved(exposure.weighted(shares, unary))

    def begin(self, seeds: list[tuple[SeedUse, ...]], last: int) -> Iterator[Begun]:
        """The cheapest plans of parallelisms, as many as there are looks for, but for the last ones.

        Arguments:
          seeds: of which those that are looked at are taken out.
        """
        tensors = tensors_of(self.model.graph, self.model.boundary.ties)
        while seeds and self.left > last and not self.spent:
            seed = seeds.pop(0)
            unary = restricted(self.model, seed, tensors)
            yield Begun(seed_name(seed), self.solved(CostNetwork(unary, self.network.edges)), unary)

    def compare(self, exposure: Exposure, outer: int) -> tuple[list[Begun], list[str]]:
        """Plans of the cheapest parallelisms of all that are compared, and the names of these."""
        graph, ties, seeds = self.model.graph, self.model.boundary.ties, self.model.c.placement.ndim
        with self.phases.of("parallelisms compared", needed=False):
            given = exposure, exposure.shares(self.cheapest.times), seeds_compared(seeds, outer)
            found = compared(self.model, *given, tensors_of(graph, ties), self.seconds_left)
        begun = list[Begun]()
        for x in found[:COMPARED_LOOKS]:
            if not self.spent:
                self.left -= 1
                with self.timed("look_seconds", "look"):
                    begun.append(Begun(seed_name(x.seed), self.looked_at(x.states), x.unary))
        return begun, [seed_name(x.seed) for x in found]

    def seconds_left(self) -> float:
        """For what is looked at but a last run."""
        return self.deadline - self.run_seconds - self.phases.now()

    def best(self) -> list[StepLook]:
        """What was looked at, the shortest step first."""
        return sorted(self.seen.values(), key=lambda x: x.rank)

    def final(self) -> list[tuple[float, StepLook]]:
        """The first of these with the steps that they take in XLA's own order, the shortest first; of those
        for which there is time."""
        found = list[tuple[float, StepLook]]()
        for x in self.best()[: self.finalists]:
            if self.phases.now() + self.run_seconds > self.deadline:
                break
            found.append((self.run(x), x))
        return sorted(found, key=lambda x: (float(f"{x[0]:.5e}"), x[1].rank))

    def together(self, seconds: float, best: StepLook) -> list[tuple[float, StepLook]]:
        """The plan like the best one whose small collectives leave with others, if it is worth it.

        Arguments:
          seconds: the best one's step in XLA's own order.
        """
        takes = program_of(best)
        lone = lone_moves(takes)
        if not lone or self.phases.now() + self.look_seconds > self.deadline - self.run_seconds:
            return []
        look = self.solved(network_without(self.model, self.network, lone))
        if look is None:
            return []
        took, sends_less = self.run(look), sent_bytes(program_of(look)) < sent_bytes(takes)
        return [(took, look)] if took <= (seconds / WORTH if sends_less else seconds * WORTH) else []

    def run(self, look: StepLook) -> float:
        """The step of a plan in XLA's own order."""
        with self.timed("run_seconds", "step in XLA's order"):
            return scheduled_seconds(look)


def scheduled_seconds(look: StepLook) -> float:
    """The step of a plan in XLA's own order, with the copies at its end."""
    return program_of(look).scheduled().whole_seconds + look.assignment.beyond_seconds


def program_of(look: StepLook) -> Evaluator:
    """The program of a plan that was looked at here, with what it takes."""
    assert look.takes is not None
    return look.takes


def shortest_step(
    model: Model,
    network: CostNetwork,
    cheapest: ChosenSignatures,
    fits: Callable[[Evaluator], bool],
    time_limit_seconds: float | None = None,
    donated: Sequence[int] = (),
    outer: int = 1,
    looks: int | None = None,
    phases: Phases | None = None,
    takes: Evaluator | None = None,
) -> ShortestStep:
    """The plan with the shortest step that is found.

    Arguments:
      model, network: of the search, as `Model.build` has made them.
      cheapest: what the search has found.
      fits: whether a program keeps the limit on memory; asked of the few that are better than `cheapest`.
      time_limit_seconds: after which no other plan is looked at.
      donated: positions of the inputs whose memory the results may take.
      outer: how many axes of the placement parallelisms use for one thing, and the others for another.
      looks: how many plans are looked at; None for as many as a program of this size usually has.
      phases: where each look is noted.
      takes: the program of `cheapest`, if it was made.
    """
    phases = Phases() if phases is None else phases
    search = _Search(model, network, cheapest, time_limit_seconds, donated, looks, phases, takes)
    base = search.cheapest
    took = search.run(base)
    if model.boxings.network.hardware.platform not in OVERLAPPING or not (
        base.times.sent or base.times.talked
    ):
        return ShortestStep(cheapest, took, takes=base.takes)
    exposure = Exposure(model, network)
    seeds, compares = list(seeds_for(model.c.placement.ndim, outer)), list[str]()
    is_compared = search.left < len(seeds_compared(model.c.placement.ndim, outer)) and is_alike(network)
    if is_compared:
        search.left = COMPARED_LOOKS
    last = min(LAST_ROUNDS, search.left // 3)
    begun = list[Begun]()
    if is_compared and not search.spent:
        begun, compares = search.compare(exposure, outer)
        seeds = [seed for seed in seeds if seed_name(seed) not in compares]
    elif not is_compared:
        search.descend(base, exposure, network.unary, min(FIRST_ROUNDS, max(1, search.left // 4)))
        begun = list(search.begin(seeds, last))
    points = [(x.look, x.unary) for x in begun if x.look is not None]
    for at, unary in sorted(points, key=lambda x: x[0].rank):
        search.descend(at, exposure, unary, min(SEED_ROUNDS, search.left - last))
    for at in search.best()[:1]:
        search.descend(at, exposure, network.unary, search.left)
    better = [(seconds, x) for seconds, x in search.final() if seconds <= WORTH * took]
    better = [*search.together(*(better or [(took, base)])[0]), *better]
    seconds, best = next((x for x in better if fits(program_of(x[1]))), (took, base))
    left, looked = tuple(map(seed_name, seeds)), tuple(x.name for x in begun)
    chosen = best.assignment
    if best is not base:
        chosen = replace(chosen, cheapest_seconds=base.times.seconds)
    passed_over = bool(better) and better[0][1] is not best
    return ShortestStep(chosen, seconds, looked, left, passed_over, best.takes, tuple(compares))
