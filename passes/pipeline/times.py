"""How long the pieces of a pipeline take, estimated, and what is on the way between placements.

Words: docs/glossary.md.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sbp.passes.boxing.links import Network
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.program import Physical
from sbp.passes.pipeline.slots import Cut, Piece
from sbp.passes.pipeline.stages import Stages
from sbp.passes.plan.cost import local_bytes
from sbp.passes.program.role import Part, Phase
from sbp.passes.schedule.times import Times
from sbp.signature import NdSbp

PieceSeconds: TypeAlias = Callable[[Physical, Piece, Network], float]
"""How long a piece takes, once."""


def overlapped_seconds(physical: Physical, piece: Piece, network: Network) -> float:
    """The estimated time of a piece, once, as the one program that it is compiled to."""
    kept = [(w.operand, w.nd) for w in piece.writes if isinstance(w.operand, int)]
    return Evaluator(physical, network).part_seconds(piece.steps, kept)


def serial_seconds(physical: Physical, piece: Piece, network: Network) -> float:
    """The same with nothing beside anything."""
    return Evaluator(physical, network).seconds(piece.steps)


def outside_seconds(
    stages: Stages, cuts: Sequence[Cut], piece_seconds: PieceSeconds = overlapped_seconds
) -> float:
    """The estimated time before and after the loop, of the placement that takes longest."""
    found = [0.0]
    for plan, c in zip(stages.plans, cuts, strict=True):
        network = Network(plan.placement, plan.hardware)
        outside = [p for p in c.pieces if p.part.phase in (Phase.BEFORE, Phase.AFTER)]
        found.append(sum(piece_seconds(c.physical, p, network) for p in outside))
    return max(found)


def estimated_times(
    stages: Stages, cuts: Sequence[Cut], piece_seconds: PieceSeconds = overlapped_seconds
) -> Times:
    """The estimated times of all actions; a backward that is one piece counts as input gradient."""
    seconds: dict[Part, float] = {}
    for plan, c in zip(stages.plans, cuts, strict=True):
        network = Network(plan.placement, plan.hardware)
        seconds.update({piece.part: piece_seconds(c.physical, piece, network) for piece in c.pieces})
    sent: dict[tuple[int, int], float] = {}
    for way in ways(stages, cuts):
        if way.inside:
            for pair in _pairs(stages.stages, way.source, way.target):
                sent[pair] = sent.get(pair, 0.0) + way.seconds(stages)
    phases = (Phase.FORWARD, Phase.INPUT, Phase.WEIGHT)
    every = [tuple(seconds.get(Part(phase, s), 0.0) for s in range(len(stages.stages))) for phase in phases]
    return Times(every[0], every[1], every[2], transfers=sent)


@dataclass(frozen=True, slots=True)
class TransferTime:
    """A value on its way from a placement to another one.

    Arguments:
      value, source, target: the value, and the positions of the placements.
      inside: whether it goes for every micro-batch.
      before, after: how it lies on each.
      wire_bytes: what a device of the source sends, once.
    """

    value: int
    source: int
    target: int
    inside: bool
    before: NdSbp
    after: NdSbp
    wire_bytes: float

    def seconds(self, stages: Stages) -> float:
        """The estimated time on the way, once."""
        source, target = (stages.plans[i] for i in (self.source, self.target))
        link = source.hardware.link_between(source.placement.ranks, target.placement.ranks)
        return link.latency_seconds + self.wire_bytes / link.bytes_per_second


def ways(stages: Stages, cuts: Sequence[Cut]) -> Iterator[TransferTime]:
    """All that is sent, once and for every micro-batch."""
    for p, c in enumerate(cuts):
        size = stages.plans[p].placement.size
        for q, other in enumerate(cuts):
            there = stages.plans[q].placement
            for inside, given, taken in (
                (False, c.sends, other.receives),
                (True, c.micro_sends, other.micro_receives),
            ):
                for v in given:
                    if q != p and v in taken:
                        value = c.subgraph.graph.values[v]
                        shard = local_bytes(value.shape, value.dtype, taken[v].nd, there.shape)
                        yield TransferTime(
                            v, p, q, inside, given[v].nd, taken[v].nd, shard * there.size / size
                        )


def _pairs(ranks: Sequence[int], p: int, q: int) -> list[tuple[int, int]]:
    """The stages of two placements, in both roles."""
    return [(s, t) for s, a in enumerate(ranks) for t, b in enumerate(ranks) if a == p and b == q]
