"""Exact elimination of variables (bucket elimination, Dechter 1999), each distinct bucket worked out once."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sbp.passes.plan.network import CostNetwork, Infeasible, Table
from sbp.passes.plan.tables import TableStore

_BROADCAST_CELLS = 1 << 16
"""Buckets up to this size are summed in one go; larger ones state by state, which needs less memory."""

_Factor = tuple[int, tuple[int, ...]]
"""Number of a table in the store, and the nodes its axes stand for."""


@dataclass(frozen=True, slots=True)
class EliminationOrder:
    """Nodes in the order to eliminate them; the largest and the summed sizes of the buckets, in cells."""

    nodes: tuple[int, ...]
    largest_cells: int
    total_cells: int


def elimination_order(
    sizes: Sequence[int], pairs: Iterable[tuple[int, int]], max_cells: float, max_total_cells: float
) -> EliminationOrder | None:
    """Greedy order by least bucket, then least degree; None when a bucket or their sum would be too large.

    `sizes` are the numbers of states, `pairs` the edges.
    """
    around: list[set[int]] = [set() for _ in sizes]
    for i, j in pairs:
        if i != j:
            around[i].add(j)
            around[j].add(i)
    cells = [size * math.prod(sizes[other] for other in near) for size, near in zip(sizes, around, strict=True)]
    heap = [(cells[node], len(around[node]), node) for node in range(len(sizes))]
    heapq.heapify(heap)
    order: list[int] = []
    done = [False] * len(sizes)
    largest = total = 0
    while heap:
        size, degree, node = heapq.heappop(heap)
        if done[node] or (size, degree) != (cells[node], len(around[node])):
            continue
        largest, total = max(largest, size), total + size
        if size > max_cells or total > max_total_cells:
            return None
        done[node] = True
        order.append(node)
        near = around[node]
        for other in near:
            mine = around[other]
            for new in near - mine:
                if new != other:
                    mine.add(new)
                    cells[other] *= sizes[new]
            mine.discard(node)
            cells[other] //= sizes[node]
            heapq.heappush(heap, (cells[other], len(mine), other))
    return EliminationOrder(tuple(order), largest, total)


def eliminate(network: CostNetwork, order: Sequence[int]) -> tuple[int, ...]:
    """Cheapest states, by eliminating the nodes in this order; of ties the lowest state at each node.

    Raises Infeasible when no assignment is finite.
    """
    store = TableStore()
    results: dict[tuple[tuple[int, tuple[int, ...]], ...], int] = {}
    position = {node: place for place, node in enumerate(order)}
    touching: list[list[_Factor]] = [[(store.put_shared(theta), (node,))] for node, theta in enumerate(network.unary)]
    for i, j, table in network.edges:
        if i == j:
            touching[i].append((store.put(table.diagonal()), (i,)))
        else:
            first = i if position[i] < position[j] else j
            touching[first].append((store.put_shared(table), (i, j)))
    for node in order:
        factors = touching[node]
        scope = sorted({other for _, axes in factors for other in axes}, key=position.__getitem__)
        place = {other: axis for axis, other in enumerate(scope)}
        key = tuple((number, tuple(place[other] for other in axes)) for number, axes in factors)
        result = results.get(key)
        if result is None:
            sizes = [network.unary[other].size for other in scope]
            parts = [(store.tables[number], axes) for number, axes in key]
            result = results[key] = store.put(np.asarray(_bucket(parts, sizes)))
        if len(scope) > 1:
            touching[scope[1]].append((result, tuple(scope[1:])))
        elif math.isinf(float(store.tables[result])):
            raise Infeasible()
    states = [0] * len(network.unary)
    for node in reversed(order):
        score = np.zeros(network.unary[node].size)
        for number, axes in touching[node]:
            index = tuple(slice(None) if other == node else states[other] for other in axes)
            score = score + store.tables[number][index]
        states[node] = int(score.argmin())
    return tuple(states)


def _bucket(parts: Sequence[tuple[Table, tuple[int, ...]]], sizes: Sequence[int]) -> Table:
    """Sum of the parts over the axes 0, 1, ..., minimised over axis 0."""
    aligned = [_align(table, axes, len(sizes)) for table, axes in sorted(parts, key=lambda part: part[0].size)]
    if math.prod(sizes) <= _BROADCAST_CELLS:
        total = aligned[0]
        for part in aligned[1:]:
            total = total + part
        least: Table = np.broadcast_to(total, sizes).min(axis=0)
        return least
    best = np.full(sizes[1:], np.inf)
    scratch = np.empty_like(best)
    for state in range(sizes[0]):
        row = aligned[0][state if aligned[0].shape[0] > 1 else 0]
        for part in aligned[1:-1]:
            row = row + part[state if part.shape[0] > 1 else 0]
        if len(aligned) > 1:
            np.add(row, aligned[-1][state if aligned[-1].shape[0] > 1 else 0], out=scratch)
            np.minimum(best, scratch, out=best)
        else:
            np.minimum(best, row, out=best)
    return best


def _align(table: Table, axes: tuple[int, ...], rank: int) -> Table:
    """The table with its axes put where they belong among `rank` axes, the others of size 1."""
    by_place = sorted(range(len(axes)), key=axes.__getitem__)
    shape = [1] * rank
    for axis in by_place:
        shape[axes[axis]] = table.shape[axis]
    return table.transpose(by_place).reshape(shape)
