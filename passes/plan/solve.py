"""The exact solver: reduce, eliminate where that fits, else bound, decode and fix until it fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sbp.passes.plan import constants, sweeps
from sbp.passes.plan.dual import Dual
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.eliminate import Elimination, plan_elimination
from sbp.passes.plan.flat import Indices, flat_network
from sbp.passes.plan.network import CostNetwork, Infeasible, Solution, Table
from sbp.passes.plan.parts import ceiling_of, least_of, parts_of, restricted
from sbp.passes.plan.reduce import reduce_network

Progress = Callable[[float, float], None]
"""Is told, now and then: the least cost found so far, and the bound so far."""


@dataclass(frozen=True, slots=True)
class _Watch:
    """Whom to tell of progress, and what its cost and bound leave out."""

    tell: Progress
    cost: float
    lower: float


@dataclass(frozen=True, slots=True)
class _Manner:
    """How to search: when to stop, which improvements are only rounding noise, whether the bound is asked
    for, whom to tell."""

    effort: Effort
    noise: float
    proves: bool = True
    watch: _Watch | None = None

    def report(self, cost: float, lower: float) -> None:
        if self.watch is not None:
            self.watch.tell(cost + self.watch.cost, lower + self.watch.lower)

    def beside(self, cost: float, lower: float) -> _Manner:
        """For a part of a network of which the rest has this cost and this bound."""
        if self.watch is None:
            return self
        watch = replace(self.watch, cost=self.watch.cost + cost, lower=self.watch.lower + lower)
        return replace(self, watch=watch)

    def untold(self) -> _Manner:
        """The same, and nobody is told: for a search inside a search."""
        return replace(self, watch=None)

    def plan(self, network: CostNetwork, max_cells: float) -> Elimination | None:
        """An elimination of this size that fits into the effort left; it counts as run."""
        if self.effort.is_spent:
            return None
        self.effort.count.add(constants.PLANNED_EDGE_SECONDS * (len(network.unary) + len(network.edges)))
        most = min(max_cells, self.effort.left / constants.ELIMINATED_CELL_SECONDS)
        most = most if self.proves else min(most, constants.LOOK_CELLS)
        found = plan_elimination(network, max_cells=most, max_result_cells=constants.RESULT_CELLS)
        if found is not None:
            self.effort.count.add(constants.ELIMINATED_CELL_SECONDS * found.cells)
        return found


def solve(
    network: CostNetwork,
    *,
    effort: Effort | None = None,
    progress: Progress | None = None,
    proves: bool = True,
) -> Solution:
    """Cheapest assignment of the network, with a proven lower bound on the cost of any.

    The search ends when the gap is 0.0 or neither cost nor bound improves any more; where its effort is spent
    before, the best assignment so far comes back with the bound so far (cost inf if none was found). The
    same network gives the same answer; of ties the lowest states win where they are chosen. In what is told
    to `progress`, unconnected parts of the network that are not looked at yet count with their least. What
    only raises the bound is left out unless it `proves`.

    Raises Infeasible (a ValueError) when every assignment contains an infinite cost.

    >>> equal = np.array([[0.0, np.inf], [np.inf, 0.0]])
    >>> solve(CostNetwork((np.array([0.0, 1.0]), np.array([3.0, 1.0])), ((0, 1, equal),)))
    Solution(states=(1, 1), cost=2.0, bound=2.0)
    """
    effort = effort or Effort()
    reduction = reduce_network(network, effort)
    scale = abs(reduction.constant) + abs(least_of(reduction.kernel))
    watch = progress and _Watch(progress, reduction.constant, reduction.constant)
    answer = _solve_parts(reduction.kernel, None, _Manner(effort, constants.NOISE * scale, proves, watch))
    states = reduction.expand(answer.states)
    cost = network.cost(states)
    exact = answer.cost <= answer.bound
    return Solution(states, cost, cost if exact else min(cost, reduction.constant + answer.bound))


def _solve_parts(network: CostNetwork, start: Sequence[int] | None, manner: _Manner) -> Solution:
    """Each connected part by itself; all at once where no effort is left for more than a descent."""
    if manner.effort.is_spent and network.unary:
        return _Search(network, start, manner).run()
    states = [0] * len(network.unary)
    costs, bounds = [0.0], [0.0]
    cost = bound = least_of(network)
    parts = parts_of(network)
    place = {node: (p, k) for p, nodes in enumerate(parts) for k, node in enumerate(nodes)}
    edges: list[list[tuple[int, int, Table]]] = [[] for _ in parts]
    for i, j, table in network.edges:
        edges[place[i][0]].append((place[i][1], place[j][1], table))
    for nodes, own in zip(parts, edges, strict=True):
        part = CostNetwork(tuple(network.unary[node] for node in nodes), tuple(own))
        cost, bound = cost - least_of(part), bound - least_of(part)
        given = None if start is None else [start[node] for node in nodes]
        answer = _solve_part(part, given, manner.beside(cost, bound))
        cost, bound = cost + answer.cost, bound + answer.bound
        for node, state in zip(nodes, answer.states, strict=True):
            states[node] = state
        costs.append(answer.cost)
        bounds.append(answer.bound)
    return Solution(tuple(states), math.fsum(costs), math.fsum(bounds))


def _solve_part(network: CostNetwork, start: Sequence[int] | None, manner: _Manner) -> Solution:
    elimination = manner.plan(network, constants.DIRECT_CELLS)
    if elimination is not None:
        states = elimination.run()
        cost = network.cost(states)
        return Solution(states, cost, cost)
    return _Search(network, start, manner).run()


class _Search:
    """Bound from below by sweeps, from above by decoding; delete the states that cannot pay; repeat."""

    def __init__(self, network: CostNetwork, start: Sequence[int] | None, manner: _Manner) -> None:
        self.network = network
        self.manner = manner
        self.flat = flat_network(network)
        self.lower = -math.inf
        self.states = [int(theta.argmin()) for theta in network.unary] if start is None else list(start)
        self.cost = network.cost(self.states)
        self._offer(self._descend(self.states))

    def run(self) -> Solution:
        dual = Dual(self.flat, self._ceiling(), self.manner.effort.count)
        stalled = False
        while True:
            before = self.lower
            at_least = self._sweep(dual)
            self.manner.report(self.cost, self.lower)
            if self._finished():
                break
            kept = self._below(at_least, self.cost - self.manner.noise)
            left = sum(len(keep) for keep in kept) / sum(theta.size for theta in self.network.unary)
            if 1.0 - left >= (constants.SHRUNK_STALLED if stalled else constants.SHRUNK):
                self._solve_rest(dual, kept)
                break
            closed = self.lower - before
            if stalled:
                if closed < constants.CLOSED * (self.cost - self.lower):
                    break
            elif closed <= constants.SLOW * (self.cost - self.lower):
                stalled = not self._eliminate_over_best(at_least)
                if self._finished() or (stalled and not self.manner.proves):
                    break
        return Solution(tuple(self.states), self.cost, min(self.lower, self.cost))

    def _finished(self) -> bool:
        if self.cost - self.lower <= self.manner.noise:
            self.lower = self.cost
        return self.cost <= self.lower or self.manner.effort.is_spent

    def _ceiling(self) -> float:
        """What infinite entries may cost more than the least entry of their table, without loss."""
        if math.isfinite(self.cost):
            return self.cost - least_of(self.network) + 1e-6 * (abs(self.cost) + abs(least_of(self.network)))
        return ceiling_of(self.network)

    def _sweep(self, dual: Dual) -> list[Table]:
        """A round of sweeps. Returns, for each state, a lower bound on the cost of assignments with it."""
        for _ in range(constants.ROUND_SWEEPS - 1):
            dual.sweep(forward=True)
            self._offer(dual.decode(forward=False))
            bound = dual.sweep(forward=False)
            self._offer(dual.decode(forward=True))
            if self.cost - bound <= self.manner.noise or self.manner.effort.is_spent:
                break
        base = dual.bound()
        excess = np.zeros(self.flat.theta.size)
        dual.sweep(True, excess)
        self._offer(self._descend(dual.decode(forward=False)))
        dual.sweep(False, excess)
        self._offer(self._descend(dual.decode(forward=True)))
        self.lower = max(self.lower, dual.bound())
        return self.flat.split(base + excess)

    def _below(self, at_least: list[Table], threshold: float) -> list[NDArray[np.intp]]:
        """For each node its state now, and all states that may occur in an assignment below the threshold."""
        kept = []
        for bounds, state in zip(at_least, self.states, strict=True):
            wanted = bounds < threshold
            wanted[state] = True
            kept.append(np.flatnonzero(wanted))
        return kept

    def _solve_rest(self, dual: Dual, kept: list[NDArray[np.intp]]) -> None:
        """Solve for the states kept, with the costs as moved so far: no other can improve on the cost."""
        excluded = self.cost
        rest = dual.moved(kept)
        try:
            reduction = reduce_network(rest, self.manner.effort)
        except Infeasible:
            self.lower = max(self.lower, excluded)
            return
        start = [int(keep.searchsorted(state)) for keep, state in zip(kept, self.states, strict=True)]
        answer = _solve_parts(reduction.kernel, reduction.project(start), self.manner.untold())
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
        bounds = np.sort(np.concatenate(at_least))
        bounds = bounds[bounds < self.cost]
        for fraction in (math.inf, *constants.FRACTIONS):
            whole = fraction >= 1.0
            threshold = (
                self.cost if whole or not bounds.size else float(bounds[int(fraction * (bounds.size - 1))])
            )
            # Fewer states can cost more: where layers keep different ones their tables are no longer equal.
            kept = self._below(at_least, math.inf if fraction == math.inf else threshold)
            cells = constants.FINAL_CELLS if whole else constants.PARTIAL_CELLS
            elimination = self.manner.plan(restricted(self.network, kept), cells)
            if elimination is None:
                continue
            gap = self.cost - self.lower
            with suppress(Infeasible):
                states = elimination.run()
                self._offer([int(keep[state]) for keep, state in zip(kept, states, strict=True)])
            self.lower = max(self.lower, min(self.cost, threshold))
            return self.cost - self.lower < (1.0 - constants.CLOSED) * gap
        return False

    def _offer(self, states: Sequence[int] | Indices) -> None:
        """Takes the states if they cost less; the exact sum, which takes longer, only where it may matter."""
        found = np.asarray(states, dtype=np.int64)
        if sweeps.total_cost(self.flat, found) < self.cost + self.manner.noise:
            listed = found.tolist()
            cost = self.network.cost(listed)
            if cost < self.cost:
                self.cost, self.states = cost, listed

    def _descend(self, states: Sequence[int] | Indices) -> Indices:
        """Change one node at a time for the better, until no change helps."""
        found = np.array(states, dtype=np.int64)
        sweeps.descend(self.flat, found, self.manner.noise)
        return found
