"""Pairwise cost networks: the planner's problem as data, and the answer to it.

The strategies of an op want an operand under few signatures, and all tensors of a shape have one table of
boxing. A pair table of two ops is that table with its rows and columns picked out, which takes thousands of
states squared to write down. So a network also comes as shared tables and two lists of places for each
(`IndexedNetwork`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
Indices = NDArray[np.int64]

RELATIVE_NOISE = 1e-9
"""Costs closer than this, relative to their size, count as equal."""


class Infeasible(ValueError):
    """No assignment of the network has a finite cost.

    `nodes` names the nodes where the conflict showed: one node, an edge, or nothing when only the
    network as a whole is contradictory.
    """

    def __init__(self, nodes: tuple[int, ...] = ()) -> None:
        self.nodes = nodes
        if len(nodes) == 2:
            where = f"the edge between nodes {nodes[0]} and {nodes[1]} forbids every pair of states left"
        elif nodes:
            where = f"every state of node {nodes[0]} is forbidden"
        else:
            where = "the edges contradict each other around a cycle"
        super().__init__(
            f"cost network: no assignment has a finite cost: {where}. A legal network leaves at least one "
            "choice of states without an infinite entry; drop a fixed choice or add a state to these nodes."
        )


@dataclass(frozen=True)
class CostNetwork:
    """Minimise the sum of node costs and edge costs over one state per node.

    `unary[i][a]` is the cost of state `a` at node `i`; an edge `(i, j, table)` adds `table[a, b]`. `inf`
    forbids. Parallel edges add up; an edge from a node to itself costs its diagonal. Tables that are the
    same object cost the solver once.

    Raises ValueError for an empty node, a table of the wrong shape, a NaN or a negative infinity.

    >>> table = np.array([[3.0, 9.0], [3.0, 0.0]])
    >>> CostNetwork((np.array([0.0, 1.0]), np.array([2.0, 0.0])), ((0, 1, table),)).cost((1, 1))
    1.0
    """

    unary: tuple[Table, ...]
    edges: tuple[tuple[int, int, Table], ...]

    def __post_init__(self) -> None:
        distinct = dict[int, tuple[str, Table]]()
        for node, theta in enumerate(self.unary):
            if theta.ndim != 1 or theta.size == 0:
                raise ValueError(
                    f"cost network: node {node} has costs of shape {theta.shape}; it needs one axis with a "
                    "cost for each of at least one state"
                )
            distinct[id(theta)] = f"node {node}", theta
        sizes = [theta.size for theta in self.unary]
        for i, j, table in self.edges:
            if not (0 <= i < len(sizes) and 0 <= j < len(sizes)):
                raise ValueError(f"cost network: edge ({i}, {j}) leaves the {len(sizes)} nodes")
            if table.shape != (sizes[i], sizes[j]):
                raise ValueError(
                    f"cost network: edge ({i}, {j}) has a table of shape {table.shape}; its nodes have "
                    f"{sizes[i]} and {sizes[j]} states, so it must be {(sizes[i], sizes[j])}"
                )
            if id(table) not in distinct:
                distinct[id(table)] = f"edge {i}, {j}", table
        for at, table in distinct.values():
            if not table.min() > -np.inf:  # also true for NaN, which min() passes on
                raise ValueError(
                    f"cost network: {at} has a NaN or negative infinite cost; give finite costs, or inf to "
                    "forbid"
                )

    def cost(self, states: Sequence[int]) -> float:
        """Cost of one state per node, summed without rounding between the terms."""
        if len(states) != len(self.unary):
            raise ValueError(f"cost network: {len(states)} states given for {len(self.unary)} nodes")
        terms = [
            *(theta.item(state) for theta, state in zip(self.unary, states, strict=True)),
            *(table.item(states[i], states[j]) for i, j, table in self.edges),
        ]
        return math.fsum(terms)


@dataclass(frozen=True)
class Solution:
    """States, their cost, and a lower bound on the cost of any states."""

    states: tuple[int, ...]
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """Proven relative distance from the optimum; 0.0 means optimal (up to rounding noise of 1e-9)."""
        if math.isinf(self.cost):
            return math.inf
        difference = self.cost - self.bound
        if difference <= RELATIVE_NOISE * abs(self.cost):
            return 0.0
        return difference / max(abs(self.cost), math.ulp(0.0))


def least_of(network: CostNetwork) -> float:
    """The sum of all minima: the simplest lower bound."""
    minima = [
        *(float(theta.min()) for theta in network.unary),
        *(float(table.min()) for _, _, table in network.edges),
    ]
    return math.fsum(minima)


def ceiling_of(network: CostNetwork) -> float:
    """What infinite entries may cost above the least of their table, so that none of them ever pays."""
    tables: Sequence[Table] = [*network.unary, *(table for _, _, table in network.edges)]
    distinct = {id(table): table for table in tables}
    ranges = {k: float(table[table < np.inf].max() - table.min()) for k, table in distinct.items()}
    return 1e-9 + 1.001 * math.fsum(ranges[id(table)] for table in tables)


def restriction(network: CostNetwork, kept: Sequence[NDArray[np.intp]]) -> CostNetwork:
    """The network on these states; equal choices from the same table share the result."""
    keys = [keep.tobytes() for keep in kept]
    known: dict[tuple[int, bytes, bytes], Table] = {}
    edges = []
    for i, j, table in network.edges:
        key = (id(table), keys[i], keys[j])
        if key not in known:
            known[key] = table[np.ix_(kept[i], kept[j])]
        edges.append((i, j, known[key]))
    return CostNetwork(
        tuple(theta[keep] for theta, keep in zip(network.unary, kept, strict=True)), tuple(edges)
    )


def labels_of(ends: NDArray[np.int64], count: int) -> NDArray[np.int32]:
    """The number of its connected part, per node.

    Arguments:
      ends: of each edge, its nodes.
      count: of nodes.

    >>> labels_of(np.array([[0, 3], [1, 1]]), 4).tolist()
    [0, 1, 2, 0]
    """
    from scipy.sparse import coo_matrix  # scipy takes long to load
    from scipy.sparse.csgraph import connected_components

    graph = coo_matrix((np.ones(len(ends), np.bool_), ends.T), shape=(count, count))
    labels: NDArray[np.int32] = connected_components(graph, directed=False)[1]
    return labels


def parts_of(network: CostNetwork) -> list[list[int]]:
    """Connected parts, each in ascending order."""
    ends = np.array([(i, j) for i, j, _ in network.edges], np.int64).reshape(-1, 2)
    labels = labels_of(ends, len(network.unary))
    order = labels.argsort(kind="stable")
    return [x.tolist() for x in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)]


Kept = Sequence[Indices]
"""Per node, some of its states, ascending."""


@dataclass(frozen=True, eq=False)
class IndexedTable:
    """A pair table: states `a` and `b` cost `scale * core[rows[a], columns[b]]`.

    >>> core = np.array([[0.0, 1.0], [2.0, 0.0]])
    >>> IndexedTable(core, np.array([1, 0, 1]), np.array([0, 1]), 2.0).dense()
    array([[4., 0.],
           [0., 2.],
           [4., 0.]])
    """

    core: Table
    rows: Indices
    columns: Indices
    scale: float = 1.0

    @property
    def cells(self) -> int:
        """Entries of the table once it is written down."""
        return self.rows.size * self.columns.size

    def __mul__(self, times: int) -> "IndexedTable":
        return replace(self, scale=times * self.scale)

    def dense(self, rows: Indices | None = None, columns: Indices | None = None) -> Table:
        """The table written down, for these states only if given."""
        at = self.rows if rows is None else self.rows[rows]
        to = self.columns if columns is None else self.columns[columns]
        picked: Table = self.core[np.ix_(at, to)]
        return picked if self.scale == 1.0 else picked * self.scale


def written_down(table: Table) -> IndexedTable:
    """A table that is its own core."""
    return IndexedTable(table, np.arange(table.shape[0]), np.arange(table.shape[1]))


@dataclass(frozen=True)
class IndexedNetwork:
    """A cost network with indexed tables; a table that stands at many edges is one object.

    Arguments:
      unary: the costs of each node's states.
      edges: (node, node, table).
      order: all nodes, those that are joined near to each other: sweeps go along it.
    """

    unary: tuple[Table, ...]
    edges: tuple[tuple[int, int, IndexedTable], ...]
    order: Indices

    @property
    def cells(self) -> int:
        """Entries of all distinct tables once they are written down."""
        return sum(table.cells for table in {id(t): t for _, _, t in self.edges}.values())

    @property
    def edge_cells(self) -> int:
        """The same of all edges; tables that are one object are counted each."""
        return sum(table.cells for _, _, table in self.edges)

    def cost(self, states: Sequence[int]) -> float:
        """Cost of an assignment."""
        return self.dense([np.array([state]) for state in states]).cost([0] * len(states))

    def kept_cells(self, kept: Kept) -> int:
        """Entries of all edges' tables on these states."""
        return sum(kept[i].size * kept[j].size for i, j, _ in self.edges)

    def dense(self, kept: Kept | None = None) -> CostNetwork:
        """The network written down, on these states only if given; equal tables stay one object."""
        if kept is None:
            return self._whole
        keys = [kept[i].tobytes() for i in range(len(self.unary))]
        known: dict[tuple[int, bytes, bytes], Table] = {}
        edges = []
        for i, j, table in self.edges:
            key = id(table), keys[i], keys[j]
            if key not in known:
                known[key] = table.dense(kept[i], kept[j])
            edges.append((i, j, known[key]))
        return CostNetwork(tuple(x[k] for x, k in zip(self.unary, kept, strict=True)), tuple(edges))

    @cached_property
    def _whole(self) -> CostNetwork:
        """All of it; the search for the shortest step begins with what the solver had."""
        tables = {id(t): t for _, _, t in self.edges}
        dense = {k: t.dense() for k, t in tables.items()}
        return CostNetwork(self.unary, tuple((i, j, dense[id(t)]) for i, j, t in self.edges))
