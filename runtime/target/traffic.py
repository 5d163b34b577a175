"""A collective of a schedule -> over which wires its bytes go, and how long it takes."""

from dataclasses import dataclass

from sbp.rates.chips import Chip
from sbp.rates.collectives import collective_seconds
from sbp.rates.tables import Timing
from sbp.runtime.hlo.groups import Groups, Moves, groups_of, moves_of
from sbp.runtime.hlo.meter import collective_of
from sbp.runtime.hlo.parser import Computation, Instruction, Module
from sbp.runtime.target.events import NETWORK, NVLINK

# What the meter calls a collective, where the rates have no word of their own for it. How much a ragged
# all-to-all sends is known at run time only: its bound.
_KINDS = {"ragged_all_to_all": "all_to_all", "send": "permute"}


@dataclass(frozen=True, slots=True)
class Domains:
    """Which devices NVLink connects.

    Arguments:
      devices: of a domain; they have consecutive ranks.
      ranks: of the device ids of a program; () if an id is its rank.
    """

    devices: int
    ranks: tuple[int, ...] = ()

    def of(self, device: int) -> int:
        """The domain of a device id.

        >>> Domains(8).of(9), Domains(8, (0, 8)).of(1)
        (1, 1)
        """
        return (self.ranks[device] if self.ranks else device) // self.devices


@dataclass(frozen=True, slots=True)
class WireTraffic:
    """What a collective sends, and where.

    Arguments:
      kind: as in `sbp.rates.collectives.KINDS`.
      bytes: the whole tensor on one device: the output of an all-gather, else the input.
      ranks: devices of a group; groups: that there are; domains: NVLink domains that one of them is in.
      pattern: of a permute.
    """

    kind: str
    bytes: int
    ranks: int
    groups: int
    domains: int
    pattern: str = "ring"

    @property
    def resource(self) -> str:
        """The wires that it takes."""
        return NVLINK if self.domains == 1 else NETWORK

    def timing(self, chip: Chip) -> Timing:
        return collective_seconds(
            chip,
            self.kind,
            self.bytes,
            self.ranks,
            groups=self.groups,
            domains=self.domains,
            pattern=self.pattern,
        )


def traffic_of(
    module: Module, computation: Computation, instruction: Instruction, domains: Domains
) -> WireTraffic | None:
    """What an instruction sends; None for one that is no collective, and for one that sends nothing."""
    found = collective_of(module, computation, instruction)
    if found is None:
        return None
    kind = _KINDS.get(found.kind, found.kind)
    moves = moves_of(instruction)
    if moves is None and kind == "permute" and "replica_groups" not in instruction.attributes:
        moves = ()
    if moves is not None:
        crossing = any(domains.of(a) != domains.of(b) for a, b in moves)
        return WireTraffic(kind, found.payload_bytes, 2, 1, 1 + crossing, _pattern(moves))
    groups = groups_of(instruction, module.header)
    ranks, spanned = _widest(groups, domains)
    return WireTraffic(kind, found.payload_bytes, ranks, len(groups), spanned, "other")


def _widest(groups: Groups, domains: Domains) -> tuple[int, int]:
    """(devices, domains) of the group that is in most domains."""
    spanned, ranks = max((len({domains.of(i) for i in group}), len(group)) for group in groups)
    return ranks, spanned


def _pattern(moves: Moves) -> str:
    """The measured pattern that pairs come nearest to."""
    sent = {(a, b) for a, b in moves if a != b}
    if all((b, a) in sent for a, b in sent):
        return "pairs"
    return "ring" if {a for a, _ in sent} & {b for _, b in sent} else "other"
