"""Which stage feeds which: of the pieces, for the schedule."""

from __future__ import annotations

from collections.abc import Sequence

from sbp.passes.pipeline.order import Part, Phase
from sbp.passes.pipeline.slots import Cut, Kind
from sbp.passes.schedule.dataflow import Edge

BACKWARD = (Phase.INPUT, Phase.WEIGHT)


def flows(cuts: Sequence[Cut]) -> set[tuple[Part, Part]]:
    """Which part of a stage makes what a part of another one reads, for every micro-batch."""
    makers: dict[tuple[int, object], Part] = {}
    for p, c in enumerate(cuts):
        for piece in c.pieces:
            makers.update({(p, w.slot): piece.part for w in piece.writes if w.slot.kind is Kind.EACH})
        for q, other in enumerate(cuts):
            for v, slot in other.fed.items():
                if v in c.passed and (p, c.passed[v]) in makers:
                    makers[q, slot] = makers[p, c.passed[v]]
    found = set[tuple[Part, Part]]()
    for p, c in enumerate(cuts):
        for piece in c.pieces:
            for r in piece.reads:
                made = makers.get((p, r.slot))
                inside = piece.part.phase not in (Phase.BEFORE, Phase.AFTER)
                if made is not None and inside and made.at != piece.part.at:
                    found.add((made, piece.part))
    return found


def edges_of(cuts: Sequence[Cut]) -> tuple[Edge, ...]:
    """The edges between stages, and whether gradients come back along them."""
    between = flows(cuts)
    forward = {(a.at, b.at) for a, b in between if a.phase is Phase.FORWARD and a.at < b.at}
    back = {(b.at, a.at) for a, b in between if a.phase in BACKWARD and b.phase in BACKWARD and b.at < a.at}
    return tuple(Edge(s, t, (s, t) in back) for s, t in sorted(forward | back))


def trains(cuts: Sequence[Cut]) -> bool:
    """Whether there is a backward pass."""
    return any(piece.part.phase in BACKWARD for c in cuts for piece in c.pieces)
