"""The exact solver: reduce, eliminate where that fits, else bound, decode and fix until it fits."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sbp.passes.plan.dual import Dual
from sbp.passes.plan.eliminate import eliminate, elimination_order
from sbp.passes.plan.network import CostNetwork, Infeasible, Solution, Table
from sbp.passes.plan.reduce import reduce_network

_DIRECT_CELLS, _DIRECT_TOTAL_CELLS = 3e6, 3e7
"""Eliminate at once up to these sizes: about a tenth of a second."""
_FINAL_CELLS, _FINAL_TOTAL_CELLS = 2e7, 3e8
"""Eliminate up to these sizes when the bound no longer closes by itself: seconds, and up to 1-2 GB."""
_SWEEPS = 5
"""Pairs of sweeps between two looks at what can be fixed."""
_SHRUNK = 0.7
"""Start afresh on the states left when at most this part of them is left."""
_SLOW = 0.1
"""The bound has stalled when a round of sweeps closes less than this part of the gap."""
_FRACTIONS = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Parts of the open states to try to eliminate over."""
_NOISE = 1e-10
"""Improvements below this part of the cost are not sought."""


@dataclass(frozen=True, slots=True)
class _Effort:
    """When to stop: at a time, and for improvements that are only rounding noise."""

    deadline: float
    noise: float

    def spent(self) -> bool:
        return time.monotonic() >= self.deadline


def solve(network: CostNetwork, *, time_limit_seconds: float | None = None) -> Solution:
    """Cheapest assignment of the network, with a proven lower bound on the cost of any.

    Without a time limit the search ends when the gap is 0.0 or neither cost nor bound improves any more;
    with one, the best assignment so far comes back with the bound so far (cost inf if none was found). The
    same network gives the same answer; of ties the lowest states win where they are chosen.

    Raises Infeasible (a ValueError) when every assignment contains an infinite cost.

    >>> equal = np.array([[0.0, np.inf], [np.inf, 0.0]])
    >>> solve(CostNetwork((np.array([0.0, 1.0]), np.array([3.0, 1.0])), ((0, 1, equal),)))
    Solution(states=(1, 1), cost=2.0, bound=2.0)
    """
    limit = math.inf if time_limit_seconds is None else time_limit_seconds
    start = time.monotonic()
    effort = _Effort(start + limit, 0.0)
    reduction = reduce_network(network, effort.spent)
    scale = abs(reduction.constant) + abs(_least(reduction.kernel))
    answer = _solve_parts(reduction.kernel, None, _Effort(effort.deadline, _NOISE * scale))
    states = reduction.expand(answer.states)
    cost = network.cost(states)
    exact = answer.cost <= answer.bound
    return Solution(states, cost, cost if exact else min(cost, reduction.constant + answer.bound))


def _solve_parts(network: CostNetwork, start: Sequence[int] | None, effort: _Effort) -> Solution:
    """Each connected part by itself."""
    states = [0] * len(network.unary)
    costs, bounds = [0.0], [0.0]
    for nodes in _parts(network):
        place = {node: k for k, node in enumerate(nodes)}
        part = CostNetwork(
            tuple(network.unary[node] for node in nodes),
            tuple((place[i], place[j], table) for i, j, table in network.edges if i in place),
        )
        answer = _solve_part(part, None if start is None else [start[node] for node in nodes], effort)
        for node, state in zip(nodes, answer.states, strict=True):
            states[node] = state
        costs.append(answer.cost)
        bounds.append(answer.bound)
    return Solution(tuple(states), math.fsum(costs), math.fsum(bounds))


def _solve_part(network: CostNetwork, start: Sequence[int] | None, effort: _Effort) -> Solution:
    sizes, pairs = [theta.size for theta in network.unary], [(i, j) for i, j, _ in network.edges]
    order = elimination_order(sizes, pairs, _DIRECT_CELLS, _DIRECT_TOTAL_CELLS)
    if order is not None:
        states = eliminate(network, order.nodes)
        cost = network.cost(states)
        return Solution(states, cost, cost)
    return _Search(network, start, effort).run()


