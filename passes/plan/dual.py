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


class Dual:
    """A network without parallel edges or self loops, with its costs moved about to raise the bound.

    `ceiling` stands in for infinite entries: it is added to the least entry of their table. Any value gives
    true bounds; one above what an optimum can lose on an edge makes them as good as infinity would.
    """

    def __init__(self, network: CostNetwork, ceiling: float) -> None:
        self.theta = [_finite(theta, ceiling).copy() for theta in network.unary]
        tables: dict[int, Table] = {}
        flipped: dict[int, Table] = {}
        for _, _, table in network.edges:
            if id(table) not in tables:
                tables[id(table)] = _finite(table, ceiling)
                flipped[id(table)] = np.ascontiguousarray(tables[id(table)].T)
        self.edges = [(i, j, tables[id(t)]) if i < j else (j, i, flipped[id(t)]) for i, j, t in network.edges]
        self._forbidden = [_forbidden(table if i < j else table.T) for i, j, table in network.edges]
        transposed = [flipped[id(t)] if i < j else tables[id(t)] for i, j, t in network.edges]
        earlier: list[list[int]] = [[] for _ in self.theta]
        later: list[list[int]] = [[] for _ in self.theta]
        for edge, (i, j, _) in enumerate(self.edges):
            later[i].append(edge)
            earlier[j].append(edge)
        self._at_low: list[Table] = [np.empty(0)] * len(self.edges)
        self._at_high: list[Table] = [np.empty(0)] * len(self.edges)
        put_later = [np.zeros((len(mine), theta.size)) for mine, theta in zip(later, self.theta, strict=True)]
        put_earlier = [np.zeros((len(mine), theta.size)) for mine, theta in zip(earlier, self.theta, strict=True)]
        for node, (mine_later, mine_earlier) in enumerate(zip(later, earlier, strict=True)):
            for row, edge in enumerate(mine_later):
                self._at_low[edge] = put_later[node][row]
            for row, edge in enumerate(mine_earlier):
                self._at_high[edge] = put_earlier[node][row]
        room: dict[tuple[int, ...], Table] = {}
        forward, backward = [], []
        for node, theta in enumerate(self.theta):
            least_e, least_l = np.empty_like(put_earlier[node]), np.empty_like(put_later[node])
            share = 1.0 / max(len(earlier[node]), len(later[node]), 1)
            from_earlier = tuple(
                _Incoming(self.edges[e][0], table, self._at_low[e][:, None], _room(room, table), least_e[row])
                for row, e in enumerate(earlier[node])
                for table in (self.edges[e][2],)
            )
            from_later = tuple(
                _Incoming(self.edges[e][1], table, self._at_high[e][:, None], _room(room, table), least_l[row])
                for row, e in enumerate(later[node])
                for table in (transposed[e],)
            )
            ahead, back = put_later[node], put_earlier[node]
            forward.append(_Visit(node, theta, from_earlier, least_e, back, ahead, share, 1 - share * len(ahead)))
            backward.append(_Visit(node, theta, from_later, least_l, ahead, back, share, 1 - share * len(back)))
        self._forward, self._backward = tuple(forward), tuple(backward[::-1])

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
                    minimum(edge.scratch, 0, None, edge.least)
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
        edge_minima = [float(self._moved(edge).min()) for edge in range(len(self.edges))]
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
        for edge, (i, j, _) in enumerate(self.edges):
            chosen = np.ix_(kept[i], kept[j])
            table = self._moved(edge)[chosen]
            forbidden = self._forbidden[edge]
            if forbidden is not None:
                table[forbidden[chosen]] = np.inf
            edges.append((i, j, table))
        return CostNetwork(unary, tuple(edges))

    def _moved(self, edge: int) -> Table:
        table: Table = self.edges[edge][2] + self._at_low[edge][:, None] + self._at_high[edge]
        return table


def _finite(table: Table, ceiling: float) -> Table:
    return np.where(np.isinf(table), table.min() + ceiling, table) if table.max() == np.inf else table


def _forbidden(table: Table) -> NDArray[np.bool_] | None:
    return np.isinf(table) if table.max() == np.inf else None


def _room(room: dict[tuple[int, ...], Table], table: Table) -> Table:
    if table.shape not in room:
        room[table.shape] = np.empty_like(table)
    return room[table.shape]
