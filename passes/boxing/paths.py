"""Boxing: the cheapest sequence of moves from any signature to any other.

Paths between all signatures of a tensor are found at once, from its single moves.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sbp.compat import core
from sbp.compat.exact_keys import memo
from sbp.compat.machine_code import compile_loops
from sbp.compat.untyped import DType
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.moves import Move, makes_sum
from sbp.passes.boxing.table import MoveTable, cheapest_moves
from sbp.signature import B, NdSbp, Partial, Signature, Split

Array = np.ndarray[Any, Any]
Bools = Sequence[bool] | NDArray[np.bool_]


def shortest_seconds(n: int, ends: NDArray[np.int64], seconds: Array, fills: Bools, local: Bools) -> Array:
    """`[n, 2 n]`: the seconds from each signature to each other, and beside that the same without filling.

    Once zeros are filled in, no collective follows: to reduce such a sum is a roundabout way to what another
    collective does, however its rates were measured.

    Arguments:
      ends: `[moves, 2]`, from where and to where.
      seconds: of each move.
      fills: whether a move makes a sum by filling in zeros.
      local: whether it is no collective.

    >>> shortest_seconds(2, np.array([[0, 1]]), np.array([3.0]), [True], [True])
    array([[ 0.,  3.,  0., inf],
           [inf,  0., inf,  0.]])
    """
    filling, locally = np.asarray(fills, dtype=bool), np.asarray(local, dtype=bool)
    ends = ends.reshape(-1, 2)
    # Rows are targets: one move relaxes a whole row, all sources at once. A few passes over the moves are
    # enough, for no path is long; that is several times faster than Dijkstra's heaps from each source.
    strict = np.full((n, n), np.inf)
    np.fill_diagonal(strict, 0.0)
    _relax(strict, ends[~filling], seconds[~filling])
    filled = np.full((n, n), np.inf)
    _enter(strict, filled, ends[filling], seconds[filling])
    _relax(filled, ends[locally], seconds[locally])
    np.minimum(filled, strict, out=filled)
    return np.ascontiguousarray(np.concatenate([filled, strict]).T)


@compile_loops
def _enter(before: Array, after: Array, ends: NDArray[np.int64], seconds: Array) -> None:
    """Lowers `after[j]` to `before[k]` and a move from k to j, for each move."""
    for move in range(seconds.size):
        source, target, extra = ends[move, 0], ends[move, 1], seconds[move]
        for column in range(before.shape[1]):
            cost = before[source, column] + extra
            after[target, column] = cost if cost < after[target, column] else after[target, column]


@compile_loops
def _relax(table: Array, ends: NDArray[np.int64], seconds: Array) -> None:
    """Lowers rows by moves from other rows, until no move lowers any (Bellman, 1958).

    A row is read again only after it changed.
    """
    changed = np.ones(table.shape[0], dtype=np.bool_)
    while changed.any():
        fresh = changed
        changed = np.zeros(table.shape[0], dtype=np.bool_)
        for move in range(seconds.size):
            source, target, extra = ends[move, 0], ends[move, 1], seconds[move]
            if not (fresh[source] or changed[source]):
                continue
            lower = 0
            for column in range(table.shape[1]):
                cost, now = table[source, column] + extra, table[target, column]
                lower += cost < now
                table[target, column] = cost if cost < now else now
            if lower:
                changed[target] = True


if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


@dataclass(frozen=True)
class Boxing:
    """All transitions of one kind of tensor.

    Arguments:
      shape, dtype: of the logical tensor.
      network: where it lies.
      partials: the reductions it may wait for.
      dims: the dims that may be split.
      tables: of moves, by the 1-D signatures that tensors can have; it grows.
      narrow: a narrower type that holds all of the tensor: it is sent so until its parts are added up.
      narrow_boxing: the transitions once they are; the same without a narrower type.
    """

    shape: tuple[int, ...]
    dtype: DType
    network: Network
    partials: frozenset[str]
    dims: tuple[int, ...]
    narrow: DType | None = None
    narrow_boxing: Boxing | None = None
    tables: dict[tuple[Signature, ...], MoveTable] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        """The 1-D signatures that the tensor can have."""
        return (B, *(Split(d) for d in self.dims), *(Partial(op) for op in sorted(self.partials)))

    @cached_property
    def table(self) -> MoveTable:
        """The moves of all tensors with these signatures."""
        return self.tables.setdefault(self.signatures, MoveTable(self.signatures, self.network))

    @property
    def universe(self) -> tuple[NdSbp, ...]:
        """The N-D signatures."""
        return self.table.universe

    @property
    def index(self) -> Mapping[NdSbp, int]:
        """The position of each signature in the tables."""
        return self.table.index

    @cached_property
    def _best(self) -> tuple[NDArray[np.int64], Array]:
        """The cheapest single move between signatures, where there is one, and its seconds."""
        seconds = self.table.seconds(self.shape, self.dtype, self.narrow)
        best = cheapest_moves(self.table.ends, seconds, len(self.universe))
        return best, seconds[best]

    @cached_property
    def _moves(self) -> dict[tuple[int, int], tuple[float, Move]]:
        """The same by its ends."""
        best, seconds = self._best
        pairs = zip(seconds.tolist(), (self.table.moves[k] for k in best.tolist()), strict=True)
        return dict(zip(map(tuple, self.table.ends[best].tolist()), pairs, strict=True))

    @cached_property
    def _graphs(self) -> tuple[csr_matrix, csr_matrix]:
        """The moves as graphs for single paths, loose and strict: see `shortest_seconds`.

        Signatures from n on are those after a filling.
        """
        from scipy.sparse import csr_matrix  # scipy takes long to load

        n = len(self.universe)
        found = []
        for strict in (False, True):
            used = [(i, j, s) for (i, j), (s, m) in self._moves.items() if not makes_sum(m)]
            if not strict:
                used += [
                    *((i, j + n, s) for (i, j), (s, m) in self._moves.items() if makes_sum(m)),
                    *((i + n, j + n, s) for (i, j), (s, m) in self._moves.items() if not m.is_collective),
                ]
            at = np.array([(i, j) for i, j, _ in used], dtype=np.int64).reshape(-1, 2)
            found.append(csr_matrix(([s for _, _, s in used], (at[:, 0], at[:, 1])), shape=(2 * n, 2 * n)))
        return found[0], found[1]

    @memo
    def _tree(self, source: int, strict: bool) -> tuple[Array, Array]:
        """Seconds from one signature, and the predecessors on the cheapest paths."""
        return _cheapest(self._graphs[1 if strict else 0], source)

    @cached_property
    def both(self) -> Array:
        """`seconds` and `strict_seconds` side by side, in one table."""
        # One table per shape serves every tensor of it.
        best, seconds = self._best
        sums, local = self.table.sums[best], self.table.local[best]
        found = shortest_seconds(len(self.universe), self.table.ends[best], seconds, sums, local)
        if self.narrow_boxing is None:
            return found
        sums = np.array([_is_sum(nd) for nd in self.universe])
        return np.where(sums[:, None], self.narrow_boxing.both, found)

    @property
    def seconds(self) -> Array:
        """The time from each signature (row) to each other (column)."""
        return self.both[:, : len(self.universe)]

    @property
    def strict_seconds(self) -> Array:
        """The same without filling a sum with zeros: infinite where only filling would make it."""
        return self.both[:, len(self.universe) :]

    @cached_property
    def sends(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Of the cheapest moves from each signature (row) to each other, whether there is a collective other
        than an all-reduce among them, and whether there is any."""
        n, (best, _) = len(self.universe), self._best
        marks = np.zeros((2, n, n), dtype=np.bool_)
        ends, moves = self.table.ends[best], [self.table.moves[k] for k in best.tolist()]
        marks[0, ends[:, 0], ends[:, 1]] = [m.is_collective and m.kind != "all_reduce" for m in moves]
        marks[1, ends[:, 0], ends[:, 1]] = [m.is_collective for m in moves]
        cost, before = _cheapest(self._graphs[0], np.arange(n))
        start = np.repeat(np.arange(n)[:, None], n, axis=1)
        at = np.where(cost[:, n:] < cost[:, :n], start.T + n, start.T)
        found = np.zeros((2, n, n), dtype=np.bool_)
        while True:  # a move further back along all of them
            last = before[start, at]
            open_ = (at != start) & (last >= 0)
            if not open_.any():
                break
            found |= marks[:, last % n, at % n] & open_
            at = np.where(open_, last, at)
        if self.narrow_boxing is None:
            return found[0], found[1]
        sums = np.array([_is_sum(nd) for nd in self.universe])[:, None]
        own = [np.where(sums, r, f) for r, f in zip(self.narrow_boxing.sends, found, strict=True)]
        return own[0], own[1]

    def path(self, before: NdSbp, after: NdSbp, *, strict: bool = False) -> tuple[Move, ...]:
        """The cheapest sequence of moves; a strict one makes no sum by filling.

        >>> from sbp.hardware.catalogue import hardware_for
        >>> from sbp.placement import placement
        >>> from sbp.signature import P
        >>> net = Network(placement("cpu", shape=(4,)), hardware_for("cpu"))
        >>> box = Boxing((8, 8), np.dtype("float32"), net, frozenset(["sum"]), (0, 1))
        >>> [m.kind for m in box.path((P,), (B,))]
        ['all_reduce']
        """
        if self.narrow_boxing is not None and _is_sum(before):
            return self.narrow_boxing.path(before, after, strict=strict)
        n, i, j = len(self.universe), self.index[before], self.index[after]
        cost, predecessors = self._tree(i, strict)
        j += n if cost[j + n] < cost[j] else 0
        steps: list[Move] = []
        while j != i:
            k = int(predecessors[j])
            steps.append(self._moves[k % n, j % n][1])
            j = k
        return tuple(reversed(steps))


