"""Which stage feeds which: of the pieces, for the schedule."""

from collections.abc import Sequence

from sbp.errors import AnnotationError, Problem
from sbp.passes.pipeline.slots import Cut, SlotKind
from sbp.passes.program.role import Part, Phase
from sbp.passes.schedule.dataflow import Edge

BACKWARD = (Phase.INPUT, Phase.WEIGHT)


def flows(cuts: Sequence[Cut]) -> set[tuple[Part, Part]]:
    """Which part of a stage makes what a part of another one reads, for every micro-batch."""
    makers: dict[tuple[int, object], Part] = {}
    for p, c in enumerate(cuts):
        for piece in c.pieces:
            makers.update({(p, w.slot): piece.part for w in piece.writes if w.slot.kind is SlotKind.EACH})
        for q, other in enumerate(cuts):
            for v, slot in other.micro_receives.items():
                if v in c.micro_sends and (p, c.micro_sends[v]) in makers:
                    makers[q, slot] = makers[p, c.micro_sends[v]]
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
    """The edges between stages, and whether their backward passes wait for each other.

    Raises:
      AnnotationError: for a backward op of a stage that waits for that of an earlier one.
    """
    found: dict[tuple[int, int], bool] = {}
    for made, read in sorted(flows(cuts)):
        assert made.phase is not Phase.WEIGHT or made.at == read.at, f"{read} waits for {made}"
        back = read.phase in BACKWARD and made.at > read.at
        if (made.at > read.at and not back) or (made.phase in BACKWARD and made.at < read.at):
            raise AnnotationError(_against(cuts, made, read))
        pair = min(made.at, read.at), max(made.at, read.at)
        found[pair] = found.get(pair, False) or back
    return tuple(Edge(s, t, gradient) for (s, t), gradient in sorted(found.items()))


def _against(cuts: Sequence[Cut], made: Part, read: Part) -> Problem:
    places = {p.part: c.physical.placement for c in cuts for p in c.pieces}
    return Problem(
        "annotation",
        f"stage {read.at} on {places[read]}",
        f"ops of its backward pass that wait for that of stage {made.at} on {places[made]}",
        "forward from stage to stage, and backward the other way",
        "a schedule runs the backward pass of a stage once per micro-batch, after those of later stages",
        "checkpoint each stage separately; do work on gradients of several stages after sbp.microbatch",
    )


def trains(cuts: Sequence[Cut]) -> bool:
    """Whether there is a backward pass."""
    return any(piece.part.phase in BACKWARD for c in cuts for piece in c.pieces)
