"""What a move costs on the links of a placement."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sbp.compat import core
from sbp.compat.exact_keys import memo
from sbp.compat.untyped import DType
from sbp.hardware.catalogue import Hardware
from sbp.layout import local_shape
from sbp.passes.boxing.moves import Move, itemsize, wire_bytes
from sbp.placement import Placement
from sbp.rates.beliefs import believed_collective_seconds
from sbp.rates.chips import CHIPS
from sbp.rates.collectives import sent_share
from sbp.signature import Split

STEP_SECONDS = 1e-12
"""Of every move, so that of plans that are as good the one with fewer moves wins."""
TURNED_SECONDS = 1e-12
"""Of a gather or a scatter along a dim other than the first: of plans that are as good the one wins that
needs none. GPUs gather along the outermost dim in memory, and XLA copies what is made of tensors that it has
turned over (physical/layouts.py); how much depends on who reads them, and no move knows that."""
TURNING: Mapping[str, str] = {"all_gather": "before", "reduce_scatter": "after"}
"""Moves that turn a tensor over, and the end at which it is split."""


@dataclass(frozen=True)
class Network:
    """What collectives cost on a placement.

    Arguments:
      placement: the devices.
      hardware: its links.
    """

    placement: Placement
    hardware: Hardware

    @memo
    def group(self, axes: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """The ranks of the slowest group along `axes`, and how many groups there are."""
        every = [tuple(int(r) for r in g) for g in self.placement.groups(axes)]
        return min(every, key=lambda g: self.hardware.link(g).bytes_per_second), len(every)

    @memo
    def collective_seconds(self, kind: str, axes: tuple[int, ...], wire_bytes: float) -> float:
        """The time of a collective in which each device sends so much."""
        # Asked for every move of every kind of tensor; many are alike.
        return self.hardware.collective_seconds(kind, wire_bytes, *self.group(axes))

    @memo
    def believed_seconds(self, kind: str, axes: tuple[int, ...], wire_bytes: float) -> float:
        """What XLA's scheduler takes such a collective to be; on a device of which nothing is known, what it
        takes."""
        if not self.hardware.chip:
            return self.collective_seconds(kind, axes, wire_bytes)
        whole = wire_bytes / sent_share(kind, len(self.group(axes)[0]))
        groups = [[int(r) for r in g] for g in self.placement.groups(axes)]
        return believed_collective_seconds(CHIPS[self.hardware.chip], kind, whole, groups)

    @property
    def turned_seconds(self) -> float:
        """Of a gather or a scatter along another dim than the first."""
        return TURNED_SECONDS if self.hardware.platform == "gpu" else 0.0

    def itemsize(self, move: Move, dtype: DType) -> float:
        """Bytes that an element takes in a move."""
        return itemsize(move, dtype, wide_int16=self.placement.platform == "gpu")

    def wire_bytes(self, move: Move, shape: Sequence[int], dtype: DType) -> float:
        """What one device sends in a move."""
        return wire_bytes(move, shape, self.itemsize(move, dtype), self.placement.shape)

    def seconds(self, move: Move, shape: Sequence[int], dtype: DType) -> float:
        """The time of one move: its wire for a collective, memory traffic for a local step.

        A slice is merged into who reads it.
        """
        hierarchy = self.placement.shape
        if not move.is_collective:
            moved = math.prod(local_shape(shape, move.after, hierarchy)) * core.itemsize(dtype)
            free = move.kind in ("keep", "slice")
            return STEP_SECONDS + (0.0 if free else moved / self.hardware.memory_bytes_per_second)
        axes = tuple(range(len(hierarchy))) if move.kind == "permute" else move.axes
        split = getattr(move, TURNING[move.kind])[axes[0]] if move.kind in TURNING else None
        turned = self.turned_seconds if isinstance(split, Split) and split.dim > 0 else 0.0
        return (
            STEP_SECONDS
            + turned
            + self.collective_seconds(move.kind, axes, self.wire_bytes(move, shape, dtype))
        )
