"""What a move costs on the links of a placement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from sbp import compat
from sbp.hardware import Hardware
from sbp.layout import local_shape
from sbp.passes.boxing.moves import Move, itemsize, wire_bytes
from sbp.placement import Placement
from sbp.untyped import DType


@dataclass(frozen=True)
class Network:
    """What collectives cost on a placement.

    Arguments:
      placement: the devices.
      hardware: its links.
    """

    placement: Placement
    hardware: Hardware
    _links: dict[tuple[int, ...], tuple[float, float]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def link(self, axes: tuple[int, ...]) -> tuple[float, float]:
        """Latency in seconds and bandwidth in bytes per second of the slowest group along `axes`."""
        if axes not in self._links:
            links = [self.hardware.link([int(r) for r in g]) for g in self.placement.groups(axes)]
            worst = min(links, key=lambda x: x.bytes_per_second)
            self._links[axes] = worst.latency_seconds, worst.bytes_per_second
        return self._links[axes]

    def itemsize(self, move: Move, dtype: DType) -> float:
        """Bytes that an element takes in a move."""
        return itemsize(move, dtype, wide_int16=self.placement.platform == "gpu")

    def wire_bytes(self, move: Move, shape: Sequence[int], dtype: DType) -> float:
        """What one device sends in a move."""
        return wire_bytes(move, shape, self.itemsize(move, dtype), self.placement.shape)

    def seconds(self, move: Move, shape: Sequence[int], dtype: DType) -> float:
        """The time of one move: latency and wire for a collective, memory traffic for a local step."""
        hierarchy = self.placement.shape
        if not move.is_collective:
            moved = math.prod(local_shape(shape, move.after, hierarchy)) * compat.itemsize(dtype)
            return 0.0 if move.kind == "keep" else moved / self.hardware.memory_bytes_per_second
        axes = tuple(range(len(hierarchy))) if move.kind == "permute" else move.axes
        latency, rate = self.link(axes)
        return latency + self.wire_bytes(move, shape, dtype) / rate
