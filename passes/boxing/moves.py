"""The moves of boxing: one collective or local step, over one placement axis or several at once."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from sbp.communication.bits import reduced_bytes
from sbp.communication.protocol import COLLECTIVES
from sbp.compat import core
from sbp.compat.untyped import DType
from sbp.layout import chunk_sizes, local_shape, offset
from sbp.signature import Broadcast, NdSbp, P, Partial, Signature, Split, splits_of
from sbp.view import coordinates


@dataclass(frozen=True, slots=True)
class Move:
    """One step from a signature to another.

    Arguments:
      kind: a collective ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute") or a local
        step ("slice", "fill", "embed", "keep").
      axes: the placement axes that take part, outer to inner.
      before, after: the N-D signatures.
      old, new: what changes along each of `axes`.
    """

    kind: str
    axes: tuple[int, ...]
    before: NdSbp
    after: NdSbp
    old: Signature
    new: Signature

    @property
    def is_collective(self) -> bool:
        """Whether devices talk."""
        return self.kind in COLLECTIVES


FILLED = ("sum", "prod", "xor")
"""Reductions of which a copy on every device is no part."""
GATHERED = ("and", "or", "xor")
"""Reductions that XLA has no collective for: everyone has the parts of all, and reduces them."""


def copies(move: Move) -> bool:
    """Whether a move is a collective that computes nothing: every element arrives as it was."""
    return move.is_collective and not isinstance(move.old, Partial)


def makes_sum(move: Move) -> bool:
    """Whether a move makes a sum by filling with zeros."""
    return move.kind in ("fill", "embed") and move.new == P


def _kind(old: Signature, new: Signature) -> str | None:
    """The move along one axis, from one signature to another."""
    match old, new:
        case Broadcast(), Split():
            return "slice"
        case Broadcast(), Partial(op):
            return "fill" if op in FILLED else "keep"
        case Split(), Broadcast():
            return "all_gather"
        case Split(i), Split(j) if i != j:
            return "all_to_all"
        case Split(), Partial():
            return "embed"
        case Partial(op), Broadcast():
            return "all_gather" if op in GATHERED else "all_reduce"
        case Partial(op), Split():
            return "reduce_scatter" if op == "sum" else "all_to_all"
    return None


def _nested(nd: NdSbp, signature: Signature, axes: Sequence[int]) -> bool:
    """Whether `signature` along `axes` can be added or removed: what is nested inside it must allow that.

    Only the innermost axes that split a dim can move; a sum of maxima must take its maxima first.
    """
    if isinstance(signature, Partial):
        return not any(isinstance(s, Partial) and s != signature for s in nd[min(axes) :])
    if not isinstance(signature, Split):
        return True
    others = [a for a in splits_of(nd, signature.dim) if a not in axes]
    return not others or max(others) < min(axes)


def moves_from(nd: NdSbp, targets: Sequence[Signature], axes: Sequence[int] | None = None) -> Iterator[Move]:
    """Every move away from `nd`, except permutes.

    Arguments:
      targets: the 1-D signatures that the tensor can have.
      axes: along which it may change; None for all.
    """
    axes = range(len(nd)) if axes is None else axes
    for n in range(1, len(axes) + 1):
        for some in itertools.combinations(axes, n):
            old = nd[some[0]]
            if any(nd[a] != old for a in some) or not _nested(nd, old, some):
                continue
            for new in targets:
                kind = None if new == old else _kind(old, new)
                if kind is None or (n > 1 and kind not in COLLECTIVES) or not _nested(nd, new, some):
                    continue
                after = tuple(new if a in some else s for a, s in enumerate(nd))
                yield Move(kind, some, nd, after, old, new)


def permute_targets(nd: NdSbp, axes: Sequence[int] | None = None) -> Iterator[NdSbp]:
    """Signatures that a permute might reach: two axes exchanged, or an outer axis joining an inner split.

    Arguments:
      axes: as of `moves_from`.
    """
    for a, b in itertools.combinations(range(len(nd)) if axes is None else axes, 2):
        if any(isinstance(nd[i], Partial) for i in (a, b)) or nd[a] == nd[b]:
            continue
        swapped = list(nd)
        swapped[a], swapped[b] = nd[b], nd[a]
        yield tuple(swapped)
        if isinstance(nd[a], Broadcast):
            yield tuple(nd[b] if i == a else s for i, s in enumerate(nd))


@dataclass(frozen=True, slots=True)
class Permutation:
    """Who sends which piece to whom in a permute.

    Arguments:
      pairs: (source, destination) positions, row-major in the hierarchy.
      starts: for each source position, where its piece starts in its shard, per dim.
      shape: the piece's shape.
    """

    pairs: tuple[tuple[int, int], ...]
    starts: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]


def find_permutation(
    shape: Sequence[int], before: NdSbp, after: NdSbp, hierarchy: Sequence[int]
) -> Permutation | None:
    """How one permute takes an evenly split tensor from `before` to `after`; None if it cannot.

    Every device must find its new shard inside ONE old shard, and every device sends to at most one.
    """
    where = coordinates(hierarchy)
    old_size = np.array(local_shape(shape, before, hierarchy))
    new_size = np.array(local_shape(shape, after, hierarchy))
    if (new_size > old_size).any():
        return None

    def starts(nd: NdSbp) -> NDArray[np.int64]:
        rows = [[offset(n, splits_of(nd, d), hierarchy, c) for d, n in enumerate(shape)] for c in where]
        return np.array(rows, dtype=np.int64).reshape(len(where), len(shape))

    old, new = starts(before), starts(after)
    inside = (old[:, None] <= new[None]) & (new[None] + new_size <= old[:, None] + old_size)
    fits = inside.all(axis=2)
    # Axes that stay partial keep their devices apart: only equal coordinates hold the same summand.
    for axis, s in enumerate(before):
        if isinstance(s, Partial):
            c = np.array([x[axis] for x in where])
            fits &= c[:, None] == c[None]
    fits_own = fits.diagonal().all()
    if fits_own:
        return None  # a local slice
    from scipy.sparse import csr_matrix  # scipy takes long to load
    from scipy.sparse.csgraph import maximum_bipartite_matching

    source = maximum_bipartite_matching(csr_matrix(fits.T), perm_type="column")
    if (source < 0).any():
        return None
    piece = {int(s): tuple(int(x) for x in new[d] - old[s]) for d, s in enumerate(source)}
    zeros = (0,) * len(shape)
    return Permutation(
        tuple((int(s), d) for d, s in enumerate(source)),
        tuple(piece.get(s, zeros) for s in range(len(where))),
        tuple(int(n) for n in new_size),
    )


def can_permute(before: NdSbp, after: NdSbp, hierarchy: tuple[int, ...]) -> bool:
    """Whether a permute exists for tensors whose dims divide by everything; shapes do not matter then."""
    dims: dict[int, Split] = {}  # and neither do the names of dims

    def named(nd: NdSbp) -> NdSbp:
        return tuple(dims.setdefault(s.dim, Split(len(dims))) if isinstance(s, Split) else s for s in nd)

    return _can_permute(named(before), named(after), hierarchy)


@cache
def _can_permute(before: NdSbp, after: NdSbp, hierarchy: tuple[int, ...]) -> bool:
    dims = 1 + max((s.dim for s in (*before, *after) if isinstance(s, Split)), default=0)
    shape = (math.prod(hierarchy),) * dims
    return math.prod(hierarchy) <= 512 and find_permutation(shape, before, after, hierarchy) is not None


def frame(
    move: Move, signature: Signature, shape: Sequence[int], hierarchy: Sequence[int]
) -> tuple[int, tuple[int, ...]]:
    """A split dim as the moving axes see it: the size that the other axes left, the chunk after each axis."""
    assert isinstance(signature, Split)
    rest = [a for a in splits_of(move.before, signature.dim) if a not in move.axes]
    size = shape[signature.dim]
    for c in chunk_sizes(size, rest, hierarchy):
        size = c
    return size, chunk_sizes(size, move.axes, hierarchy)


def itemsize(move: Move, dtype: DType, wide_int16: bool = False) -> float:
    """Bytes that an element takes in a move: what a collective computes with may be wider than what it moves.

    Arguments:
      wide_int16: whether XLA reduces integers of 16 bits as ones of 32, as it does on GPUs.
    """
    if move.kind not in ("all_reduce", "reduce_scatter"):
        return core.itemsize(dtype)
    assert isinstance(move.old, Partial)
    return reduced_bytes(dtype, move.old.op, wide_int16)


def wire_bytes(move: Move, shape: Sequence[int], itemsize: float, hierarchy: Sequence[int]) -> float:
    """What one device sends in a bandwidth-optimal algorithm, bytes, padding included."""
    if not move.is_collective:
        return 0.0
    g = math.prod(hierarchy[a] for a in move.axes)
    before = math.prod(local_shape(shape, move.before, hierarchy)) * itemsize
    after = math.prod(local_shape(shape, move.after, hierarchy)) * itemsize
    share = (g - 1) / g
    match move.kind:
        case "permute":
            return after
        case "all_reduce":
            return 2 * share * before
        case "all_gather":
            return (g - 1) * before
        case "all_to_all" if isinstance(move.old, Split):
            return share * _grown(move, move.new, before, shape, hierarchy)
        case _:
            # reduce_scatter, and the all_to_all of a maximum: each device ends with one of g padded chunks
            return (g - 1) * after


def _grown(
    move: Move, new: Signature, before: float, shape: Sequence[int], hierarchy: Sequence[int]
) -> float:
    """Bytes of a shard once the dim that is to be split is padded to g chunks."""
    size, chunks = frame(move, new, shape, hierarchy)
    return before * (math.prod(hierarchy[a] for a in move.axes) * chunks[-1] / size) if size else 0.0
