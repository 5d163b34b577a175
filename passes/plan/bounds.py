"""What bounds say: which states can matter at all, and what no plan can be cheaper than.

On three and four axes an op has hundreds or thousands of strategies, and most of them cost far more than any
good plan can afford: all devices computing the same, say. Sweeps over indexed tables (`IndexedTable`) bound
from below what a plan with each state costs; only states below a level stay, and the solver (solve.py)
searches over those. If what it finds is not above the level, then no state that was left out is in a better
plan, and the answer is as exact as without all this; otherwise the level is raised.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import compress

import numpy as np

from sbp.passes.boxing.paths import Boxings
from sbp.passes.plan import constants
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.cost import Shards, kernel_seconds_of, seconds_of
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.flat_network import ranges
from sbp.passes.plan.folding import FoldedNetwork, fold_if_alike
from sbp.passes.plan.indexed_network import sweep_wide, wide_network
from sbp.passes.plan.model import Boundary, Model
from sbp.passes.plan.network import IndexedNetwork, Indices, Infeasible, Solution
from sbp.passes.plan.solve import Progress, solve
from sbp.passes.program.control import assumed_trips
from sbp.passes.program.graph import Node


class Narrowing:
    """An indexed network, the bound on it, and what a plan with each state costs at least."""

    def __init__(
        self, network: IndexedNetwork, dtype: type = np.float32, effort: Effort | None = None
    ) -> None:
        self.network, self.effort = network, effort or Effort()
        self.wide = wide_network(network, dtype)
        self.theta = np.concatenate([network.unary[node] for node in network.order])
        self.messages = np.zeros(int(self.wide.message[-1]))
        self.at_least = np.full(self.theta.size, -np.inf)
        self.bound = -np.inf
        self.rounding = 8.0 * float(np.finfo(dtype).eps)

    def begin_at(self, folded: FoldedNetwork[IndexedNetwork], reached: "Narrowing") -> None:
        """Begins where the network with equal parts as one has come to: the bound there is the same.

        Arguments:
          reached: of that one. What its edges were sent each edge here has an even share of.
        """
        own, wide = folded.edges >= 0, self.wide
        edges = folded.edges[own]
        at, counts = reached.wide.ends[edges].reshape(-1), np.bincount(edges)[edges]
        ends = [n for i, j, _ in compress(self.network.edges, own) for n in (i, j)]
        sizes = np.array([self.network.unary[n].size for n in ends], dtype=np.int64)
        sent = reached.messages[ranges(at, sizes)] / np.repeat(np.repeat(counts, 2), sizes)
        self.messages[ranges(wide.ends[own].reshape(-1), sizes)] = sent
        nodes = np.repeat(wide.offsets[:-1], np.diff(wide.first))
        states = ranges(nodes, np.diff(wide.message))
        self.theta -= np.bincount(states, self.messages, minlength=self.theta.size)

    def sweep(self) -> None:
        """There and back, once."""
        self.effort.count.add(constants.INDEXED_CELL_SECONDS * self.wide.cells)
        for forward in (True, False):
            excess = np.zeros(self.theta.size)
            bound, noise = sweep_wide(self.wide, self.theta, self.messages, excess, forward, self.rounding)
            if self.bound > -np.inf:
                np.maximum(self.at_least, self.bound + excess - noise, out=self.at_least)
            self.bound = bound - noise

    def converge(self) -> None:
        """Sweeps until they hardly raise the bound, and lets go of the tables, a gigabyte on four axes."""
        before = -math.inf
        while self.bound == -math.inf or not (
            self.bound - before <= constants.PROGRESS * abs(self.bound) or self.effort.is_spent
        ):
            before = self.bound
            self.sweep()
        self.wide = self.wide._replace(pool=self.wide.pool[:0].copy())

    def level(self, cells: float, cost: float) -> float:
        """The highest of some levels above the bound below which the tables have at most so many cells.

        Arguments:
          cost: of what is known; no level is higher.
        """
        levels = [self.bound + part * abs(self.bound) for part in constants.LEVELS]
        above = cost + constants.NOISE * abs(cost)
        for level in [above, *(x for x in levels if x < above)] if math.isfinite(cost) else levels:
            if self.network.kept_cells(self.states_below(level)) <= cells:
                break
        return level

    def states_below(self, level: float) -> list[Indices]:
        """Per node of the network, the states with which a plan may cost less than the level."""
        per_node = np.split(self.at_least, self.wide.offsets[1:-1])
        found: list[Indices] = [np.zeros(0, dtype=np.int64)] * len(per_node)
        for node, bounds in zip(self.network.order.tolist(), per_node, strict=True):
            found[node] = np.flatnonzero(bounds < level)
        return found


def solve_indexed(
    network: IndexedNetwork, *, effort: Effort | None = None, progress: Progress | None = None
) -> Solution:
    """Cheapest assignment of an indexed network, with a bound as good as that of `solve`.

    Raises:
      Infeasible: when every assignment contains an infinite cost.
    """
    if network.cells <= constants.DENSE_CELLS:
        return solve(network.dense(), effort=effort, progress=progress)
    effort = effort or Effort()
    folded = fold_if_alike(network)
    narrowing = narrowed = _narrowing(folded.network, effort)
    narrowed.converge()
    known: tuple[int, ...] | None = None
    if folded.network is not network:
        with suppress(Infeasible):  # equal parts may have to choose otherwise
            known = folded.expand(_search(folded.network, narrowed, constants.DENSE_CELLS).states)
        narrowing = _narrowing(network, effort)
        narrowing.begin_at(folded, narrowed)
        narrowing.converge()
    return _search(network, narrowing, constants.WRITTEN_CELLS, progress, known)


def _narrowing(network: IndexedNetwork, effort: Effort) -> Narrowing:
    """The bounds of a network, not swept."""
    dtype = np.float64 if network.cells <= constants.WRITTEN_CELLS else np.float32
    return Narrowing(network, dtype, effort)


def _search(
    network: IndexedNetwork,
    narrowing: Narrowing,
    cells: float,
    progress: Progress | None = None,
    known: tuple[int, ...] | None = None,
) -> Solution:
    """The best over the states below a level, which is raised to what that costs if that is above it.

    Arguments:
      cells: that there may be below the first level.
      known: an assignment; where too many states may be better it is the answer.
    """
    cost = math.inf if known is None else network.cost(known)
    level = narrowing.level(cells, cost)
    while True:
        kept = narrowing.states_below(level)
        if known is not None and network.kept_cells(kept) > constants.RESULT_CELLS:
            return Solution(known, cost, min(narrowing.bound, cost))
        try:
            if not all(keep.size for keep in kept):
                raise Infeasible  # nothing is below the level
            found = solve(network.dense(kept), effort=narrowing.effort, progress=progress)
        except Infeasible:
            if all(keep.size == theta.size for keep, theta in zip(kept, network.unary, strict=True)):
                raise
            above = level - narrowing.bound
            level = level + constants.LEVEL_GROWTH * above if above > 0.0 else math.inf
            continue
        states = tuple(int(keep[s]) for keep, s in zip(kept, found.states, strict=True))
        if known is None or found.cost < cost:
            known, cost = states, found.cost
        # What is left out costs at least the level.
        answer = Solution(known, cost, min(found.bound, level, cost))
        if answer.gap == 0.0 or found.bound < level or narrowing.effort.is_spent:
            return answer
        if network.kept_cells(narrowing.states_below(cost)) > constants.RESULT_CELLS:
            return answer
        level = cost


def relaxed_bound(
    candidates: Candidates, boundary: Boundary, boxings: Boxings, effort: Effort | None
) -> float:
    """What no plan can be cheaper than, whatever versions of a value others are made from; not tight."""
    model = Model(candidates, boundary, boxings, relaxed=True)
    network = model.build_indexed()
    ends = {x for x in (*model.inputs, *model.outputs) if x is not None}
    return solve_indexed(network, effort=effort).bound - sum(float(model.unary[x].max()) for x in ends)


def least_seconds(candidates: Candidates, boxings: Boxings) -> float:
    """What the ops of a program take at least, however values are boxed: no plan takes less."""
    return _least(candidates, boxings, seconds_of)


def least_kernel_seconds(candidates: Candidates, boxings: Boxings) -> float:
    """What its kernels take at least: no step is shorter, whatever runs beside them."""
    return _least(candidates, boxings, kernel_seconds_of)


def _least(candidates: Candidates, boxings: Boxings, seconds: Callable[..., list[float]]) -> float:
    """The least time of each op, summed."""
    found, known, shards = 0.0, dict[object, float](), Shards()

    def add(nodes: Sequence[Node], times: int) -> None:
        nonlocal found
        for node in nodes:
            for body in node.bodies:
                add(body.nodes, times * assumed_trips(node))
            if node.bodies:
                continue
            strategies, traffic = candidates.strategies[node.id], candidates.traffic.get(node.id)
            key = id(strategies), traffic
            if key not in known:
                known[key] = min(
                    seconds(candidates.graph, node, strategies, boxings.network, traffic, shards)
                )
            found += times * known[key]

    add(candidates.graph.nodes, 1)
    return found
