"""How long one collective takes: measured inside an NVLink domain, by XLA's formula across domains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sbp.rates.chips import Chip
from sbp.rates.tables import CollectiveCurve, Timing, collective_curves

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")

LIKE: Mapping[str, str] = {"ragged_all_to_all": "all_to_all"}
"""Kinds that take as long as one of these."""

CHUNK_BYTES = 4 << 20
HEADERS = 1.025
TREE_SHARE = 0.92
"""Of a ring's rate that NCCL's tuner expects of its trees."""


@dataclass(frozen=True, slots=True)
class HostNetwork:
    """HostNetwork cards between hosts, one for each device, as XLA's speed-of-light model of NCCL has them.

    The formula and its constants are those of xla/service/gpu/model/sol_gpu_cost_model (Apache-2.0). It knows
    rings alone; NCCL all-reduces small tensors along two binary trees (Sanders, Speck and Traeff, 2009),
    whose steps grow with the logarithm of the hosts, and takes what is faster.

    Arguments:
      bytes_per_second: of one card, one way.
      prepare_seconds: of each 4 MiB that are sent.
      round_trip_seconds: of each step of a ring.
      launch_seconds: of a collective.
      memory_bytes_per_second: of a device.
    """

    bytes_per_second: float
    prepare_seconds: float
    round_trip_seconds: float
    launch_seconds: float
    memory_bytes_per_second: float

    @classmethod
    def of(cls, chip: Chip) -> HostNetwork:
        """That of hosts with such chips."""
        prepare, round_trip = (2e-6, 21e-6) if chip.capability >= (10, 0) else (6e-6, 31e-6)
        launch, memory = chip.nic_latency_seconds, chip.memory_bytes_per_second
        return cls(chip.nic_bytes_per_second, prepare, round_trip, launch, memory)

    def seconds(self, kind: str, transfer_bytes: float, ranks: int, domains: int) -> float:
        """Of a collective over `domains` hosts, or NVLink domains, with as many devices in each."""
        found = self.ring_seconds(kind, transfer_bytes, ranks, domains)
        if kind == "all_reduce":
            along_trees = self._tree_seconds(transfer_bytes * domains / ranks, domains)
            found = min(found, self._beside_seconds(kind, transfer_bytes, ranks) + along_trees)
        return found

    def ring_seconds(self, kind: str, transfer_bytes: float, ranks: int, domains: int) -> float:
        """The same by XLA's formula alone, which has no trees."""
        cards = ranks / domains
        message, steps = {
            "all_reduce": (transfer_bytes / ranks, 2 * (ranks - 1) / cards),
            "all_to_all": (transfer_bytes / (ranks - 1), cards * (domains - 1)),
            # Each device sends to one other, and those that cross do so at the same time.
            "permute": (transfer_bytes, 1.0),
        }.get(kind, (transfer_bytes / ranks, (ranks - 1) / cards))
        step = HEADERS * message / self.bytes_per_second
        step += math.ceil(message / CHUNK_BYTES) * self.prepare_seconds + self.round_trip_seconds
        return self._beside_seconds(kind, transfer_bytes, ranks) + steps * step

    def _beside_seconds(self, kind: str, transfer_bytes: float, ranks: int) -> float:
        """Of the launch, and of memory."""
        # How often XLA counts the tensor as read or written in the memory of a device.
        touched = {"all_reduce": 2.0, "all_to_all": 2.0, "permute": 3.0}.get(kind, 3 - 1 / ranks)
        return self.launch_seconds + touched * transfer_bytes / self.memory_bytes_per_second

    def _tree_seconds(self, card_bytes: float, domains: int) -> float:
        """Up and down both trees, of so many bytes for each card; chunks follow each other."""
        each = self.prepare_seconds + self.round_trip_seconds
        rate = HEADERS / (TREE_SHARE * self.bytes_per_second) + self.prepare_seconds / CHUNK_BYTES
        return 2 * ((domains - 1).bit_length() * each + card_bytes * rate)


