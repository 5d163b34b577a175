"""Exact elimination of variables (bucket elimination, Dechter 1999), each distinct bucket worked out once."""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from sbp.passes.plan import constants
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.network import CostNetwork, Infeasible, Table, parts_of
from sbp.passes.plan.reduce import Reduction
from sbp.passes.plan.tables import TableStore


@dataclass(frozen=True, slots=True)
class _Bucket:
    """All factors of the node to eliminate; an axis is a place in `sizes`, the node itself is place 0."""

    factors: tuple[tuple[int, tuple[int, ...]], ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Elimination:
    """How to eliminate the nodes of a network, and what it takes: the cells of the distinct buckets.

    Factor numbers below `len(tables)` are tables of the network; the others follow, one per distinct bucket.
    """

    nodes: tuple[int, ...]
    scopes: tuple[tuple[int, ...], ...]
    bucket_of: tuple[int, ...]
    buckets: tuple[_Bucket, ...]
    tables: tuple[Table, ...]
    cells: int

    def run(self) -> tuple[int, ...]:
        """Cheapest states; of ties the lowest state at each node, given those of the nodes after it.

        Raises Infeasible when no assignment is finite.
        """
        factors = list(self.tables)
        for bucket in self.buckets:
            factors.append(
                _minimise([(factors[number], axes) for number, axes in bucket.factors], bucket.sizes)
            )
        states = [0] * len(self.nodes)
        for node, scope, number in zip(
            self.nodes[::-1], self.scopes[::-1], self.bucket_of[::-1], strict=True
        ):
            if len(scope) == 1 and math.isinf(float(factors[len(self.tables) + number])):
                raise Infeasible()
            bucket = self.buckets[number]
            score = np.zeros(bucket.sizes[0])
            for factor, axes in bucket.factors:
                index = tuple(slice(None) if axis == 0 else states[scope[axis]] for axis in axes)
                score = score + factors[factor][index]
            states[node] = int(score.argmin())
        return tuple(states)


def eliminate_parts(reduction: Reduction, effort: Effort) -> Reduction:
    """The reduction without the connected parts that have no loads and are small enough to eliminate.

    Raises Infeasible when one of them has no finite assignment.
    """
    kernel = reduction.kernel
    parts = parts_of(kernel)
    place = {node: (p, k) for p, nodes in enumerate(parts) for k, node in enumerate(nodes)}
    edges: list[list[tuple[int, int, Table]]] = [[] for _ in parts]
    for i, j, table in kernel.edges:
        edges[place[i][0]].append((place[i][1], place[j][1], table))
    loaded = {place[x.node][0] for x in reduction.loads if x.node >= 0}
    found: dict[int, int] = {}
    costs = []
    for p, nodes in enumerate(parts):
        if p in loaded or effort.is_spent:
            continue
        part = CostNetwork(tuple(kernel.unary[node] for node in nodes), tuple(edges[p]))
        effort.count.add(constants.PLANNED_EDGE_SECONDS * (len(nodes) + len(edges[p])))
        most = min(constants.ELIMINATED_CELLS, effort.seconds_left / constants.ELIMINATED_CELL_SECONDS)
        elimination = plan_elimination(part, max_cells=most)
        if elimination is not None:
            effort.count.add(constants.ELIMINATED_CELL_SECONDS * elimination.cells)
            states = elimination.run()
            found.update(zip(nodes, states, strict=True))
            costs.append(part.cost(states))
    return reduction.without(found, math.fsum(costs)) if found else reduction


def plan_elimination(network: CostNetwork, *, max_cells: float) -> Elimination | None:
    """An elimination in a greedy order: the node with the smallest bucket first.

    None if its distinct buckets would have more than `max_cells` cells.
    """
    sizes = [theta.size for theta in network.unary]
    pairs = {(min(i, j), max(i, j)) for i, j, _ in network.edges if i != j and 1 not in (sizes[i], sizes[j])}
    order = _order(sizes, pairs, max_cells)
    return None if order is None else _plan(network, order, max_cells)


def _order(sizes: Sequence[int], pairs: Iterable[tuple[int, int]], max_cells: float) -> list[int] | None:
    """Nodes by the sizes of their buckets, and their neighbours, at their turn; None when a bucket gets too
    large."""
    around: list[set[int]] = [set() for _ in sizes]
    for i, j in pairs:
        around[i].add(j)
        around[j].add(i)

    def judge(node: int) -> tuple[float, int]:
        return sizes[node] * math.prod(sizes[other] for other in around[node]), len(around[node])

    now = [judge(node) for node in range(len(sizes))]
    heap = [(now[node], node) for node in range(len(sizes))]
    heapq.heapify(heap)
    order: list[int] = []
    done = [False] * len(sizes)
    while heap:
        seen, node = heapq.heappop(heap)
        if done[node] or seen != now[node]:
            continue
        if seen[0] > max_cells:
            return None
        done[node] = True
        order.append(node)
        near = around[node]
        for other in sorted(near):
            around[other] |= near
            around[other] -= {node, other}
            now[other] = judge(other)
            heapq.heappush(heap, (now[other], other))
    return order


def _plan(network: CostNetwork, order: Sequence[int], max_cells: float) -> Elimination | None:
    """Follow the order with factor numbers in place of tables: equal buckets get equal numbers."""
    store = TableStore()
    position = {node: place for place, node in enumerate(order)}
    touching: list[list[tuple[int, tuple[int, ...]]]] = [
        [(store.put_shared(theta), (node,))] for node, theta in enumerate(network.unary)
    ]
    for i, j, table in network.edges:
        if i == j:
            touching[i].append((store.put(table.diagonal()), (i,)))
        elif 1 in table.shape:  # a node without a choice is no axis: arrays have at most 64
            chooser = i if table.shape[1] == 1 else j
            touching[chooser].append((store.put(table.reshape(-1)), (chooser,)))
        else:
            touching[min(i, j, key=position.__getitem__)].append((store.put_shared(table), (i, j)))
    numbers: dict[_Bucket, int] = {}
    scopes, bucket_of = [], []
    cells = 0
    for node in order:
        scope = tuple(
            sorted({other for _, nodes in touching[node] for other in nodes}, key=position.__getitem__)
        )
        place = {other: axis for axis, other in enumerate(scope)}
        bucket = _Bucket(
            tuple((number, tuple(place[other] for other in nodes)) for number, nodes in touching[node]),
            tuple(network.unary[other].size for other in scope),
        )
        if bucket not in numbers:
            numbers[bucket] = len(numbers)
            cells += math.prod(bucket.sizes)
            if cells > max_cells:
                return None
        scopes.append(scope)
        bucket_of.append(numbers[bucket])
        if len(scope) > 1:
            touching[scope[1]].append((len(store.tables) + numbers[bucket], scope[1:]))
    return Elimination(
        tuple(order),
        tuple(scopes),
        tuple(bucket_of),
        tuple(numbers),
        tuple(store.tables),
        cells,
    )


def _minimise(parts: Sequence[tuple[Table, tuple[int, ...]]], sizes: Sequence[int]) -> Table:
    """Sum of the parts over the axes 0, 1, ..., minimised over axis 0."""
    aligned = sorted((_align(table, axes, len(sizes)) for table, axes in parts), key=lambda part: part.size)
    least: Table = np.full(tuple(sizes[1:]), np.inf)
    total = np.empty_like(least)
    for state in range(sizes[0]):
        *small, last = (part[min(state, part.shape[0] - 1)] for part in aligned)
        np.minimum(least, np.add(reduce(np.add, small, 0.0), last, out=total), out=least)
    return least


def _align(table: Table, axes: tuple[int, ...], rank: int) -> Table:
    """The table with its axes put where they belong among `rank` axes, the others of size 1."""
    by_place = sorted(range(len(axes)), key=axes.__getitem__)
    shape = [1] * rank
    for axis in by_place:
        shape[axes[axis]] = table.shape[axis]
    return table.transpose(by_place).reshape(shape)
