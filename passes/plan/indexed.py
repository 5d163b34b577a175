"""Cost networks whose tables are looked up: what boxing takes, by the signatures of the two states.

The strategies of an op want an operand under few signatures, and all tensors of a shape have one table of
boxing. A pair table of two ops is that table with its rows and columns picked out, which takes thousands of
states squared to write down. Here it is the shared table and two lists of places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sbp.passes.plan.flat import Indices
from sbp.passes.plan.network import CostNetwork, Table

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
        unary = (x[k] for x, k in zip(self.unary, kept, strict=True))
        return CostNetwork(tuple(unary), tuple(edges))

    @cached_property
    def _whole(self) -> CostNetwork:
        """All of it; the search for the shortest step begins with what the solver had."""
        tables = {id(t): t for _, _, t in self.edges}
        dense = {k: t.dense() for k, t in tables.items()}
        return CostNetwork(self.unary, tuple((i, j, dense[id(t)]) for i, j, t in self.edges))