def collective_seconds(
    chip: Chip,
    kind: str,
    transfer_bytes: float,
    ranks: int,
    *,
    groups: int = 1,
    domains: int = 1,
    pattern: str = "ring",
) -> Timing:
    """How long one collective takes, from its launch to its end.

    The tables were measured in float32; reductions of other types of as many bytes take about as long.

    Arguments:
      kind: one of KINDS.
      transfer_bytes: the whole tensor on one device: the output of an all-gather, else the input.
      ranks: devices per group.
      groups: groups at the same time.
      domains: NVLink domains that one group has devices in, the same number in each.
      pattern: of a permute: "ring" (some send and receive), "pairs" (two and two exchange), "other" (each
        device sends or receives, none does both).

    >>> from sbp.rates.chips import CHIPS
    >>> found = collective_seconds(CHIPS["h100"], "all_reduce", 2**30, 8)
    >>> round(found.seconds * 1e3, 2), found.source
    (4.72, 'measured')
    """
    local = max(1, ranks // domains)
    inside = _inside(chip, kind, transfer_bytes, ranks if kind == "permute" else local, groups, pattern)
    if domains == 1:
        return inside
    between = HostNetwork.of(chip).seconds(kind, transfer_bytes, ranks, domains)
    # The parts of a hierarchical collective overlap, chunk by chunk: the slower of the two counts.
    return Timing(max(between, inside.seconds if local > 1 else 0.0), "formula")


def sent_share(kind: str, ranks: int) -> float:
    """What each device sends of a collective along a ring, as a share of the whole tensor.

    >>> sent_share("all_reduce", 8), sent_share("permute", 8)
    (1.75, 1.0)
    """
    others = (ranks - 1) / max(1, ranks)
    return {"all_reduce": 2 * others, "permute": 1.0}.get(kind, others)


def _inside(chip: Chip, kind: str, transfer_bytes: float, ranks: int, groups: int, pattern: str) -> Timing:
    """In one NVLink domain."""
    curves = collective_curves().get((chip.tables, kind, pattern if kind == "permute" else ""))
    if not curves and kind == "permute":
        curves = collective_curves().get((chip.tables, kind, "ring"))
    if not curves:
        return Timing(_by_link(chip, kind, transfer_bytes, ranks), "formula")
    return curve_seconds(curves, kind, transfer_bytes, ranks, groups)


def curve_seconds(
    curves: Sequence[CollectiveCurve], kind: str, transfer_bytes: float, ranks: int, groups: int = 1
) -> Timing:
    """How long a collective takes by the measured curves of its kind: between group sizes, log-linear.

    Arguments:
      curves: at least one.
      kind, transfer_bytes, ranks, groups: as of `collective_seconds`.
    """
    if kind == "permute":  # measured with all devices; each sends to one other, whatever their number
        return Timing(max(curves, key=lambda c: c.ranks).at(transfer_bytes), "measured")
    below = [c for c in curves if c.ranks <= ranks]
    above = [c for c in curves if c.ranks >= ranks]
    low = _best(below, groups) if below else _best(above, groups, least=True)
    high = _best(above, groups, least=True) if above else low
    if low.ranks == ranks or high.ranks == low.ranks:
        return Timing(low.at(transfer_bytes), "measured" if low.ranks == ranks else "scaled")
    part = math.log(ranks / low.ranks) / math.log(high.ranks / low.ranks)
    return Timing(low.at(transfer_bytes) ** (1 - part) * high.at(transfer_bytes) ** part, "scaled")


def _best(curves: list[CollectiveCurve], groups: int, *, least: bool = False) -> CollectiveCurve:
    """Of the nearest group size, the curve with most nearly so many groups."""
    size = (min if least else max)(c.ranks for c in curves)
    return min((c for c in curves if c.ranks == size), key=lambda c: abs(math.log(c.groups / groups)))


def _by_link(chip: Chip, kind: str, transfer_bytes: float, ranks: int) -> float:
    """A ring over NVLink: its latency, and what one device sends at the rate of the link."""
    return chip.link_latency_seconds + sent_share(kind, ranks) * transfer_bytes / chip.link_bytes_per_second
