"""TRW-S (Kolmogorov 2006) in its SRMP form (Kolmogorov 2015): lower bounds by moving costs along edges.

A sweep visits the nodes in order. A node collects, from the edges to earlier nodes, the least cost each of
its states has there; then it spreads its costs evenly over the edges to later nodes. The network's value
never changes, so the sum of all node and edge minima is a lower bound, and no sweep lowers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sbp.passes.plan.network import CostNetwork, Table


@dataclass(frozen=True, slots=True)
class _Incoming:
    """An edge from an earlier node: its table, what the earlier node put on it, and room to work in."""

    source: int
    table: Table
    put: Table
    scratch: Table
    least: Table


@dataclass(frozen=True, slots=True)
class _Visit:
    """What a sweep does at one node. Rows of `put_back` and `put_ahead`: what the node put on its edges."""

    node: int
    theta: Table
    incoming: tuple[_Incoming, ...]
    least: Table
    put_back: Table
    put_ahead: Table
    spread: float
    rest: float


@dataclass(frozen=True, slots=True)
class _Edge:
    """An edge between nodes low < high: finite costs with the states of `low`, or of `high`, as rows."""

    low: int
    high: int
    rows: Table
    columns: Table
    forbidden: NDArray[np.bool_] | None


class Dual:
    """A network without parallel edges or self loops, with its costs moved about to raise the bound.

    `ceiling` stands in for infinite entries: it is added to the least entry of their table. Any value gives
    true bounds; one above what an optimum can lose on an edge makes them as good as infinity would.
    """

    def __init__(self, network: CostNetwork, ceiling: float) -> None:
        self.theta = [_finite(theta, ceiling).copy() for theta in network.unary]
        finite: dict[int, tuple[Table, Table]] = {}  # each distinct table and its transpose
        for _, _, table in network.edges:
            if id(table) not in finite:
                filled = _finite(table, ceiling)
                finite[id(table)] = filled, np.ascontiguousarray(filled.T)
        self._edges: list[_Edge] = []
        ends: tuple[list[list[int]], list[list[int]]] = [[] for _ in self.theta], [[] for _ in self.theta]
        for edge, (i, j, table) in enumerate(network.edges):
            low, high = min(i, j), max(i, j)
            rows, columns = finite[id(table)] if i == low else finite[id(table)][::-1]
            forbidden = np.isinf(table if i == low else table.T) if table.max() == np.inf else None
            self._edges.append(_Edge(low, high, rows, columns, forbidden))
            ends[0][low].append(edge)
            ends[1][high].append(edge)
        # What a node has put on its edges to later (0) and earlier (1) nodes: a row for each edge.
        self._put = tuple(
            [np.zeros((len(mine), theta.size)) for mine, theta in zip(side, self.theta, strict=True)]
            for side in ends
        )
        self._put_on = tuple(
            {edge: put[row] for mine, put in zip(side, puts, strict=True) for row, edge in enumerate(mine)}
            for side, puts in zip(ends, self._put, strict=True)
        )
        self._forward = self._visits(ends[1], later=0)
        self._backward = self._visits(ends[0], later=1)[::-1]

    def _visits(self, incoming: list[list[int]], later: int) -> tuple[_Visit, ...]:
        """The visits of a sweep; `later` is the side (0 or 1) of the edges that lead on."""
        scratch: dict[tuple[int, ...], Table] = {}
        visits = []
        for node, (theta, back, ahead) in enumerate(
            zip(self.theta, self._put[1 - later], self._put[later], strict=True)
        ):
            least = np.empty_like(back)
            arriving = []
            for row, number in enumerate(incoming[node]):
                edge = self._edges[number]
                source, table = (edge.low, edge.rows) if later == 0 else (edge.high, edge.columns)
                room = scratch.setdefault(table.shape, np.empty_like(table))
                arriving.append(
                    _Incoming(source, table, self._put_on[later][number][:, None], room, least[row])
                )
            share = 1.0 / max(len(back), len(ahead), 1)
            rest = 1.0 - share * len(ahead)
            visits.append(_Visit(node, theta, tuple(arriving), least, back, ahead, share, rest))
        return tuple(visits)

    def sweep(self, forward: bool, excess: list[Table] | None = None) -> float:
        """One sweep; returns the bound after it (up to rounding).

        Given `excess`, one array per node, raises it to what each state at least adds to the bound before
        the sweep.
        """
        add, minimum, total = np.add, np.minimum.reduce, np.add.reduce
        bound = 0.0
        for visit in self._forward if forward else self._backward:
            theta, put_back, put_ahead = visit.theta, visit.put_back, visit.put_ahead
            if visit.incoming:
                for edge in visit.incoming:
                    add(edge.table, edge.put, edge.scratch)
                    minimum(edge.scratch, axis=0, out=edge.least)
                put_back += visit.least
                theta += total(put_back, 0)
                np.negative(visit.least, put_back)
            if excess is not None:
                np.maximum(excess[visit.node], theta - theta.min(), out=excess[visit.node])
            if len(put_ahead):
                put_ahead += visit.spread * theta
                theta *= visit.rest
            bound += float(theta.min())
        return bound

    def bound(self) -> float:
        """A lower bound, safe from rounding: the sum of all minima, less what rounding may have added."""
        node_minima = [float(theta.min()) for theta in self.theta]
        edge_minima = [float(self._moved(edge).min()) for edge in range(len(self._edges))]
        size = sum(map(abs, node_minima)) + sum(map(abs, edge_minima))
        return float(sum(node_minima) + sum(edge_minima) - 1e-12 * size)

    def decode(self, forward: bool) -> list[int]:
        """States chosen one node after the other, given the earlier choices; after a sweep the other way."""
        states = [0] * len(self.theta)
        for visit in self._forward if forward else self._backward:
            score = visit.theta + np.add.reduce(visit.put_back, 0)
            for edge in visit.incoming:
                score += edge.table[states[edge.source]]
            states[visit.node] = int(score.argmin())
        return states

    def moved(self, kept: Sequence[NDArray[np.intp]]) -> CostNetwork:
        """The network with its costs as they are now, on these states."""
        unary = tuple(theta[keep] for theta, keep in zip(self.theta, kept, strict=True))
        edges = []
        for number, edge in enumerate(self._edges):
            chosen = np.ix_(kept[edge.low], kept[edge.high])
            table = self._moved(number)[chosen]
            if edge.forbidden is not None:
                table[edge.forbidden[chosen]] = np.inf
            edges.append((edge.low, edge.high, table))
        return CostNetwork(unary, tuple(edges))

    def _moved(self, number: int) -> Table:
        low, high = (put[number] for put in self._put_on)
        table: Table = self._edges[number].rows + low[:, None] + high
        return table


def _finite(table: Table, ceiling: float) -> Table:
    return np.where(np.isinf(table), table.min() + ceiling, table) if table.max() == np.inf else table
