"""Parts of a network: connected ones, some states of each node, and what its entries are about."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sbp.passes.plan.network import CostNetwork, Table


def least_of(network: CostNetwork) -> float:
    """The sum of all minima: the simplest lower bound."""
    minima = [float(theta.min()) for theta in network.unary]
    minima.extend(float(table.min()) for _, _, table in network.edges)
    return math.fsum(minima)


def ceiling_of(network: CostNetwork) -> float:
    """What infinite entries may cost above the least of their table, so that none of them ever pays."""
    tables: Sequence[Table] = [*network.unary, *(table for _, _, table in network.edges)]
    distinct = {id(table): table for table in tables}
    ranges = {k: float(table[table < np.inf].max() - table.min()) for k, table in distinct.items()}
    return 1e-9 + 1.001 * math.fsum(ranges[id(table)] for table in tables)


def restricted(network: CostNetwork, kept: Sequence[NDArray[np.intp]]) -> CostNetwork:
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
