"""All moves between the signatures of tensors of one kind, and what each takes for a shape, all at once.

Which moves there are depends on the 1-D signatures that a tensor can have, not on its shape. A program has
dozens of shapes, and four axes have ten thousands of moves: to go through them one by one for each shape took
longer than to search for the plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbp.compat import core
from sbp.compat.exact_keys import memo
from sbp.compat.untyped import DType
from sbp.layout import every_signature, wide_axes
from sbp.passes.boxing.links import STEP_SECONDS, TURNING, Network
from sbp.passes.boxing.moves import Move, can_permute, copies, makes_sum, moves_from, permute_targets
from sbp.signature import B, NdSbp, Partial, Signature, Split

Array = np.ndarray[Any, Any]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class LocalSizes:
    """Tensors of one shape under each signature of a table.

    Arguments:
      elements: `[n]`, of one device's shard, padding included.
      even: `[n]`, whether no shard has padding.
    """

    elements: Places
    even: NDArray[np.bool_]


@dataclass(frozen=True)
class MoveTable:
    """All moves between the signatures of a kind of tensor.

    Arguments:
      signatures: the 1-D ones.
      network: where the tensors lie.
    """

    signatures: tuple[Signature, ...]
    network: Network

    @cached_property
    def universe(self) -> tuple[NdSbp, ...]:
        """The N-D signatures."""
        return tuple(every_signature(self.signatures, self.network.placement.shape))

    @cached_property
    def index(self) -> Mapping[NdSbp, int]:
        """The position of each among them."""
        return {nd: i for i, nd in enumerate(self.universe)}

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Every move, permutes last; permutes are for tensors that are split evenly."""
        axes = wide_axes(self.network.placement.shape)
        usual = (move for nd in self.universe for move in moves_from(nd, self.signatures, axes))
        permutes = (
            Move("permute", axes, nd, after, B, B)
            for nd in self.universe
            for after in permute_targets(nd, axes)
        )
        return (*usual, *permutes)

    @cached_property
    def ends(self) -> Places:
        """`[moves, 2]`, from where and to where."""
        at = [(self.index[m.before], self.index[m.after]) for m in self.moves]
        return np.array(at, dtype=np.int64).reshape(-1, 2)

    @cached_property
    def sums(self) -> NDArray[np.bool_]:
        """`[moves]`, which make a sum by filling in zeros."""
        return np.array([makes_sum(m) for m in self.moves], dtype=np.bool_)

    @cached_property
    def local(self) -> NDArray[np.bool_]:
        """`[moves]`, which are no collectives."""
        return np.array([not m.is_collective for m in self.moves], dtype=np.bool_)

    @cached_property
    def _groups(self) -> list[tuple[Move, Places]]:
        """Moves of one formula: an example, and which they are."""
        found: dict[Any, list[int]] = {}
        for k, m in enumerate(self.moves):
            # Of a split its dim matters, and that is looked up.
            old = m.old if isinstance(m.old, Partial) else type(m.old)
            key = (m.kind, m.axes, old) if m.is_collective else m.kind
            found.setdefault(key, []).append(k)
        return [(self.moves[ks[0]], np.array(ks, dtype=np.int64)) for ks in found.values()]

    @cached_property
    def _dims(self) -> Places:
        """`[n, axes]`, the dim that each axis splits; -1 for none."""
        dims = [[s.dim if isinstance(s, Split) else -1 for s in nd] for nd in self.universe]
        return np.array(dims, dtype=np.int64).reshape(len(self.universe), -1)

    def shards(self, shape: Sequence[int]) -> LocalSizes:
        """What tensors of a shape are on one device."""
        sizes = np.tile(np.array(shape, dtype=np.int64), (len(self.universe), 1))
        even = np.ones(len(self.universe), dtype=np.bool_)
        for axis, group in enumerate(self.network.placement.shape):
            rows = np.flatnonzero(self._dims[:, axis] >= 0)
            dims = self._dims[rows, axis]
            even[rows] &= sizes[rows, dims] % group == 0
            sizes[rows, dims] = -(-sizes[rows, dims] // group)
        return LocalSizes(sizes.prod(axis=1), even)

    def seconds(self, shape: Sequence[int], dtype: DType, narrow: DType | None = None) -> Array:
        """`[moves]`, as of `Network.seconds`; infinite for permutes that a shape does not have.

        Arguments:
          narrow: the type in which collectives send that compute nothing, if another.
        """
        shards = self.shards(shape)
        taken = np.empty(len(self.moves))
        for example, which in self._groups:
            if example.kind == "permute":
                taken[which] = np.inf
                which = which[shards.even[self.ends[which]].all(axis=1)]
                which = which[[self._permutes(k) for k in which.tolist()]] if which.size else which
            if example.is_collective:
                sent_as = dtype if narrow is None or not copies(example) else narrow
                sent = self._wire_bytes(example, which, shape, shards, sent_as)
                taken[which] = STEP_SECONDS + self._turned(example, which) + self._collectives(example, sent)
            else:
                moved = shards.elements[self.ends[which, 1]] * core.itemsize(dtype)
                free = example.kind in ("keep", "slice")
                own = 0.0 if free else moved / self.network.hardware.memory_bytes_per_second
                taken[which] = STEP_SECONDS + own
        return taken

    def _turned(self, example: Move, which: Places) -> Array:
        """What it takes that a tensor is turned over, of moves of one formula."""
        if example.kind not in TURNING:
            return np.zeros(which.size)
        end = ("before", "after").index(TURNING[example.kind])
        inner: Array = self._dims[self.ends[which, end], example.axes[0]] > 0
        return self.network.turned_seconds * inner

    @memo
    def _permutes(self, k: int) -> bool:
        return can_permute(self.moves[k].before, self.moves[k].after, self.network.placement.shape)

    def _collectives(self, example: Move, sent: Array) -> Array:
        distinct, inverse = np.unique(sent, return_inverse=True)
        axes, of = example.axes, self.network.collective_seconds
        return np.array([of(example.kind, axes, float(n)) for n in distinct])[inverse.reshape(-1)]

    def _wire_bytes(
        self, example: Move, which: Places, shape: Sequence[int], shards: LocalSizes, dtype: DType
    ) -> Array:
        """As `wire_bytes` of moves.py, of moves of one formula."""
        g = int(np.prod([self.network.placement.shape[a] for a in example.axes]))
        size = self.network.itemsize(example, dtype)
        before: Array = shards.elements[self.ends[which, 0]] * size
        after: Array = shards.elements[self.ends[which, 1]] * size
        share: float = (g - 1) / g
        sent: Array = (g - 1) * after
        match example.kind:
            case "permute":
                sent = after
            case "all_reduce":
                sent = 2 * share * before
            case "all_gather":
                sent = (g - 1) * before
            case "all_to_all" if isinstance(example.old, Split):
                sent = share * (before * self._padding(example.axes, which, shape, g))
        return sent

    def _padding(self, axes: tuple[int, ...], which: Places, shape: Sequence[int], g: int) -> Array:
        """By how much a dim grows that is to be split over some axes, once it is padded to their chunks."""
        dims, before = self._dims[self.ends[which, 1], axes[0]], self._dims[self.ends[which, 0]]
        size = np.array(shape, dtype=np.int64)[dims]
        groups = self.network.placement.shape
        for axis in set(range(len(groups))).difference(axes):
            inner = before[:, axis] == dims
            size[inner] = -(-size[inner] // groups[axis])
        chunk = size
        for axis in axes:
            chunk = -(-chunk // groups[axis])
        return np.where(size > 0, g * chunk / np.maximum(size, 1), 0.0)


def cheapest_moves(ends: Places, seconds: Array, n: int) -> Places:
    """Of moves between the same two signatures the cheapest, the first of those; of what is possible.

    >>> cheapest_moves(np.array([[0, 1], [0, 1], [1, 0]]), np.array([2.0, 1.0, np.inf]), 2)
    array([1])
    """
    pairs = ends[:, 0] * n + ends[:, 1]
    order = np.lexsort((seconds, pairs))
    order = order[np.isfinite(seconds[order])]
    first = np.ones(order.size, dtype=np.bool_)
    first[1:] = pairs[order][1:] != pairs[order][:-1]
    return order[first]
