"""Gradients of max pooling: XLA writes where each maximum is before it adds the gradient there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sbp.passes.physical.fusing import ShardSizes
from sbp.passes.physical.kernels import Kernels
from sbp.passes.physical.program import Version

INDEX_BYTES = 4


@dataclass(frozen=True, slots=True)
class Places:
    """Where maxima are, and the zeros to which the gradient is added.

    Arguments:
      version: of the gradient.
      places_bytes: of the numbers: one per dim and maximum.
      zeros_bytes: of the zeros and their copy, as long as there is no gradient.
      first, last: the turns of the op after which they are made, and of the one that reads them.
    """

    version: Version
    places_bytes: float
    zeros_bytes: float
    first: int
    last: int


def places(k: Kernels, sizes: ShardSizes, turn: Sequence[int], hides: bool) -> Iterator[Places]:
    """What the gradients of max pooling hold beside operands and results.

    XLA:GPU makes a scatter of them (`SelectAndScatterExpander`): a pass over the pooled tensor finds where
    each maximum is, one number per dim, and the gradient is added there to zeros. Neither needs what comes
    back through the net. The scheduler, which goes backwards, uses them to hide collectives only when it has
    nothing else: they are there long before they are read. Here they are as early as they can be. Then the
    zeros are there twice: they are written with those of the activation before the pool, which are the same
    constant, and the addition in place has a copy.

    Arguments:
      hides: whether collectives are hidden at the cost of memory.
    """
    for i, op in enumerate(k.ops):
        if op.name != "select_and_scatter_add" or not k.runs(i):
            continue
        gradient, pooled = k.source(i, 0), k.source(i, 1)
        if gradient is None or pooled is None:
            continue
        between = range(pooled.maker + 1, i)
        early = hides and any(k.ops[j].sends and k.runs(j) for j in between)
        ready = turn[pooled.maker] if pooled.maker >= 0 else 0
        dims = len(sizes.shape(op.writes[0][0]))
        found = INDEX_BYTES * dims * sizes.elements(op.reads[0])
        zeros = 2 * sizes.bytes(op.writes[0]) if early else 0.0
        yield Places(op.writes[0], found, zeros, ready if early else turn[i], turn[i])
