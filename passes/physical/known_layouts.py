"""A plan that fits where there is no time to search for one: parallelisms by name, cheaply.

The model under a limit on memory is several times as large as that without one, and its search takes long.
Where little time is left, each of a few parallelisms that keep little in memory is solved without a limit, in
a model of few signatures, and its program asked what it needs. If none of them fits, the search under the
limit goes among these signatures alone, with what may run again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from sbp.passes.physical.exposure import Clock
from sbp.passes.physical.fit import LimitedProblem
from sbp.passes.physical.hidden import solved_alike
from sbp.passes.plan.cheapest import choose
from sbp.passes.plan.grouped import axes_alike
from sbp.passes.plan.hurried import BuiltModel, model_of_few
from sbp.passes.plan.model import ChosenSignatures, Model
from sbp.passes.plan.network import CostNetwork, Infeasible
from sbp.passes.plan.seeds import (
    SEQUENCE_3,
    TENSOR,
    ZERO_3,
    ZERO_3_ANY,
    SeedUse,
    restricted,
    seed_name,
    tensors_of,
)

FITTING: tuple[SeedUse, ...] = (ZERO_3, ZERO_3_ANY, SEQUENCE_3, TENSOR)
"""Parallelisms that keep parts of what others keep whole, for all axes alike."""


@dataclass(frozen=True)
class KnownLayout:
    """A plan that fits: its signatures, and what it is."""

    assignment: ChosenSignatures
    what: str


@dataclass(frozen=True)
class KnownLayouts:
    """Plans for a program whose cheapest one does not fit, with little time.

    Arguments:
      limited: the program, and the limit on memory.
      clock: says what its plans take.
      built: the model that the cheapest one was found in.
      seconds_left: for the search; None for no limit.
      least_seconds: that a search under the limit has in any case.
    """

    limited: LimitedProblem
    clock: Clock
    built: BuiltModel
    seconds_left: Callable[[], float | None]
    least_seconds: float

    @cached_property
    def model(self) -> Model:
        """The model of the signatures that do the same along every axis."""
        if not self.built.is_whole or self.limited.candidates.placement.ndim == 1:
            return self.built.model
        p = self.limited
        return model_of_few(p.candidates, p.asked, p.boxings)

    @cached_property
    def network(self) -> CostNetwork:
        """Its network."""
        if self.model is self.built.model:
            return self.built.network.dense()
        return self.model.build()

    def by_name(self, fastest: ChosenSignatures) -> KnownLayout | None:
        """The cheapest of the parallelisms that fit; the first one that does where there is no time for more.

        Arguments:
          fastest: the cheapest assignment of any size, whose bound holds for all.
        """
        network, found = self.network, None
        tensors, axes = tensors_of(self.model.graph, self.model.boundary.ties), self.clock.candidates
        for use in FITTING:
            if found is not None and self.seconds_left() == 0.0:
                break
            seed = (use,) * axes.placement.ndim
            try:
                states = solved_alike(CostNetwork(restricted(self.model, seed, tensors), network.edges), 0.0)
            except Infeasible:
                continue
            assignment = self.model.chosen(states, network.cost(states), 0.0)
            assignment = replace(assignment, bound=min(fastest.bound, assignment.seconds))
            dearer = found is not None and assignment.seconds >= found.assignment.seconds
            if not dearer and self.limited.fits_program(self.clock.program(assignment, self.limited.donated)):
                found = KnownLayout(assignment, seed_name(seed))
        return found

    def of_few(self, fastest: ChosenSignatures) -> KnownLayout | None:
        """What a search under the limit finds among few signatures, with what may run again."""
        few = axes_alike(self.limited.candidates, (tuple(range(self.clock.candidates.placement.ndim)),))
        problem = replace(self.limited, candidates=few, time_limit_seconds=self.least_seconds)
        try:
            start = choose(few, problem.asked, problem.boxings, 0.0)
        except Infeasible:
            return None
        found = problem.keep_limit(start)
        if found.smallest is not None:
            return None
        bound = min(fastest.bound, found.assignment.seconds)
        return KnownLayout(replace(found.assignment, bound=bound), "a search among few signatures")
