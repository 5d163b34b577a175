"""The cheapest assignments with some variables held: for each alternative, all others chosen anew.

Sweeps of the dual give every alternative a lower bound; those with the lowest are solved first, until no
other can be cheaper.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sbp.passes.plan import constants
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.flat_network import flat_network
from sbp.passes.plan.network import CostNetwork, Infeasible, Solution, Table, ceiling_of
from sbp.passes.plan.solve import solve
from sbp.passes.plan.sweeps import Dual

HeldStates = Mapping[int, int]
"""One alternative: by variable, its state."""


@dataclass(frozen=True)
class HeldSolutions:
    """The cheapest alternatives.

    Arguments:
      solutions: by position of the alternative, its solution, the cheapest first.
      slower: how many others cost at least as much as each of these, proven; or no assignment has them.
      unknown: how many there was no time for.
      impossible: how many others no assignment has.
    """

    solutions: tuple[tuple[int, Solution], ...]
    slower: int
    unknown: int
    impossible: int


def held_network(network: CostNetwork, held: HeldStates) -> CostNetwork:
    """The network in which all other states of some variables are forbidden."""
    unary = list(network.unary)
    for x, state in held.items():
        unary[x] = np.where(np.arange(unary[x].size) == state, unary[x], np.inf)
    return CostNetwork(tuple(unary), network.edges)


def cheapest_held(
    network: CostNetwork, alternatives: Sequence[HeldStates], wanted: int, effort: Effort
) -> HeldSolutions:
    """The cheapest of some alternatives.

    Arguments:
      alternatives: all of the same variables.
      wanted: how many of them are to be found.
      effort: for all of them. Each has a share; of one that needs more the best assignment so far
        is taken, with its bound.
    """
    if not alternatives:
        return HeldSolutions((), 0, 0, 0)
    share = effort.seconds_left / (constants.HELD_SHARES * wanted)
    base, least = _bounds(network)
    adds = [[float(least[x][state]) for x, state in held.items()] for held in alternatives]
    costs: list[tuple[float, int, Solution]] = []
    slower, unknown, impossible = 0, 0, 0
    # Where several variables are held, no bound is as near as what their states add to it together.
    for i in sorted(range(len(alternatives)), key=lambda i: (sum(adds[i]), i)):
        if len(costs) >= wanted and base + max(adds[i]) >= costs[wanted - 1][0]:
            slower += 1
        elif costs and effort.is_spent:
            unknown += 1
        else:
            try:
                solution = solve(held_network(network, alternatives[i]), effort=effort.at_most(share))
            except Infeasible:
                impossible += 1
                continue
            if solution.cost == math.inf:
                unknown += 1
            else:
                costs = sorted([*costs, (solution.cost, i, solution)], key=lambda c: c[:2])
    found = tuple((i, solution) for _, i, solution in costs[:wanted])
    dearer = [solution for _, _, solution in costs[wanted:]]
    proven = sum(1 for s in dearer if s.bound >= costs[wanted - 1][0])
    return HeldSolutions(found, slower + proven, unknown + len(dearer) - proven, impossible)


def _bounds(network: CostNetwork) -> tuple[float, list[Table]]:
    """What assignments cost at least, and for each state of each variable, how much more with it."""
    flat = flat_network(network, ceiling_of(network))
    dual, excess = Dual(flat), np.zeros(flat.theta.size)
    for _ in range(constants.ROUND_SWEEPS):
        dual.sweep(forward=True)
        dual.sweep(forward=False)
    base = dual.lower_bound()
    dual.sweep(True, excess)
    dual.sweep(False, excess)
    return base, flat.split(excess)
