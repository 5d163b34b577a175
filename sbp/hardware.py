"""A catalogue of chips and links, each figure with its source.

Dense peak rates and memory bandwidths are the vendors' data sheets; link rates are one way, per device.
Figures that were measured are marked so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sbp.errors import PlacementError, Problem


@dataclass(frozen=True, slots=True)
class Link:
    """A network level that connects `devices` devices.

    Arguments:
      devices: how many consecutive ranks share this level.
      bytes_per_second: one way, per device.
      latency_seconds: of one collective, launch included.
    """

    devices: int
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of device and what connects it.

    Arguments:
      flops_per_second: dense rate by item size in bytes; the nearest larger item size is used.
      vector_flops_per_second: of element-wise arithmetic, float32, outside the matrix units.
      memory_bytes_per_second: of one device.
      memory_bytes: what one device has; infinite where nothing is known to be too much.
      links: levels from the innermost out; the last one has no size limit.
      efficiency: the share of the peak rate that large matrix products reach.
      merges_collectives: whether XLA merges small collectives of every kind itself, as it does on GPUs.
      platform: the JAX platform that runs it.
    """

    name: str
    flops_per_second: tuple[tuple[int, float], ...]
    vector_flops_per_second: float
    memory_bytes_per_second: float
    memory_bytes: float
    links: tuple[Link, ...]
    efficiency: float = 0.7
    merges_collectives: bool = True
    platform: str = "gpu"

    def flops(self, itemsize: int) -> float:
        """The rate that a matrix product of this item size can be planned with, FLOP/s."""
        for size, rate in sorted(self.flops_per_second):
            if itemsize <= size:
                return rate * self.efficiency
        return max(self.flops_per_second)[1] * self.efficiency

    def link(self, ranks: Sequence[int]) -> Link:
        """The level that a group of `ranks` talks through: the innermost one that holds them all."""
        for link in self.links[:-1]:
            if len({r // link.devices for r in ranks}) <= 1:
                return link
        return self.links[-1]

    def between(self, a: Sequence[int], b: Sequence[int]) -> Link:
        """The level that the ranks of one placement talk to those of another through."""
        return self.link([*a, *b])


_ANY = 1 << 62
_NVLINK4 = Link(8, 370e9, 8e-6)  # 450 GB/s nominal, at most 370 measured by NCCL tests
_NVLINK5 = Link(8, 740e9, 8e-6)  # 900 GB/s nominal, the same ratio
_NDR = Link(_ANY, 50e9, 12e-6)  # InfiniBand NDR, 400 Gb/s per GPU
_HDR = Link(_ANY, 25e9, 14e-6)  # InfiniBand HDR, 200 Gb/s per GPU

CATALOGUE: dict[str, Hardware] = {
    "a100": Hardware(
        "a100", ((2, 312e12), (4, 19.5e12), (8, 9.7e12)), 19.5e12, 2.0e12, 80e9, (Link(8, 240e9, 9e-6), _HDR)
    ),
    "h100": Hardware(
        "h100", ((1, 1979e12), (2, 989e12), (4, 67e12), (8, 34e12)), 67e12, 3.35e12, 80e9, (_NVLINK4, _NDR)
    ),
    "h200": Hardware(
        "h200", ((1, 1979e12), (2, 989e12), (4, 67e12), (8, 34e12)), 67e12, 4.8e12, 141e9, (_NVLINK4, _NDR)
    ),
    "b200": Hardware(
        "b200", ((1, 4500e12), (2, 2250e12), (4, 80e12), (8, 40e12)), 80e12, 8.0e12, 180e9, (_NVLINK5, _NDR)
    ),
    # NVLink connects 18 hosts of 4.
    "gb200": Hardware(
        "gb200",
        ((1, 4796e12), (2, 2398e12), (4, 80e12), (8, 40e12)),
        80e12,
        7.9e12,
        197e9,
        (Link(72, 740e9, 8e-6), _NDR),
    ),
    # Forced host devices on two cores. Latency is what benchmarks/cpu_links.py measures (a rendezvous of
    # threads); the link is set below what it measures, so that plans prefer few bytes on the wire, as on a
    # real network. They share the memory of a host, of which nothing is known.
    "cpu": Hardware("cpu", ((8, 25e9),), 2e9, 4e9, math.inf, (Link(_ANY, 0.5e9, 100e-6),), 1.0, False, "cpu"),
}
# Nothing costs anything but bytes on the wire: a plan for it sends the least that any plan can.
BYTES_ONLY = Hardware(
    "bytes only", ((8, math.inf),), math.inf, math.inf, math.inf, (Link(_ANY, 1.0, 0.0),), 1.0
)
PLATFORMS = {
    "gpu": "h100",
    "cuda": "h100",
}  # a JAX platform that is not a catalogue name, and what to plan it as


def hardware_for(kind: str) -> Hardware:
    """The catalogue entry that a placement of this kind is planned with.

    Raises:
      PlacementError: for a kind whose rates are not known.

    >>> hardware_for("gpu").name
    'h100'
    """
    name = PLATFORMS.get(kind, kind)
    if name not in CATALOGUE:
        raise PlacementError(
            Problem(
                kind="placement",
                where=f"planning for {kind!r}",
                got=f"kind {kind!r}",
                legal=", ".join(sorted({*CATALOGUE, *PLATFORMS})),
                why="a plan needs the rates of the device and of its links; the catalogue has none for it",
                fix="Options(hardware=...) with the rates of the device",
            )
        )
    return CATALOGUE[name]
