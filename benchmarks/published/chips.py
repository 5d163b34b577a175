"""From the name of a chip in the table to the hardware that is planned for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from benchmarks.published.rows import RowError
from sbp.hardware.catalogue import Hardware, hardware_for
from sbp.rates.chips import CHIPS as CHIPS_OF_RATES
from sbp.rates.collectives import HostNetwork, collective_seconds, sent_share

# What a name begins with, the entry of the catalogue, and dense peaks of 16 and of 8 bits in TFLOP/s as
# vendors publish them, for shares of the peak. GB300 computes these types at the rate of GB200, B300 of B200.
CHIPS: dict[str, tuple[str, float, float]] = {
    "A100": ("a100", 312, 312),
    "H100": ("h100", 989, 1979),
    "H200": ("h200", 989, 1979),
    "GH200": ("h100", 989, 1979),
    "GB200": ("gb200", 2450, 4900),
    "GB300": ("gb200", 2450, 4900),
    "B200": ("b200", 2250, 4500),
    "B300": ("b200", 2250, 4500),
}
HOPPER = frozenset(["h100", "h200"])
# Memories and boards that differ from the catalogue's: by a word in the name.
MEMORIES = {"HBM2e": 2.4e12}
BOARD_WATTS = {"h100": 700.0, "h200": 700.0, "a100": 400.0}
SUSTAINED_SHARE = 0.87
"""Of the rate of short benchmarks, in products that go on for minutes: with numbers as training has them a
chip reaches its limit of power, and its clock falls. 257 TFLOP/s with normal numbers and 295 with zeros, 8192
cubed on A100 (H. He, "Strangely, Matrix Multiplications on GPUs Run Faster When Given 'Predictable' Data",
thonking.ai)."""
MOST_OF_PEAK = {("h100", 1): 0.709, ("h200", 1): 0.709}
"""Of the peak, the most that products reach, by chip and bytes of an operand: 1403 of 1979 TFLOP/s in 8 bits
on H100, the best of all shapes (S. Bekman, "Machine Learning Engineering", table of maximum achievable
matmul FLOPS). The rates are above the peak there, and cut at 0.85 of it; in 16 bits both agree (780, 795)."""
HOP_SECONDS = 14e-6
"""Of a step of a ring from host to host, as NCCL's own tuner has it (src/graph/tuning.cc: ring, network,
simple protocol). XLA's formula has 31 microseconds on Hopper, 21 on Blackwell."""
SENDING_CORES = 20
"""Streaming multiprocessors that collectives take while they run, which kernels beside them have not: of 132
that a H800 has, those which DeepSeek-V3 was trained with leave so many to it (arXiv:2412.19437, 3.2.2); NCCL
may take up to 32."""
NIC_BYTES_PER_SECOND = {"h100": 50e9}
"""400 Gb/s per device, as the reference design of DGX H100 has; `sbp.rates` has half of it."""


@dataclass(frozen=True, slots=True)
class SteadyHardware(Hardware):
    """A chip as it runs for hours, beside network cards of another rate.

    Arguments:
      clock: the share of its rates that matrix products have.
      nic_bytes_per_second: of the network card of each device; 0 for what `sbp.rates` says.
    """

    clock: float = 1.0
    nic_bytes_per_second: float = 0.0

    @property
    def beside_share(self) -> float:
        """What is left of the chip where a collective takes `SENDING_CORES` of it."""
        chip = CHIPS_OF_RATES.get(self.chip)
        return 1.0 if chip is None else 1.0 - SENDING_CORES / chip.cores

    def product_seconds(
        self, batch: int, m: int, n: int, k: int, itemsize: float, *, exact: bool = False
    ) -> float:
        """That of the chip, at its clock."""
        seconds = Hardware.product_seconds(self, batch, m, n, k, itemsize, exact=exact)
        most = MOST_OF_PEAK.get((self.chip, int(itemsize)))
        if most is not None:
            peak = CHIPS_OF_RATES[self.chip].matrix_flops["f8"]
            seconds = max(seconds, 2.0 * batch * m * n * k / (most * peak))
        return seconds / self.clock

    def collective_seconds(
        self, kind: str, wire_bytes: float, ranks: Sequence[int], groups: int = 1
    ) -> float:
        """That of the chip; between hosts, of the network card, and with the steps of NCCL."""
        chip, size = CHIPS_OF_RATES.get(self.chip), len(ranks)
        domains = len({r // chip.domain_devices for r in ranks}) if chip else 1
        if chip is None or domains == 1:
            return Hardware.collective_seconds(self, kind, wire_bytes, ranks, groups)
        chip = replace(chip, nic_bytes_per_second=self.nic_bytes_per_second or chip.nic_bytes_per_second)
        network = replace(HostNetwork.of(chip), round_trip_seconds=HOP_SECONDS)
        whole = wire_bytes / sent_share(kind, size)
        if kind == "permute":
            return network.seconds(kind, whole, 2, 2)
        between = network.seconds(kind, whole, size, domains)
        local = size // domains
        inside = collective_seconds(chip, kind, whole, local, groups=groups).seconds if local > 1 else 0.0
        return max(between, inside)


def _entry(chip: str) -> tuple[str, float, float]:
    for name, entry in CHIPS.items():
        if chip.upper().startswith(name):
            return entry
    raise RowError(f"chip {chip!r} is none of {', '.join(CHIPS)}")


def kind_of(chip: str) -> str:
    """The catalogue's name.

    >>> kind_of("H100-SXM-80GB"), kind_of("GB300")
    ('h100', 'gb200')
    """
    return _entry(chip)[0]


def peak_flops(chip: str, precision: str) -> float:
    """The published dense peak, FLOP/s."""
    _, wide, narrow = _entry(chip)
    return 1e12 * (narrow if precision == "fp8" else wide)


def hardware_of(chip: str) -> SteadyHardware:
    """What a chip is planned as: the catalogue's entry, with what the name says is different.

    Under a cap on power the clock falls: power grows with about its square, voltage
    following it in part.
    """
    kind = kind_of(chip)
    entry = hardware_for(kind)
    memory = [rate for word, rate in MEMORIES.items() if word.lower() in chip.lower()]
    watts = re.search(r"(\d+)W\b", chip)
    capped = watts is not None and kind in BOARD_WATTS
    clock = min(1.0, float(watts[1]) / BOARD_WATTS[kind]) ** 0.5 if capped and watts else 1.0
    known = {f.name: getattr(entry, f.name) for f in fields(entry)}
    known["memory_bytes_per_second"] = min([entry.memory_bytes_per_second, *memory])
    nic = NIC_BYTES_PER_SECOND.get(kind, 0.0)
    if nic:
        known["links"] = (*entry.links[:-1], replace(entry.links[-1], bytes_per_second=nic))
    return SteadyHardware(**known, clock=clock * SUSTAINED_SHARE, nic_bytes_per_second=nic)
