"""Parallelisms compared where a program is too large to look at a plan of each.

A look makes a whole program and runs it. Where layers are equal, which parallelism is worth a look is seen of
one layer of those that are alike: with each collective counting as far as it is exposed in the cheapest plan,
every parallelism is solved on the network folded, all of them with the same classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sbp.passes.physical.exposure import Exposure, Shares
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.fold import fold_alike, numbers_of
from sbp.passes.plan.model import Model
from sbp.passes.plan.network import CostNetwork, Infeasible, Table
from sbp.passes.plan.seeds import SeedTensors, SeedUse, restricted
from sbp.passes.plan.solve import solve

HOPS = 1
"""How far nodes must look alike to be one (plan/fold.py): what parallelisms cost beside each other is the
same with more, to four digits, and takes longer."""
ALIKE = 0.015
"""Where this part of the nodes, or less, have costs of their own, layers are so many and so equal that all
parallelisms take about as long as a look at one plan."""


@dataclass(frozen=True)
class ComparedSeed:
    """A parallelism that was compared.

    Arguments:
      unary: the costs of the states that it allows, infinite for others.
      cost: of the cheapest plan of it that treats alike what looks alike.
      states: that plan.
    """

    seed: tuple[SeedUse, ...]
    unary: tuple[Table, ...]
    cost: float
    states: tuple[int, ...]


def is_alike(network: CostNetwork) -> bool:
    """Whether so many parts of a network are equal that parallelisms are compared on one of each."""
    return len(set(numbers_of(network.unary).tolist())) <= ALIKE * len(network.unary)


def compared(
    model: Model,
    exposure: Exposure,
    shares: Shares,
    seeds: Sequence[tuple[SeedUse, ...]],
    tensors: SeedTensors,
    effort: Effort,
) -> list[ComparedSeed]:
    """Parallelisms, the cheapest first; without those that no plan has.

    Arguments:
      shares: what part of each move counts.
      effort: counts the work.
    """
    edges, found = exposure.weighted_edges(shares), list[ComparedSeed]()
    unaries = [restricted(model, seed, tensors) for seed in seeds]
    weighted = [exposure.weighted_unary(shares, unary) for unary in unaries]
    for seed, unary, folded in zip(seeds, unaries, fold_alike(weighted, edges, HOPS), strict=True):
        try:
            solution = solve(folded.network, effort=Effort(effort.count), proves=False)
        except Infeasible:
            continue
        if math.isfinite(solution.cost):
            found.append(ComparedSeed(seed, unary, solution.cost, folded.expand(solution.states)))
    return sorted(found, key=lambda x: float(f"{x.cost:.6e}"))
