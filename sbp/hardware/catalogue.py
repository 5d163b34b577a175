"""A catalogue of devices and links, with the rates that plans use.

The GPUs have measured rates (`sbp.rates`): of matrix products by shape and type, of collectives by kind,
size and group. A user's own `Hardware` has one rate of each kind, and curves of collectives if they were
measured; `sbp.hardware.file` reads it from a file. Link rates are one way, per device.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from sbp.errors import PlacementError, Problem
from sbp.rates.chips import CHIPS, LAUNCH_SECONDS, MEMORY_SHARE, Chip
from sbp.rates.collectives import collective_seconds, curve_seconds, sent_share
from sbp.rates.matmuls import FUSED_SHARE, VECTOR, matmul_seconds
from sbp.rates.tables import CollectiveCurve


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
    """One kind of device, and the network between such devices.

    Arguments:
      flops_per_second: dense rate by item size in bytes; the nearest larger item size is used.
      vector_flops_per_second: of element-wise arithmetic, float32, outside the matrix units.
      memory_bytes_per_second: of one device.
      memory_bytes: of one device; infinite if there is no limit.
      links: levels from the innermost out; the last one reaches every device that a placement may have.
      efficiency: the share of the peak rate that large matrix products reach.
      merges_collectives: whether XLA merges small collectives of every kind itself, as it does on GPUs.
      platform: the JAX platform that runs it.
      launch_seconds: the time of a kernel beside its work.
      chip: one of `sbp.rates.chips.CHIPS`, whose measurements are used; "" to use only the figures here. If
        these differ from the chip's, products are scaled by the ratio of the peaks, and collectives over a
        link of another rate use the formula.
      curves: without a chip, measured collectives inside the innermost level, each with its kind (one of
        `sbp.rates.collectives.KINDS`); they replace the rate of that level.
      scheduled_bytes: the memory limit that XLA's scheduler is given; infinite for none.
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
    curves: tuple[tuple[str, CollectiveCurve], ...] = ()
    scheduled_bytes: float = math.inf

    def flops(self, itemsize: int) -> float:
        """The rate that a matrix product of this item size can be planned with, FLOP/s."""
        for size, rate in sorted(self.flops_per_second):
            if itemsize <= size:
                return rate * self.efficiency
        return max(self.flops_per_second)[1] * self.efficiency

    @property
    def beside_share(self) -> float:
        """The share of its rate that a kernel keeps while a collective runs and takes some of the cores.

        It is 1 here, as in XLA's estimates and in the simulator. `plan.step_seconds` uses it outside loops.
        """
        return 1.0

    def link(self, ranks: Sequence[int]) -> Link:
        """The innermost level of the network that connects all `ranks` of a group.

        Raises:
          PlacementError: if no level does.
        """
        for link in self.links:
            if len({r // link.devices for r in ranks}) <= 1:
                return link
        raise PlacementError(
            Problem(
                kind="placement",
                where=f"planning for {self.name}",
                got=f"devices {min(ranks)} to {max(ranks)} in one group",
                legal=f"at most {self.links[-1].devices} devices, which its outermost level connects",
                why="no link is known that connects more",
                fix="a level of links more, with its bytes per second and its latency",
            )
        )

    def link_between(self, a: Sequence[int], b: Sequence[int]) -> Link:
        """The level of the network between the ranks of two placements."""
        return self.link([*a, *b])

    def product_seconds(
        self, batch: int, m: int, n: int, k: int, itemsize: float, *, exact: bool = False
    ) -> float:
        """The time of [batch, m, k] @ [batch, k, n], without its memory traffic.

        Arguments:
          itemsize: the bytes of an element of the wider operand.
          exact: whether float32 stays float32; otherwise the matrix units round it to TF32.
        """
        if not self.chip:
            return 2.0 * batch * m * n * k / self.flops(max(1, int(itemsize)))
        operands = next((name for size, name in _OPERANDS if itemsize <= size), "f64")
        if exact and operands == "f32":
            operands = VECTOR
        rates = self.flops_per_second, self.vector_flops_per_second
        return _measured_product(self.chip, *rates, batch, m, n, k, operands)

    def fused_seconds(self, batch: int, m: int, n: int, k: int, itemsize: float) -> float:
        """The time of several products in one kernel, as in attention; arguments as of `product_seconds`."""
        share = FUSED_SHARE if self.chip else 1.0
        return self.product_seconds(batch, m, min(n, k), max(n, k), itemsize) / share

    def collective_seconds(
        self, kind: str, wire_bytes: float, ranks: Sequence[int], groups: int = 1
    ) -> float:
        """The time of one collective.

        Arguments:
          kind: one of `sbp.rates.collectives.KINDS`.
          wire_bytes: what each device sends.
          ranks: the devices of one group.
          groups: the groups that run at the same time.
        """
        link, inner = self.link(ranks), self.links[0]
        share = sent_share(kind, len(ranks))
        whole = wire_bytes / share if share else 0.0
        if not self.chip:
            curves = [curve for of, curve in self.curves if of == kind] if link == inner else []
            if curves:
                return curve_seconds(curves, kind, whole, len(ranks), groups).seconds
            return link.latency_seconds + wire_bytes / link.bytes_per_second
        chip, domains = _connected(self.chip, inner, link), len({r // inner.devices for r in ranks})
        if kind == "permute":
            return collective_seconds(chip, kind, whole, 2, groups=groups, domains=min(domains, 2)).seconds
        return collective_seconds(chip, kind, whole, len(ranks), groups=groups, domains=domains).seconds


_OPERANDS = ((1, "f8"), (2, "bf16"), (4, "f32"))


@lru_cache(maxsize=1 << 16)
def _measured_product(
    chip: str,
    flops_per_second: tuple[tuple[int, float], ...],
    vector_flops_per_second: float,
    batch: int,
    m: int,
    n: int,
    k: int,
    operands: str,
) -> float:
    rated = _rated(chip, flops_per_second, vector_flops_per_second)
    return matmul_seconds(rated, m, n, k, batch=batch, operands=operands).seconds


@lru_cache(maxsize=64)
def _rated(name: str, flops_per_second: tuple[tuple[int, float], ...], vector_flops: float) -> Chip:
    """A chip with the peak rates of some hardware; without tables of products if they are not its own."""
    chip, rates = CHIPS[name], dict(flops_per_second)
    of = {operands: rates.get(size, 0.0) for size, operands in (*_OPERANDS, (8, "f64"))}
    given = {operands: rate or chip.matrix_flops[operands] for operands, rate in of.items()}
    tables = chip.tables if given == chip.matrix_flops else ""
    return replace(chip, tables=tables, matrix_flops=given, vector_flops=vector_flops)


@lru_cache(maxsize=64)
def _connected(name: str, inner: Link, link: Link) -> Chip:
    """A chip with the links of some hardware; without tables of collectives if the inner is not its own."""
    chip = CHIPS[name]
    own = (chip.link_bytes_per_second, chip.link_latency_seconds)
    return replace(
        chip,
        tables=chip.tables if own == (inner.bytes_per_second, inner.latency_seconds) else "",
        link_bytes_per_second=inner.bytes_per_second,
        link_latency_seconds=inner.latency_seconds,
        nic_bytes_per_second=link.bytes_per_second,
        nic_latency_seconds=link.latency_seconds,
    )


def hardware_of(data: Mapping[str, Any]) -> Hardware:
    """The hardware in a plan's JSON: the data of `dataclasses.asdict`, with lists for tuples."""
    return Hardware(
        **{k: x for k, x in data.items() if k not in ("flops_per_second", "links", "curves")},
        flops_per_second=tuple((size, rate) for size, rate in data["flops_per_second"]),
        links=tuple(Link(**link) for link in data["links"]),
        curves=tuple(
            (kind, CollectiveCurve(**c | {k: tuple(c[k]) for k in ("sizes", "seconds")}))
            for kind, c in data.get("curves", ())
        ),
    )


ANY = 1 << 62
"""The devices of a level of links without a limit."""


def hardware_of_chip(chip: Chip) -> Hardware:
    """The hardware of a chip of `sbp.rates`."""
    rates = chip.matrix_flops
    return Hardware(
        name=chip.name,
        flops_per_second=((1, rates["f8"]), (2, rates["bf16"]), (4, rates["f32"]), (8, rates["f64"])),
        vector_flops_per_second=chip.vector_flops,
        memory_bytes_per_second=chip.memory_bytes_per_second * MEMORY_SHARE,
        memory_bytes=chip.sheet_bytes,
        links=(
            Link(chip.domain_devices, chip.link_bytes_per_second, chip.link_latency_seconds),
            Link(ANY, chip.nic_bytes_per_second, chip.nic_latency_seconds),
        ),
        launch_seconds=LAUNCH_SECONDS,
        chip=chip.name,
    )


CATALOGUE: dict[str, Hardware] = {
    **{name: hardware_of_chip(chip) for name, chip in CHIPS.items()},
    # Forced host devices on two cores. Latency is what `python -m sbp calibrate` measures (a rendezvous of
    # threads); the link is set below what it measures, so that plans prefer few bytes on the wire, as on a
    # real network. They share the memory of a host, of which nothing is known.
    "cpu": Hardware("cpu", ((8, 25e9),), 2e9, 16e9, math.inf, (Link(ANY, 0.5e9, 100e-6),), 1.0, False, "cpu"),
}
# Nothing costs anything but bytes on the wire: a plan for it sends the least that any plan can.
BYTES_ONLY = Hardware(
    "bytes only", ((8, math.inf),), math.inf, math.inf, math.inf, (Link(ANY, 1.0, 0.0),), 1.0
)
PLATFORMS = {
    "gpu": "h100",
    "cuda": "h100",
}  # a JAX platform that is not a catalogue name, and what to plan it as


def hardware_for(kind: str) -> Hardware:
    """The catalogue entry for a placement of this kind.

    Raises:
      PlacementError: if the catalogue has no such kind.

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
                fix="Options(hardware=sbp.hardware.hardware_from('machine.toml')) with its rates",
            )
        )
    return CATALOGUE[name]
