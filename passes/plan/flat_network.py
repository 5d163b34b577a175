"""A cost network in a few flat arrays: what the compiled kernels walk over.

Every edge is entered twice, once at each of its ends. An entry's table has the states of the *other* node as
rows and those of the node itself as columns, so that the costs of a node's states, given a neighbour's state,
lie next to each other in memory. Equal tables (the same object) are there once, with their transpose.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbp.passes.plan.network import CostNetwork, Indices, Table


class FlatNetwork(NamedTuple):
    """A network of n nodes without self loops; its m edges have 2 m entries.

    Arguments:
      offsets: `[n + 1]`, where the states of a node begin in `theta`.
      theta: `[all states]`, the costs of nodes.
      first: `[n + 1]`, the first entry of a node; entries of a node are sorted by the other node.
      turn: `[n]`, a node's first entry whose other node comes later.
      other: `[2 m]`, the node at the other end.
      twin: `[2 m]`, the entry of the same edge at the other end.
      table: `[2 m]`, where the table of an entry begins in `pool`.
      message: `[2 m + 1]`, where a node's costs per state for an entry begin in arrays of messages.
      pool: `[cells]`, the tables, row by row.
    """

    offsets: Indices
    theta: Table
    first: Indices
    turn: Indices
    other: Indices
    twin: Indices
    table: Indices
    message: Indices
    pool: Table

    @property
    def sizes(self) -> Indices:
        """States of each node."""
        return np.diff(self.offsets)

    @property
    def cells(self) -> int:
        """Cells of the tables that a sweep goes through."""
        sizes = self.sizes
        return int((np.repeat(sizes, np.diff(self.first)) * sizes[self.other]).sum())

    def split(self, values: Table) -> list[Table]:
        """Views of an array over all states, one per node."""
        return np.split(values, self.offsets[1:-1])[: self.turn.size]


def flat_network(network: CostNetwork, ceiling: float = math.inf) -> FlatNetwork:
    """The same network, flat. Parallel edges stay apart; there must be no self loops.

    Arguments:
      ceiling: how far infinite costs are above the least of their node or table.

    >>> flat_network(CostNetwork((np.zeros(2), np.ones(3)), ((0, 1, np.zeros((2, 3))),))).offsets
    array([0, 2, 5])
    """
    sizes = np.array([theta.size for theta in network.unary], dtype=np.int64)
    tables = {id(table): table for _, _, table in network.edges}
    pool = np.empty(2 * sum(table.size for table in tables.values()))
    begin, end = dict[int, int](), 0
    for k, table in tables.items():
        begin[k], middle, end = end, end + table.size, end + 2 * table.size
        rows = pool[begin[k] : middle].reshape(table.shape)
        rows[:] = _filled(table, ceiling)
        pool[middle:end].reshape(rows.T.shape)[:] = rows.T
    begins = np.array([begin[id(table)] for _, _, table in network.edges], dtype=np.int64)
    turned = begins + np.array([table.size for _, _, table in network.edges], dtype=np.int64)
    entries = entries_of(network.edges, sizes.size)
    return FlatNetwork(
        starts_of(sizes),
        np.concatenate([_filled(theta, ceiling) for theta in network.unary] or [np.zeros(0)]),
        entries.first,
        entries.turn,
        entries.other,
        entries.twin,
        # An edge (i, j) with rows i: at j the table as it is, at i its transpose.
        np.concatenate([turned, begins])[entries.order],
        starts_of(sizes[entries.node]),
        pool,
    )


class Entries(NamedTuple):
    """Edges, each entered at both of its ends, by their nodes.

    Arguments:
      order: `[2 m]`, the place of an entry among the edges as they are and then turned round.
      node: `[2 m]`, at which each is.
      first, turn, other, twin: as of `FlatNetwork`.
    """

    order: Indices
    node: Indices
    first: Indices
    turn: Indices
    other: Indices
    twin: Indices


def entries_of(edges: Sequence[tuple[int, int, object]], nodes: int) -> Entries:
    """The entries of edges among so many nodes."""
    low, high = np.array([(i, j) for i, j, _ in edges], dtype=np.int64).reshape(-1, 2).T
    node, other, m = np.concatenate([low, high]), np.concatenate([high, low]), len(edges)
    order = np.lexsort((other, node))
    position = np.empty(2 * m, dtype=np.int64)
    position[order] = np.arange(2 * m)
    twin = position[np.where(order < m, order + m, order - m)]
    node, other = node[order], other[order]
    first = np.searchsorted(node, np.arange(nodes + 1)).astype(np.int64)
    turn = first[:-1] + np.bincount(node[other < node], minlength=nodes)
    return Entries(order, node, first, turn, other, twin)


def starts_of(lengths: Indices) -> Indices:
    """Where each begins of parts one after the other, and where the last one ends."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])


def _filled(table: Table, ceiling: float) -> Table:
    if ceiling == np.inf or table.max(initial=0.0) < np.inf:
        return table
    return np.where(table < np.inf, table, table.min() + ceiling)


def ranges(starts: Indices, lengths: Indices) -> Indices:
    """`start`, `start + 1`, ... of each, one after the other.

    >>> ranges(np.array([5, 0]), np.array([2, 3]))
    array([5, 6, 0, 1, 2])
    """
    return np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))


def combinations(sizes: tuple[int, ...]) -> Indices:
    """All combinations of so many states, `[nodes, combinations]` in lexicographic order.

    A node of one state is no dim: NumPy's arrays have 64 at most, and a network that is all but decided has
    thousands of such nodes.
    """
    states = np.zeros((len(sizes), math.prod(sizes)), np.int64)
    free = [node for node, size in enumerate(sizes) if size > 1]
    if free:
        states[free] = np.indices([sizes[node] for node in free]).reshape(len(free), -1)
    return states


def all_costs(network: CostNetwork) -> tuple[NDArray[np.intp], Table]:
    """All combinations, `[nodes, combinations]` in lexicographic order, and what they cost."""
    states = combinations(tuple(theta.size for theta in network.unary))
    total = np.zeros(states.shape[1])
    for node, theta in enumerate(network.unary):
        total += theta[states[node]]
    for i, j, table in network.edges:
        total += table[states[i], states[j]]
    return states, total
