"""A plan that fits where there is no time to search for one: parallelisms by name, cheaply.

The model under a limit on memory is several times as large as that without one, and its search takes long.
Where little time is left, each of a few parallelisms that keep little in memory is solved without a limit, in
a model of few signatures, and its program asked what it needs. If none of them fits, the search under the
limit goes among these signatures alone, with what may run again.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from sbp.passes.physical.exposure import Clock
from sbp.passes.physical.fit import LimitedProblem
from sbp.passes.physical.hidden import solved_alike
from sbp.passes.plan.budget import Budget
from sbp.passes.plan.cheapest import choose
from sbp.passes.plan.cost import local_bytes
from sbp.passes.plan.grouped import axes_alike
from sbp.passes.plan.hurried import BuiltModel, model_of_few
from sbp.passes.plan.model import ChosenSignatures, Model
from sbp.passes.plan.network import CostNetwork, Infeasible
from sbp.passes.plan.priced import DEAR
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
from sbp.signature import NdSbp

FITTING: tuple[SeedUse, ...] = (ZERO_3, ZERO_3_ANY, SEQUENCE_3, TENSOR)
"""Parallelisms that keep parts of what others keep whole, for all axes alike."""
LONG = 0.02
"""What is alive for more than this part of the program has a price, one for all of these: so layers that are
alike stay so, though what the first ones make is alive longest."""
PRICES, FACTOR, LEAST_EXCESS = 8, 4.0, 0.05
"""How many prices are tried, each so many times the one before; and the least part of the limit that is taken
to be too much, to begin with."""


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
                unary = restricted(self.model, seed, tensors)
                states = solved_alike(CostNetwork(unary, network.edges), self.least_seconds)
            except Infeasible:
                continue
            assignment = self.model.chosen(states, network.cost(states), 0.0)
            assignment = replace(assignment, bound=min(fastest.bound, assignment.seconds))
            if found is not None and assignment.seconds >= found.assignment.seconds:
                continue
            # To make the program and to order its kernels takes much longer than this.
            if kept_bytes(self.model, states) > self.limited.limit_bytes:
                continue
            if self.limited.fits_program(self.clock.program(assignment, self.limited.donated)):
                found = KnownLayout(assignment, seed_name(seed))
        return found

    @cached_property
    def problem(self) -> LimitedProblem:
        """The program with few signatures."""
        few = axes_alike(self.limited.candidates, (tuple(range(self.clock.candidates.placement.ndim)),))
        return replace(self.limited, candidates=few, time_limit_seconds=self.least_seconds)

    def by_price(self, fastest: ChosenSignatures) -> KnownLayout | None:
        """What one price leads to for all bytes that are kept long: layers that are alike are solved at once,
        and keep, send or compute again what costs least."""
        model = self.problem.model()
        network = model.build()
        loads = [x for x in model.loads if x.node >= 0]
        end = max((x.end for x in loads), default=0)
        long = [x for x in loads if x.end - x.start > LONG * end]
        budget, price = Budget(tuple(model.loads), self.limited.limit_bytes), 0.0
        for _ in range(PRICES):
            unary = list(network.unary)
            for x in long:
                unary[x.node] = unary[x.node] + price * x.bytes
            try:
                states = solved_alike(CostNetwork(tuple(unary), network.edges), self.least_seconds)
            except Infeasible:
                return None
            counted = budget.peak_bytes(states)
            assignment = model.chosen(states, network.cost(states), 0.0)
            assignment = replace(assignment, bound=min(fastest.bound, assignment.seconds))
            if counted <= self.limited.limit_bytes and self.limited.fits(assignment):
                return KnownLayout(assignment, "what one price for all bytes leads to")
            excess = max(counted - self.limited.limit_bytes, LEAST_EXCESS * self.limited.limit_bytes)
            price = FACTOR * price if price else DEAR * fastest.seconds / excess
        return None

    def of_few(self, fastest: ChosenSignatures) -> KnownLayout | None:
        """What a search under the limit finds among few signatures, with what may run again."""
        problem = self.problem
        try:
            start = choose(problem.candidates, problem.asked, problem.boxings, 0.0)
        except Infeasible:
            return None
        found = problem.keep_limit(start)
        if found.smallest is not None:
            return None
        bound = min(fastest.bound, found.assignment.seconds)
        return KnownLayout(replace(found.assignment, bound=bound), "a search among few signatures")


def kept_bytes(model: Model, states: Sequence[int]) -> float:
    """What one device holds at least under some states: arguments all the time, and values as they are made,
    from then to their last use; not what these are boxed to, nor what kernels hold inside."""
    hierarchy, known, lying = model.c.placement.shape, dict[Hashable, float](), 0.0

    def size(v: int, variable: int, needs: Sequence[NdSbp]) -> float:
        value, nd = model.graph.values[v], needs[states[variable]]
        key = value.shape, value.dtype, nd
        if key not in known:
            known[key] = local_bytes(value.shape, value.dtype, nd, hierarchy)
        return known[key]

    arguments = dict(zip(model.graph.inputs, model.inputs, strict=True))
    for v, variable in arguments.items():
        lying += size(v, variable, model.states[variable])
    changes = defaultdict[int, float](float)
    for life in model.c.lives:
        supply = model.supply.get(life.value)
        if supply is None or life.value in arguments or life.is_result:
            continue
        held = size(life.value, supply.variable, supply.needs)
        changes[life.start] += held
        changes[life.end] -= held
    most = max(accumulate(changes[t] for t in sorted(changes)), default=0.0)
    return lying + max(0.0, most)