def _is_sum(nd: NdSbp) -> bool:
    return any(isinstance(s, Partial) for s in nd)


@dataclass(frozen=True)
class Boxings:
    """The transitions of every kind of tensor in a program, made once per kind."""

    network: Network
    _made: dict[Hashable, Boxing] = field(default_factory=dict, compare=False, repr=False)
    _tables: dict[tuple[Signature, ...], MoveTable] = field(default_factory=dict, compare=False, repr=False)

    def of(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        partials: frozenset[str],
        dims: tuple[int, ...],
        narrow: DType | None = None,
    ) -> Boxing:
        """The table for tensors of this shape; keys (PRNG) are never partial, booleans no sum.

        Arguments:
          narrow: a narrower type that holds all of the tensor.
        """
        if core.is_key(dtype):
            partials = frozenset()
        elif dtype == bool:
            partials = partials - {"sum"}
        key = shape, dtype, partials, dims, narrow
        if key not in self._made:
            reduced = None if narrow is None else self.of(shape, dtype, partials, dims)
            self._made[key] = Boxing(
                shape, dtype, self.network, partials, dims, narrow, reduced, self._tables
            )
        return self._made[key]


def _cheapest(graph: csr_matrix, sources: int | NDArray[np.int64]) -> tuple[Array, Array]:
    """Seconds from some signatures, and the predecessors on the cheapest paths (Dijkstra, 1959)."""
    from scipy.sparse.csgraph import dijkstra

    found: tuple[Array, Array] = dijkstra(graph, indices=sources, return_predecessors=True)
    return found
