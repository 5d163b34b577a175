"""A planning problem as the search explores it: what its solutions are worth as plans."""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from sbp.passes.physical.exposure import Clock, Exposure
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.fold import fold
from sbp.passes.plan.model import Model
from sbp.passes.plan.network import CostNetwork, Infeasible, Table
from sbp.passes.plan.seeds import SeedTensors, SeedUse, restricted, tensors_of
from sbp.passes.plan.solve import solve
from sbp.passes.search.pool import PlanCandidate

FOLDED = 0.6
"""A network is solved folded where at most this part of its nodes is left."""
FOLD_SECONDS = 5e-6
"""What folding takes, for each node and each edge."""


def solved_alike(network: CostNetwork, effort: Effort) -> tuple[int, ...]:
    """States that solve a network, folded where it has many equal parts.

    Raises:
      Infeasible: if every assignment has an infinite cost, or none without was found.
    """
    effort.count.add(FOLD_SECONDS * (len(network.unary) + len(network.edges)))
    folded = fold(network)
    is_folded = len(folded.network.unary) <= FOLDED * len(network.unary)
    given = folded.network if is_folded else network
    states = solve(given, effort=effort, proves=False).states
    if not math.isfinite(given.cost(states)):
        raise Infeasible
    return folded.expand(states) if is_folded else states


class Space:
    """A planning problem without a limit on memory.

    Arguments:
      model, network: of the problem.
      clock: makes the programs of its plans.
      donated: positions of the inputs whose memory the results may take.
      bound: what no plan of it can be cheaper than.
      unary: the costs of states, if not those of the network: infinite for states that are not wanted.
    """

    def __init__(
        self,
        model: Model,
        network: CostNetwork,
        clock: Clock,
        donated: Sequence[int] = (),
        bound: float = 0.0,
        unary: tuple[Table, ...] | None = None,
    ) -> None:
        self.model, self.clock, self.donated, self.bound = model, clock, donated, bound
        self.network = network if unary is None else CostNetwork(unary, network.edges)
        self.is_part = unary is not None
        self.seen: set[tuple[int, ...]] = set()

    @cached_property
    def exposure(self) -> Exposure:
        """Problems in which collectives count as far as they are exposed."""
        return Exposure(self.model, self.network)

    @cached_property
    def tensors(self) -> SeedTensors:
        """What the tensors of the program are."""
        return tensors_of(self.model.graph, self.model.boundary.ties)

    def restricted(self, seed: Sequence[SeedUse]) -> tuple[Table, ...]:
        """The costs of states, infinite where a parallelism does not allow them."""
        found = restricted(self.model, seed, self.tensors)
        if not self.is_part:
            return found
        return tuple(np.maximum(a, b) for a, b in zip(found, self.network.unary, strict=True))

    def begin(self, unary: tuple[Table, ...], source: str, effort: Effort) -> PlanCandidate | None:
        """The cheapest plan of some states; None if there is none, or it was looked at before."""
        return self.solved(CostNetwork(unary, self.network.edges), source, effort)

    def go_on(
        self, network: CostNetwork, at: PlanCandidate, source: str, effort: Effort
    ) -> PlanCandidate | None:
        """The plan that solves the problem with other costs; None if it was looked at before.

        Arguments:
          at: the plan that these costs are of.
        """
        return self.solved(network, source, effort)

    def solved(self, network: CostNetwork, source: str, effort: Effort) -> PlanCandidate | None:
        """The plan that solves a network without a limit; None if it was looked at before."""
        try:
            return self.look_once(solved_alike(network, Effort(effort.count)), source)
        except Infeasible:
            return None

    def look_once(self, states: tuple[int, ...], source: str) -> PlanCandidate | None:
        """The plan of some states; None if it was looked at before."""
        if states in self.seen:
            return None
        return self.look(states, source)

    def look(self, states: tuple[int, ...], source: str) -> PlanCandidate:
        """The plan of some states."""
        self.seen.add(states)
        assignment = self.model.chosen(states, self.network.cost(states), self.bound)
        return PlanCandidate(
            assignment, self.clock.program(assignment, self.donated), self.clock, source, states
        )
