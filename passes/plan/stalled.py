"""Where sweeps hardly raise the bound: few states of every node at once, and sweeps in another order.

Programs whose layers are no copies of each other, such as convolutional nets, have bounds that rise slowly:
what one end of the net costs reaches the other end after hundreds of sweeps. Two things help there. The
cheapest plan has one of the few best states of nearly every node, and a network of few states is eliminated
at once, however long it is. And sweeps that go from node to neighbour carry costs further than sweeps in the
order of the program, in which forward and backward ops of one layer are far apart.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from sbp.passes.plan.dual import Dual
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.flat import Indices, flat_network
from sbp.passes.plan.network import CostNetwork, Table

FEW = (3, 5, 8)
"""So many states of each node are tried, one number after the other."""
NEAR = 9e-3
"""Of the cost: a gap that is not worth further sweeps."""
SWEPT_CELLS = 2.2e10
"""What all of these sweeps go through at most: about ten seconds. Counted in cells, not by the clock, so that
a bound is the same on a busy machine."""
ROUND, ROUNDS = 20, 400
"""Pairs of sweeps between two looks at the bound, and how often that is looked at, at the most."""
CLOSED = 5e-3
"""Of the gap: a round that closes less is the last."""


def few_states(at_least: Sequence[Table], states: Sequence[int], count: int) -> list[NDArray[np.intp]]:
    """Per node its state now and the states with the least bounds, so many at most.

    >>> few_states([np.array([3.0, 1.0, 2.0])], [0], 2)[0].tolist()
    [0, 1]
    """
    kept = []
    for bounds, state in zip(at_least, states, strict=True):
        best = np.argsort(bounds, kind="stable")
        others = best[best != state][: count - 1]
        kept.append(np.sort(np.append(others, state)))
    return kept


def breadth_first(network: CostNetwork) -> list[int]:
    """The nodes of a network, each near its neighbours; part after part.

    >>> line = ((0, 3, np.zeros((1, 1))), (1, 3, np.zeros((1, 1))))
    >>> breadth_first(CostNetwork((np.zeros(1),) * 4, line))
    [0, 3, 1, 2]
    """
    around: list[set[int]] = [set() for _ in network.unary]
    for i, j, _ in network.edges:
        around[i].add(j)
        around[j].add(i)
    seen, order = [False] * len(around), list[int]()
    for root in range(len(around)):
        reached = [] if seen[root] else [root]
        seen[root] = True
        for node in reached:  # grows while it is read
            for other in sorted(around[node]):
                if not seen[other]:
                    seen[other] = True
                    reached.append(other)
        order.extend(reached)
    return order


def reordered(network: CostNetwork, order: Sequence[int]) -> CostNetwork:
    """The same network, whose node `i` is node `order[i]` of the given one."""
    place = {node: i for i, node in enumerate(order)}
    turned: dict[int, Table] = {}
    edges = []
    for i, j, table in network.edges:
        if place[i] < place[j]:
            edges.append((place[i], place[j], table))
        else:
            if id(table) not in turned:
                turned[id(table)] = np.ascontiguousarray(table.T)
            edges.append((place[j], place[i], turned[id(table)]))
    return CostNetwork(tuple(network.unary[node] for node in order), tuple(edges))


def patient_bound(
    network: CostNetwork,
    ceiling: float,
    cost: Callable[[], float],
    near: float,
    effort: Effort,
    offer: Callable[[Indices], object],
) -> float:
    """A bound by many sweeps from node to neighbour.

    Arguments:
      ceiling: of infinite entries, as `Dual` has it.
      cost: the least that is known now.
      near: a gap to end with.
      effort: for all of it.
      offer: is told of assignments on the way.
    """
    order = breadth_first(network)
    near_first = reordered(network, order)
    dual, bound = Dual(flat_network(near_first), ceiling, effort.count), -math.inf
    cells = sum(table.size for _, _, table in network.edges) + 1
    place = np.argsort(np.array(order, dtype=np.int64))
    for _ in range(min(ROUNDS, 1 + int(SWEPT_CELLS / (2 * ROUND * cells)))):
        for _ in range(ROUND):
            dual.sweep(forward=True)
            dual.sweep(forward=False)
        before, bound = bound, max(bound, dual.bound())
        offer(dual.decode(forward=True)[place])
        gap = cost() - bound
        if gap <= near or bound - before < CLOSED * gap or effort.is_spent:
            break
    return bound
