"""What a device holds over one trip of a loop, beyond what is counted outside of it."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from sbp.passes.physical.fusing import Seconds, ShardSizes
from sbp.passes.physical.kernels import kernels
from sbp.passes.physical.memory import Spaces, swept
from sbp.passes.physical.program import Border, Step
from sbp.passes.physical.trips import trip_ops


@dataclass(frozen=True, slots=True)
class TripCourse:
    """One trip.

    Arguments:
      bytes: turn by turn.
      seconds: when each of them begins.
    """

    bytes: tuple[float, ...]
    seconds: tuple[float, ...]


def trip_course(
    loop: Border, k: int, sizes: ShardSizes, seconds: Seconds | None, takes: Callable[[Step], float]
) -> TripCourse:
    """What one trip through body `k` holds, op after op.

    Arguments:
      seconds: of an op, as memory is counted; None where collectives are not hidden at its cost.
      takes: the time of a step by itself.
    """
    trip = trip_ops(loop, k, sizes)
    body = kernels(trip.ops, sizes, trip.whole, trip.held)
    sweep = swept(body, sizes, Spaces(trip.taken, frozenset(trip.taken), seconds, in_loop=True), None)
    held = [max(0.0, n) for n in itertools.accumulate(sweep.change)]
    taken = [0.0] * (len(held) + 1)
    for i, op in enumerate(body.ops):
        if body.runs(i) and op.step is not None:
            taken[min(sweep.turn.born[i] + 1, len(held))] += takes(op.step)
    begins = list(itertools.accumulate(taken))[: len(held)]
    return TripCourse(tuple(held), tuple(begins))
