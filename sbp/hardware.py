"""What plans reckon with: a catalogue of devices and links.

GPUs go by what was measured on them (`sbp.rates`): matrix products by shape and type, collectives by kind,
size and group. A `Hardware` of one's own has one rate of each kind; link rates are one way, per device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from sbp.errors import PlacementError, Problem
from sbp.rates.chips import CHIPS, Chip
from sbp.rates.collectives import collective_seconds
from sbp.rates.kernels import LAUNCH_SECONDS, MEMORY_SHARE
from sbp.rates.matmuls import VECTOR, matmul_seconds


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
      launch_seconds: what a kernel takes beside its work.
      chip: one of `sbp.rates.chips.CHIPS`, to reckon with what was measured on it in place of the rates of
        products and links given here; "" for these.
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
    launch_seconds: float = 0.0
    chip: str = ""

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

    def product_seconds(
        self, batch: int, m: int, n: int, k: int, itemsize: float, *, exact: bool = False
    ) -> float:
        """Of [batch, m, k] @ [batch, k, n], without its traffic.

        Arguments:
          itemsize: bytes of an element of the wider operand.
          exact: whether float32 is not to be cut to TF32, as matrix units do.
        """
        if not self.chip:
            return 2.0 * batch * m * n * k / self.flops(max(1, int(itemsize)))
        operands = next((name for size, name in _OPERANDS if itemsize <= size), "f64")
        return _measured_product(
            self.chip, batch, m, n, k, VECTOR if exact and operands == "f32" else operands
        )

    def collective_seconds(
        self, kind: str, wire_bytes: float, ranks: Sequence[int], groups: int = 1, pattern: str = "ring"
    ) -> float:
        """Of one collective.

        Arguments:
          kind: one of `sbp.rates.collectives.KINDS`.
          wire_bytes: what each device sends.
          ranks: of the devices of a group.
          groups: groups at the same time.
          pattern: of a permute.
        """
        if not self.chip:
            link = self.link(ranks)
            return link.latency_seconds + wire_bytes / link.bytes_per_second
        chip, others = CHIPS[self.chip], (len(ranks) - 1) / max(1, len(ranks))
        domains = len({r // chip.domain_devices for r in ranks})
        if kind == "permute":
            return collective_seconds(
                chip, kind, wire_bytes, 2, groups=groups, domains=min(domains, 2), pattern=pattern
            ).seconds
        share = 2 * others if kind == "all_reduce" else others
        whole = wire_bytes / share if share else 0.0
        return collective_seconds(chip, kind, whole, len(ranks), groups=groups, domains=domains).seconds


_OPERANDS = ((1, "f8"), (2, "bf16"), (4, "f32"))


@lru_cache(maxsize=1 << 16)
def _measured_product(chip: str, batch: int, m: int, n: int, k: int, operands: str) -> float:
    return matmul_seconds(CHIPS[chip], m, n, k, batch=batch, operands=operands).seconds


NIC_LATENCY_SECONDS = 45e-6
"""The launch of a collective between hosts, in XLA's model of NCCL; a send between stages takes no less."""
_ANY = 1 << 62


def _hardware(chip: Chip, memory_bytes: float) -> Hardware:
    """A chip of `sbp.rates`, with the memory that its data sheet has."""
    rates = chip.matrix_flops
    return Hardware(
        name=chip.name,
        flops_per_second=((1, rates["f8"]), (2, rates["bf16"]), (4, rates["f32"]), (8, rates["f64"])),
        vector_flops_per_second=chip.vector_flops,
        memory_bytes_per_second=chip.memory_bytes_per_second * MEMORY_SHARE,
        memory_bytes=memory_bytes,
        links=(
            Link(chip.domain_devices, chip.link_bytes_per_second, chip.link_latency_seconds),
            Link(_ANY, chip.nic_bytes_per_second, NIC_LATENCY_SECONDS),
        ),
        launch_seconds=LAUNCH_SECONDS,
        chip=chip.name,
    )


_MEMORY_BYTES = {"a100": 80e9, "h100": 80e9, "h200": 141e9, "b200": 180e9, "gb200": 197e9}

CATALOGUE: dict[str, Hardware] = {
    **{name: _hardware(CHIPS[name], n) for name, n in _MEMORY_BYTES.items()},
    # Forced host devices on two cores. Latency is what benchmarks/cpu_links.py measures (a rendezvous of
    # threads); the link is set below what it measures, so that plans prefer few bytes on the wire, as on a
    # real network. They share the memory of a host, of which nothing is known.
    "cpu": Hardware(
        "cpu", ((8, 25e9),), 2e9, 16e9, math.inf, (Link(_ANY, 0.5e9, 100e-6),), 1.0, False, "cpu"
    ),
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