class _Search:
    """Bound from below by sweeps, from above by decoding; delete the states that cannot pay; repeat."""

    def __init__(self, network: CostNetwork, start: Sequence[int] | None, effort: _Effort) -> None:
        self.network = network
        self.effort = effort
        self.neighbours: list[list[tuple[int, Table]]] = [[] for _ in network.unary]
        for i, j, table in network.edges:
            self.neighbours[i].append((j, table.T))
            self.neighbours[j].append((i, table))
        self.lower = -math.inf
        self.states = [int(theta.argmin()) for theta in network.unary] if start is None else list(start)
        self.cost = network.cost(self.states)
        self._offer(self._descend(self.states))

    def run(self) -> Solution:
        dual = Dual(self.network, self._ceiling())
        stalled = False
        while True:
            before = self.lower
            at_least = self._sweep(dual)
            if self._finished():
                break
            kept = self._below(at_least, self.cost - self.effort.noise)
            left = sum(len(keep) for keep in kept) / sum(theta.size for theta in self.network.unary)
            if left <= _SHRUNK or (stalled and left < 1.0):
                self._solve_rest(dual, kept)
                break
            if stalled:
                break
            if self.lower - before <= _SLOW * (self.cost - self.lower):
                stalled = not self._eliminate_over_best(at_least)
                if self._finished():
                    break
        return Solution(tuple(self.states), self.cost, min(self.lower, self.cost))

    def _finished(self) -> bool:
        if self.cost - self.lower <= self.effort.noise:
            self.lower = self.cost
        return self.cost <= self.lower or self.effort.spent()

    def _ceiling(self) -> float:
        """What infinite entries may cost more than the least entry of their table, without loss."""
        if math.isfinite(self.cost):
            return self.cost - _least(self.network) + 1e-6 * (abs(self.cost) + abs(_least(self.network)))
        tables = [*self.network.unary, *(table for _, _, table in self.network.edges)]
        return 1e-9 + sum(float(table[table < np.inf].max() - table.min()) for table in tables)

    def _sweep(self, dual: Dual) -> list[Table]:
        """A round of sweeps. Returns, for each state, a lower bound on the cost of assignments with it."""
        for _ in range(_SWEEPS - 1):
            dual.sweep(forward=True)
            self._offer(dual.decode(forward=False))
            dual.sweep(forward=False)
            self._offer(dual.decode(forward=True))
            if self.effort.spent():
                break
        base = dual.bound()
        excess = [np.zeros(theta.size) for theta in self.network.unary]
        dual.sweep(True, excess)
        self._offer(self._descend(dual.decode(forward=False)))
        dual.sweep(False, excess)
        self._offer(self._descend(dual.decode(forward=True)))
        self.lower = max(self.lower, dual.bound())
        return [base + more for more in excess]

    def _below(self, at_least: list[Table], threshold: float) -> list[NDArray[np.intp]]:
        """For each node its state now, and the states that may be part of an assignment below the threshold."""
        kept = []
        for bounds, state in zip(at_least, self.states, strict=True):
            wanted = bounds < threshold
            wanted[state] = True
            kept.append(np.flatnonzero(wanted))
        return kept

    def _solve_rest(self, dual: Dual, kept: list[NDArray[np.intp]]) -> None:
        """The states not kept cannot improve on the cost: solve what is left, with the costs as moved so far."""
        excluded = self.cost
        rest = dual.moved(kept)
        try:
            reduction = reduce_network(rest, self.effort.spent)
        except Infeasible:
            self.lower = max(self.lower, excluded)
            return
        start = [int(keep.searchsorted(state)) for keep, state in zip(kept, self.states, strict=True)]
        answer = _solve_parts(reduction.kernel, reduction.project(start), self.effort)
        states = reduction.expand(answer.states)
        self._offer([int(keep[state]) for keep, state in zip(kept, states, strict=True)])
        if answer.bound >= answer.cost:
            self.lower = max(self.lower, min(excluded, self.cost))
        else:
            self.lower = max(self.lower, min(excluded, reduction.constant + answer.bound))

    def _eliminate_over_best(self, at_least: list[Table]) -> bool:
        """Solve exactly over as many of the most promising states as fit. Returns whether anything improved.

        The answer is either the optimum or proves that no assignment costs less than the states left out.
        """
        pairs = [(i, j) for i, j, _ in self.network.edges]
        bounds = np.sort(np.concatenate(at_least))
        bounds = bounds[bounds < self.cost]
        for fraction in _FRACTIONS:
            threshold = self.cost if fraction == 1.0 else float(bounds[int(fraction * (len(bounds) - 1))])
            kept = self._below(at_least, threshold)
            order = elimination_order([len(keep) for keep in kept], pairs, _FINAL_CELLS, _FINAL_TOTAL_CELLS)
            if order is None:
                continue
            cost, lower = self.cost, self.lower
            try:
                states = eliminate(_restricted(self.network, kept), order.nodes)
                self._offer([int(keep[state]) for keep, state in zip(kept, states, strict=True)])
            except Infeasible:
                pass
            self.lower = max(self.lower, min(self.cost, threshold))
            return self.cost < cost - self.effort.noise or self.lower > lower + self.effort.noise
        return False

    def _offer(self, states: Sequence[int]) -> None:
        cost = self.network.cost(states)
        if cost < self.cost:
            self.cost, self.states = cost, list(states)

    def _descend(self, states: Sequence[int]) -> list[int]:
        """Change one node at a time for the better, until no change helps."""
        states = list(states)
        waiting = set(range(len(states)))
        order = list(range(len(states)))
        while waiting:
            changed: set[int] = set()
            for node in order:
                if node in waiting:
                    score = self.network.unary[node].copy()
                    for other, table in self.neighbours[node]:
                        score += table[states[other]]
                    best = int(score.argmin())
                    if score[best] < score[states[node]] - self.effort.noise:
                        states[node] = best
                        changed.update(other for other, _ in self.neighbours[node])
            waiting = changed
        return states


def _least(network: CostNetwork) -> float:
    """The sum of all minima: the simplest lower bound."""
    minima = [float(theta.min()) for theta in network.unary]
    minima.extend(float(table.min()) for _, _, table in network.edges)
    return math.fsum(minima)


def _restricted(network: CostNetwork, kept: Sequence[NDArray[np.intp]]) -> CostNetwork:
    """The network on these states; equal choices from the same table share the result."""
    keys = [keep.tobytes() for keep in kept]
    known: dict[tuple[int, bytes, bytes], Table] = {}
    edges = []
    for i, j, table in network.edges:
        key = (id(table), keys[i], keys[j])
        if key not in known:
            known[key] = table[np.ix_(kept[i], kept[j])]
        edges.append((i, j, known[key]))
    return CostNetwork(tuple(theta[keep] for theta, keep in zip(network.unary, kept, strict=True)), tuple(edges))


def _parts(network: CostNetwork) -> list[list[int]]:
    """Connected parts, each in ascending order."""
    around: list[list[int]] = [[] for _ in network.unary]
    for i, j, _ in network.edges:
        around[i].append(j)
        around[j].append(i)
    seen = [False] * len(around)
    parts = []
    for root in range(len(around)):
        if not seen[root]:
            seen[root] = True
            part = [root]
            for node in part:  # grows while it is read
                for other in around[node]:
                    if not seen[other]:
                        seen[other] = True
                        part.append(other)
            parts.append(sorted(part))
    return parts
