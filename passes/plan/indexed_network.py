"""Indexed networks as compiled kernels walk over them, and the sweep of TRW-S over such a network."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbp.compat.machine_code import compile_loops
from sbp.passes.plan.flat_network import entries_of, starts_of
from sbp.passes.plan.network import IndexedNetwork, IndexedTable, Indices, Table

_LOOK = 8
"""Rows between two looks at the dearest column."""

Pool = NDArray[np.floating[Any]]


class Wide(NamedTuple):
    """An indexed network for the kernels; nodes are numbered along its order, edges lead to the later one.

    A table is a core of distinct rows and columns: states that want the same signature are a class.

    Arguments:
      offsets: `[n + 1]`, where the states of a node begin.
      first: `[n + 1]`, the first entry of a node; entries of a node are sorted by the other node.
      turn: `[n]`, a node's first entry whose other node comes later.
      other, twin: `[2 m]`, the node at the other end, and the entry of the same edge there.
      message: `[2 m + 1]`, where a node's costs per state for an entry begin.
      classes: `[2 m]`, where in `places` the class of each of the node's states begins.
      width: `[2 m]`, how many classes the node's states have.
      core: `[2 m]`, where in the pool the core begins; its rows are the classes at the other end.
      ends: `[m, 2]`, where the costs per state for each edge begin, at its first and its second node.
      places: the classes of states, table by table.
      pool: the cores.
    """

    offsets: Indices
    first: Indices
    turn: Indices
    other: Indices
    twin: Indices
    message: Indices
    classes: Indices
    width: Indices
    core: Indices
    ends: Indices
    places: NDArray[np.int32]
    pool: Pool

    @property
    def cells(self) -> int:
        """Cells of the cores that a sweep goes through."""
        return int((self.width * self.width[self.twin]).sum())


@compile_loops
def sweep_wide(
    wide: Wide, theta: Table, messages: Table, excess: Table, forward: bool, rounding: float
) -> tuple[float, float]:
    """One sweep of TRW-S, as in sweeps.py; returns the bound after it, and what rounding may have added.

    Sums over classes are in the precision of the pool, relative to the least of the classes.
    """
    nodes = wide.offsets.size - 1
    widest = 0
    for entry in range(wide.width.size):
        widest = max(widest, wide.width[entry])
    put = np.empty(widest, dtype=wide.pool.dtype)
    exact = np.empty(widest)
    least = np.empty(widest, dtype=wide.pool.dtype)
    bound, noise = 0.0, 0.0
    for step in range(nodes):
        node = step if forward else nodes - 1 - step
        at, size = wide.offsets[node], wide.offsets[node + 1] - wide.offsets[node]
        begin, middle, end = wide.first[node], wide.turn[node], wide.first[node + 1]
        back, back_end = (begin, middle) if forward else (middle, end)
        ahead, ahead_end = (middle, end) if forward else (begin, middle)
        for entry in range(back, back_end):
            twin, other = wide.twin[entry], wide.other[entry]
            rows, columns = wide.width[twin], wide.width[entry]
            theirs, mine = wide.message[twin], wide.message[entry]
            exact[:rows] = np.inf
            lowest = np.inf
            for state in range(wide.offsets[other + 1] - wide.offsets[other]):
                row = wide.places[wide.classes[twin] + state]
                cost = messages[theirs + state]
                exact[row] = min(exact[row], cost)
                lowest = min(lowest, cost)
            cheapest = 0
            for row in range(rows):
                put[row] = exact[row] - lowest
                cheapest = row if put[row] < put[cheapest] else cheapest
            cells = wide.core[entry]
            found = least[:columns]
            found[:] = wide.pool[cells + cheapest * columns : cells + (cheapest + 1) * columns]
            found += put[cheapest]
            most, since = float(found.max()), 0
            for row in range(rows):
                extra = put[row]
                if extra >= most:  # what boxing takes is never negative: this row lowers nothing
                    continue
                line = wide.pool[cells + row * columns : cells + (row + 1) * columns]
                for column in range(line.size):
                    both = line[column] + extra
                    found[column] = both if both < found[column] else found[column]
                since += 1
                if since == _LOOK:
                    most, since = float(found.max()), 0
            most = float(found.max())
            noise += rounding * most + 1e-13 * abs(lowest)
            for state in range(size):
                cost = least[wide.places[wide.classes[entry] + state]] + lowest
                theta[at + state] += messages[mine + state] + cost
                messages[mine + state] = -cost
        lowest = np.inf
        for state in range(size):
            lowest = min(lowest, theta[at + state])
        for state in range(size):
            excess[at + state] = max(excess[at + state], theta[at + state] - lowest)
        share = 1.0 / max(back_end - back, ahead_end - ahead, 1)
        for entry in range(ahead, ahead_end):
            for state in range(size):
                messages[wide.message[entry] + state] += share * theta[at + state]
        rest = 1.0 - share * (ahead_end - ahead)
        for state in range(size):
            theta[at + state] *= rest
        bound += lowest * rest
    return bound, noise


def wide_network(network: IndexedNetwork, dtype: type) -> Wide:
    """The network as the kernels walk over it."""
    place = np.empty(network.order.size, dtype=np.int64)
    place[network.order] = np.arange(network.order.size)
    sizes = np.array([network.unary[node].size for node in network.order], dtype=np.int64)
    cores = _Cores(dtype)
    edges, kinds, is_later = list[tuple[int, int, None]](), list[_Kind](), list[bool]()
    for i, j, table in network.edges:
        if i == j:
            raise ValueError("indexed network: an edge joins two nodes")
        kind = cores.put(table)
        later = bool(place[i] < place[j])
        is_later.append(later)
        edges.append((place[i], place[j], None) if later else (place[j], place[i], None))
        kinds.append(kind if later else kind.transpose())
    entries = entries_of(edges, sizes.size)
    messages, m = starts_of(sizes[entries.node]), len(edges)
    edge, ends = entries.order % max(1, m), np.zeros((m, 2), dtype=np.int64)
    is_second = (entries.order < m) != np.array(is_later, dtype=np.bool_)[edge]
    ends[edge, is_second.astype(np.int64)] = messages[:-1]
    # An entry's core has the other end's classes as rows: at the earlier node that is the turned one.
    both = np.array([k.transpose() for k in kinds] + kinds, dtype=np.int64).reshape(-1, 6)[entries.order]
    return Wide(
        starts_of(sizes),
        entries.first,
        entries.turn,
        entries.other,
        entries.twin,
        messages,
        both[:, 1].copy(),
        both[:, 3].copy(),
        both[:, 4].copy(),
        ends,
        np.concatenate(cores.places) if cores.places else np.zeros(0, dtype=np.int32),
        np.concatenate(cores.parts) if cores.parts else np.zeros(0, dtype=dtype),
    )


class _Kind(NamedTuple):
    """Where the classes of rows and columns are, how many, and where the core and its transpose begin."""

    rows: int
    columns: int
    height: int
    width: int
    core: int
    transposed: int

    def transpose(self) -> _Kind:
        return _Kind(self.columns, self.rows, self.width, self.height, self.transposed, self.core)


class _Cores:
    """Cores by content: each once, however many tables have it."""

    def __init__(self, dtype: type) -> None:
        self.dtype = dtype
        self.parts: list[Pool] = []
        self.places: list[NDArray[np.int32]] = []
        self.used = self.placed = 0
        self.known: dict[int, _Kind] = {}
        self.lists: dict[int, tuple[bytes, Indices, int, Indices]] = {}
        self.made: dict[tuple[int, float, bytes, bytes], tuple[int, int]] = {}

    def put(self, table: IndexedTable) -> _Kind:
        if id(table) not in self.known:
            row_key, rows, rows_at = self._classes(table.rows)
            column_key, columns, columns_at = self._classes(table.columns)
            key = id(table.core), table.scale, row_key, column_key
            if key not in self.made:
                core: Pool = _finite(table.scale * table.core[np.ix_(rows, columns)]).astype(self.dtype)
                self.made[key] = self.used, self.used + core.size
                self.parts += [core.reshape(-1), core.T.reshape(-1)]
                self.used += 2 * core.size
            self.known[id(table)] = _Kind(rows_at, columns_at, rows.size, columns.size, *self.made[key])
        return self.known[id(table)]

    def _classes(self, at: Indices) -> tuple[bytes, Indices, int]:
        """The distinct places, as a key too, and where each state's class begins."""
        if id(at) not in self.lists:
            distinct, inverse = np.unique(at, return_inverse=True)
            self.places.append(inverse.astype(np.int32).reshape(-1))
            self.lists[id(at)] = distinct.tobytes(), distinct, self.placed, at
            self.placed += at.size
        key, distinct, begin, _ = self.lists[id(at)]
        return key, distinct, begin


def _finite(core: Table) -> Table:
    """Infinite entries become so high that few plans would take them; any height gives true bounds."""
    if core.max(initial=0.0) < np.inf:
        return core
    finite = core[core < np.inf]
    return np.where(core < np.inf, core, 10.0 * finite.max(initial=0.0) + 0.01)
