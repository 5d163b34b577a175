"""The floor: plans that are there although a search was cut off, and are never worse than what people write.

They are the cheapest of the signatures that do the same along every axis, and the parallelisms by name among
these. To build the model of all signatures of a large program on three and four axes takes longer than some
have time for; that of few does not.

Neighbouring axes of a placement are used as one there. On three and four axes an op has up to thousands of
strategies, and the tables of a whole model are never written down. Parallelisms use the axes between hosts
for one thing, and those within a host for another. So a model of the strategies that do the same along all
axes of a group has such plans, at the size of one on two axes. With what ops have in the cheapest plan beside
these it has the plans near that one too.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from sbp.hardware.catalogue import Hardware
from sbp.passes.boxing.paths import Boxings
from sbp.passes.physical.exposure import Clock
from sbp.passes.plan import constants
from sbp.passes.plan.candidates import Candidates, Strategy
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.model import Boundary, ChosenSignatures, Model
from sbp.passes.plan.network import Table
from sbp.passes.plan.seeds import plain_seeds, seed_name
from sbp.passes.search.limited_space import FITTING
from sbp.passes.search.pool import Pool, Space
from sbp.placement import Placement
from sbp.signature import NdSbp

AxisGroups: TypeAlias = tuple[tuple[int, ...], ...]


def axis_groups(placement: Placement, hardware: Hardware) -> AxisGroups:
    """The axes of a placement in two groups: those whose devices are on several hosts, and the others.

    Where all are of one kind, the outermost axis is a group by itself.

    >>> import sbp
    >>> axis_groups(sbp.placement("h100", shape=(4, 8, 8)), sbp.hardware.hardware_for("h100"))
    ((0, 1), (2,))
    """
    axes, host = range(placement.ndim), hardware.links[0]
    outer = sum(any(hardware.link([int(r) for r in g]) != host for g in placement.groups((a,))) for a in axes)
    outer = outer if 0 < outer < placement.ndim else 1
    return tuple(group for group in (tuple(axes[:outer]), tuple(axes[outer:])) if group)


def axes_alike(
    candidates: Candidates, groups: AxisGroups, known: ChosenSignatures | None = None
) -> Candidates:
    """The strategies that do the same along all axes of each group; all of an op that has none of these.

    Arguments:
      known: a plan whose strategies stay too.
    """

    def same(nd: NdSbp) -> bool:
        return all(nd[a] == nd[group[0]] for group in groups for a in group)

    def is_alike(s: Strategy) -> bool:
        return all(map(same, s.operands)) and all(map(same, s.results))

    alike: dict[int, tuple[Strategy, ...]] = {}
    left: dict[tuple[int, int], tuple[Strategy, ...]] = {}  # equal ones stay one object

    def chosen(i: int, strategies: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        if id(strategies) not in alike:
            alike[id(strategies)] = tuple(filter(is_alike, strategies)) or strategies
        few = alike[id(strategies)]
        if known is None or any(s is known.strategies[i] for s in few):
            return few
        return left.setdefault((id(few), id(known.strategies[i])), (*few, known.strategies[i]))

    def ports(i: int, each: tuple[tuple[NdSbp, ...], ...]) -> tuple[tuple[NdSbp, ...], ...]:
        few = (tuple(filter(same, states)) or states for states in each)
        if known is None:
            return tuple(few)
        return tuple(tuple(dict.fromkeys((*x, nd))) for x, nd in zip(few, known.ports[i], strict=True))

    return replace(
        candidates,
        strategies={i: chosen(i, strategies) for i, strategies in candidates.strategies.items()},
        ports={i: ports(i, each) for i, each in candidates.ports.items()},
    )


class CutOff(Exception):
    """The time of the user is over."""


class CutModel(Model):
    """A model that is given up when the time of the user is over.

    Arguments:
      is_over: whether it is.
    """

    def __init__(
        self, candidates: Candidates, boundary: Boundary, boxings: Boxings, is_over: Callable[[], bool]
    ) -> None:
        super().__init__(candidates, boundary, boxings)
        self.is_over = is_over

    def variable(self, states: Sequence[Any], cost: Table | None = None) -> int:
        if self.is_over():
            raise CutOff
        return super().variable(states, cost)


def add_floor(pool: Pool, clock: Clock, asked: Boundary, donated: tuple[int, ...]) -> None:
    """Adds the plans to a pool.

    Raises:
      Infeasible: if what the user asks for needs signatures that differ from axis to axis.
    """
    axes = clock.candidates.placement.ndim
    model = Model(axes_alike(clock.candidates, (tuple(range(axes)),)), asked, clock.boxings)
    space = Space(model, model.build(), clock, donated)
    seeds = [*plain_seeds(axes), *((use,) * axes for use in FITTING)]
    for unary, name in (
        (space.network.unary, "the cheapest of few signatures"),
        *((space.restriction(seed), seed_name(seed)) for seed in dict.fromkeys(seeds)),
    ):
        found = space.solve(unary, name, Effort().at_most(constants.TRY_SECONDS))
        if found is not None:
            pool.add(found)
