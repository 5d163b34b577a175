"""How long the pieces of a pipeline take, estimated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sbp import compat
from sbp.passes.boxing import Boxings, Network
from sbp.passes.physical import Physical, total_seconds
from sbp.passes.pipeline.chain import Stages
from sbp.passes.pipeline.order import Part, Phase
from sbp.passes.pipeline.slots import Cut, Piece
from sbp.passes.schedule.times import Times


def piece_seconds(physical: Physical, piece: Piece, boxings: Boxings) -> float:
    """The estimated time of a piece, once."""
    return total_seconds(replace(physical, steps=piece.steps), boxings)


def outside_seconds(stages: Stages, cuts: Sequence[Cut]) -> float:
    """The estimated time before and after the loop, of the placement that takes longest."""
    found = [0.0]
    for plan, c in zip(stages.plans, cuts, strict=True):
        boxings = Boxings(Network(plan.placement, plan.hardware))
        outside = [p for p in c.pieces if p.part.phase in (Phase.BEFORE, Phase.AFTER)]
        found.append(sum(piece_seconds(c.physical, p, boxings) for p in outside))
    return max(found)


def estimated_times(stages: Stages, cuts: Sequence[Cut]) -> Times:
    """The estimated times of all actions; a backward that is one piece counts as input gradient."""
    seconds: dict[Part, float] = {}
    sent: dict[tuple[int, int], float] = {}
    for plan, c in zip(stages.plans, cuts, strict=True):
        boxings = Boxings(Network(plan.placement, plan.hardware))
        seconds.update({piece.part: piece_seconds(c.physical, piece, boxings) for piece in c.pieces})
    for p, c in enumerate(cuts):
        for q, other in enumerate(cuts):
            values = [v for v in c.passed if v in other.fed]
            size = sum(_bytes(c.physical, v) for v in values)
            link = stages.plans[p].hardware.links[-1]
            if values:
                each = size / min(stages.plans[p].placement.size, stages.plans[q].placement.size)
                for s, t in _pairs(stages.stages, p, q):
                    sent[s, t] = link.latency_seconds + each / link.bytes_per_second
    phases = (Phase.FORWARD, Phase.INPUT, Phase.WEIGHT)
    every = [tuple(seconds.get(Part(phase, s), 0.0) for s in range(len(stages.stages))) for phase in phases]
    return Times(every[0], every[1], every[2], transfers=sent)


def _pairs(ranks: Sequence[int], p: int, q: int) -> list[tuple[int, int]]:
    """The stages of two placements, in both roles."""
    return [(s, t) for s, a in enumerate(ranks) for t, b in enumerate(ranks) if a == p and b == q]


def _bytes(physical: Physical, v: int) -> float:
    value = physical.graph.values[v]
    return float(math.prod(value.shape) * compat.itemsize(value.dtype))
