"""Gradients of max pooling: XLA writes where each maximum is before it adds the gradient there."""

from collections.abc import Iterator
from dataclasses import dataclass

from sbp.passes.physical.fusing import ShardSizes
from sbp.passes.physical.kernels import Kernels
from sbp.passes.physical.order import Turns
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


def places(k: Kernels, sizes: ShardSizes, turn: Turns) -> Iterator[Places]:
    """What the gradients of max pooling hold beside operands and results.

    XLA:GPU makes a scatter of them (`SelectAndScatterExpander`): a pass over the pooled tensor finds where
    each maximum is, one number per dim, and the gradient is added there to zeros. Neither needs what comes
    back through the net, and so they may come long before. The zeros are those of the activation before the
    pool, which are the same constant; if they hide a collective, the addition in place has a copy of them.
    """
    flights = [(turn.born[j], turn.read[j]) for j, op in enumerate(k.ops) if op.sends and k.runs(j)]
    for i, first in turn.found.items():
        op = k.ops[i]
        hides = any(begin < first < end for begin, end in flights)
        dims = len(sizes.shape(op.writes[0][0]))
        found = INDEX_BYTES * dims * sizes.elements(op.reads[0])
        zeros = sizes.bytes(op.writes[0]) if hides else 0.0
        yield Places(op.writes[0], found, zeros, first, turn.born[i])
