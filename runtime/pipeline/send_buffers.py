"""What the pieces of a pipeline send: its transfers, its receivers, and where each array comes from."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sbp.passes.pipeline.slots import Cut, Slot
from sbp.runtime.pipeline.transfer_engine import StageTransfer

PlacedSlot: TypeAlias = tuple[int, Slot]
"""The position of a placement, and a slot there."""


@dataclass(frozen=True)
class SendBuffers:
    """The arrays that a piece sends together.

    Arguments:
      positions: of the arrays, among those that the piece writes.
      to: per array, the placement and the slot that receive it.
      peer: the nearest stage on one of these placements.
      cargos: per array, its transfer.
    """

    positions: tuple[int, ...]
    to: tuple[PlacedSlot, ...]
    transfers: tuple[StageTransfer, ...]
    peer: int

    @functools.cached_property
    def is_own(self) -> bool:
        """Whether all transfers are within this process."""
        return all(c.is_own for c in self.transfers)


def routes(
    cuts: Sequence[Cut],
) -> tuple[Mapping[PlacedSlot, tuple[PlacedSlot, ...]], Mapping[PlacedSlot, PlacedSlot]]:
    """The receivers of what is sent per micro-batch, and the sources of what is sent once."""
    receivers: dict[PlacedSlot, list[PlacedSlot]] = {}
    sources: dict[PlacedSlot, PlacedSlot] = {}
    for q, c in enumerate(cuts):
        for v, slot in c.fed.items():
            p = next(p for p, other in enumerate(cuts) if v in other.passed)
            receivers.setdefault((p, cuts[p].passed[v]), []).append((q, slot))
        for v, slot in c.received.items():
            p = next(p for p, other in enumerate(cuts) if v in other.sent)
            sources[q, slot] = p, cuts[p].sent[v]
    return {k: tuple(v) for k, v in receivers.items()}, sources
