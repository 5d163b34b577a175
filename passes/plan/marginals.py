"""The cheapest assignments with some variables held: for each alternative, all others chosen anew.

The network is reduced once for all alternatives: a dummy load per held variable keeps the reductions from
taking its states away, and tells afterwards which state of the kernel stands for which. Sweeps of the dual
give every alternative a lower bound; those with the lowest are solved first, until no other can be cheaper.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sbp.passes.plan import constants
from sbp.passes.plan.budget import Load
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.flat import flat_network
from sbp.passes.plan.network import CostNetwork, Infeasible, Solution, Table, ceiling_of, restricted
from sbp.passes.plan.reduce import Reduction, reduce_network
from sbp.passes.plan.solve import solve
from sbp.passes.plan.sweeps import Dual

HeldStates = Mapping[int, int]
"""One alternative: by variable, its state."""


@dataclass(frozen=True)
class HeldSolutions:
    """The cheapest alternatives.

    Arguments:
      found: by position of the alternative, its solution, the cheapest first.
      slower: how many others cost at least as much as each of these, proven; or no assignment has them.
      unknown: how many there was no time for.
      impossible: how many others no assignment has.
    """

    found: tuple[tuple[int, Solution], ...]
    slower: int
    unknown: int
    impossible: int


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
    share = effort.left / (constants.HELD_SHARES * wanted)
    kernel = _Kernel(network, sorted(alternatives[0]))
    # Where several variables are held, no bound is as near as what their states add to it together.
    ordered = sorted(range(len(alternatives)), key=lambda i: (kernel.near(alternatives[i]), i))
    costs: list[tuple[float, int, Solution]] = []
    slower, unknown, impossible = 0, 0, 0
    for i in ordered:
        bound = kernel.bound(alternatives[i])
        if bound == math.inf:
            impossible += 1
        elif len(costs) >= wanted and bound >= costs[wanted - 1][0]:
            slower += 1
        elif costs and effort.is_spent:
            unknown += 1
        else:
            try:
                solution = kernel.solved(alternatives[i], effort.at_most(share))
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


class _Kernel:
    """What is left of a network when everything is reduced that holds for all alternatives."""

    def __init__(self, network: CostNetwork, variables: Sequence[int]) -> None:
        self.network = network
        loads: list[Load] = []
        for k, x in enumerate(variables):
            n = network.unary[x].size
            # Ascending and descending, so that no state has more of both: none is dominated.
            loads.append(Load(x, 2 * k, 2 * k + 1, np.arange(float(n))))
            loads.append(Load(x, 2 * k + 1, 2 * k + 2, np.arange(float(n))[::-1].copy()))
        self.reduction: Reduction = reduce_network(network, loads=tuple(loads))
        self.where: dict[int, tuple[int, NDArray[np.float64]]] = {}
        """Per variable: the node of the kernel that decides it (-1: none), and its state for each of that."""
        fixed: dict[int, float] = {}
        for given in self.reduction.loads:
            if given.node < 0:
                fixed[given.start] = fixed.get(given.start, 0.0) + float(given.bytes[0])
        deciding = {load.start: load for load in self.reduction.loads if load.node >= 0}
        for k, x in enumerate(variables):
            load = deciding.get(2 * k)
            own = np.zeros(1) if load is None else load.bytes
            self.where[x] = -1 if load is None else load.node, own + fixed.get(2 * k, 0.0)
        self.at_least = self._bounds()

    def _bounds(self) -> list[Table]:
        """For each state of the kernel, what an assignment with it costs at least."""
        kernel = self.reduction.kernel
        if not kernel.unary:
            return []
        flat = flat_network(kernel)
        dual = Dual(flat, ceiling_of(kernel))
        for _ in range(constants.ROUND_SWEEPS):
            dual.sweep(forward=True)
            dual.sweep(forward=False)
        base, excess = dual.bound(), np.zeros(flat.theta.size)
        dual.sweep(True, excess)
        dual.sweep(False, excess)
        return [self.reduction.constant + x for x in flat.split(base + excess)]

    def states(self, held: HeldStates) -> dict[int, NDArray[np.intp]]:
        """The states that an alternative leaves to nodes of the kernel; none where it is impossible."""
        left: dict[int, NDArray[np.intp]] = {}
        for x, state in held.items():
            node, own = self.where[x]
            found = np.flatnonzero(own == state)
            left[node] = np.intersect1d(left[node], found) if node in left else found
        return left

    def bound(self, held: HeldStates) -> float:
        """What an alternative costs at least; infinite if it is impossible."""
        left = self.states(held)
        if any(not keep.size for keep in left.values()):
            return math.inf
        bounds = [float(self.at_least[node][keep].min()) for node, keep in left.items() if node >= 0]
        return max(bounds, default=self.reduction.constant)

    def near(self, held: HeldStates) -> float:
        """A guess at what an alternative costs: what each held variable adds, as if it alone were held."""
        left = self.states(held)
        if any(not keep.size for keep in left.values()):
            return math.inf
        parts = [self.at_least[node] for node in left if node >= 0]
        kept = [float(x[left[node]].min()) for node, x in enumerate(self.at_least) if node in left]
        return sum(kept) - sum(float(x.min()) for x in parts)

    def solved(self, held: HeldStates, effort: Effort) -> Solution:
        """The cheapest assignment of the whole network with an alternative, as far as there is time."""
        left, kernel = self.states(held), self.reduction.kernel
        if any(not keep.size for keep in left.values()):
            raise Infeasible()
        full = [left.get(k, np.arange(theta.size)) for k, theta in enumerate(kernel.unary)]
        found = solve(restricted(kernel, full), effort=effort)
        if found.cost == math.inf:
            return Solution((), math.inf, self.reduction.constant + found.bound)
        states = self.reduction.expand([int(k[s]) for k, s in zip(full, found.states, strict=True)])
        cost = self.network.cost(states)
        return Solution(states, cost, min(cost, self.reduction.constant + found.bound))
