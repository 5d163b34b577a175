"""Models of few signatures on many axes: neighbouring axes of a placement are used as one.

On three and four axes an op has up to thousands of strategies, and the tables of a whole model are never
written down. Parallelisms use the axes between hosts for one thing, and those within a host for another. So a
model of the strategies that do the same along all axes of a group has such plans, at the size of one on two
axes. With what ops have in the cheapest plan beside these it has the plans near that one too.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sbp.hardware.catalogue import Hardware
from sbp.passes.plan.candidates import Candidates, Strategy
from sbp.passes.plan.model import ChosenSignatures
from sbp.passes.plan.network import Table
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


def costs_alike(states: Sequence[Sequence[Any]], unary: Sequence[Table]) -> tuple[Table, ...]:
    """What states of a model cost, infinite where they do not do the same along all axes.

    Arguments:
      states: of the model's variables. Those of which no state does keep all.
    """
    wanted: dict[int, NDArray[np.bool_]] = {}
    for each in states:
        if id(each) not in wanted:
            alike = np.array([all(nd == nd[:1] * len(nd) for nd in _signatures(x)) for x in each])
            wanted[id(each)] = alike if alike.any() else ~alike
    return tuple(np.where(wanted[id(x)], u, np.inf) for x, u in zip(states, unary, strict=True))


def _signatures(state: Any) -> tuple[NdSbp, ...]:
    if isinstance(state, Strategy):
        return *state.operands, *state.results
    return () if state is None else (state,)


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
