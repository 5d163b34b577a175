"""What must hold of a program that has been cut, checked where `Options(check=True)` asks for it."""

from collections import Counter
from collections.abc import Sequence

from sbp.layout import at_rest
from sbp.passes.physical.program import Box, Step
from sbp.passes.physical.program import reads as reads_of
from sbp.passes.physical.program import writes as writes_of
from sbp.passes.pipeline.cut import border_of
from sbp.passes.pipeline.edges import edges_of, flows
from sbp.passes.pipeline.slots import Cut, Piece, Slot, SlotKind
from sbp.passes.pipeline.stages import Stages
from sbp.passes.program.graph import Const
from sbp.passes.program.role import Part, Phase
from sbp.passes.schedule.actions import Schedule
from sbp.passes.schedule.communication import find_deadlock

OUTSIDE = (Phase.BEFORE, Phase.AFTER)


def check_stages(stages: Stages) -> None:
    """Asserts it of both ways to cut the program."""
    for merged in (True, False):
        check_cuts(stages.cuts(merged))


def check_schedule(stages: Stages, schedule: Schedule | None) -> None:
    """Asserts that a schedule is of these stages, and that nothing waits for ever."""
    if schedule is None:
        return
    assert schedule.rank_of == stages.stages, f"{schedule.name} has its stages on {schedule.rank_of}"
    assert schedule.microbatches == stages.microbatches, f"{schedule.name} has other micro-batches"
    circle = find_deadlock(schedule, edges_of(stages.cuts(not schedule.splits)))
    assert circle is None, f"{schedule.name} waits in a circle: {circle}"


def check_cuts(cuts: Sequence[Cut]) -> None:
    """Asserts what every later pass counts on, of all placements."""
    for c in cuts:
        check_steps(c)
        check_versions(c)
        check_slots(c)
    check_sent(cuts)


def check_steps(cut: Cut) -> None:
    """Every step of the placement's program is in one piece, no more and no less."""
    loop = border_of(cut.physical)
    every = (*(s for s in cut.physical.steps if s is not loop), *(() if loop is None else loop.bodies[0]))
    found = [s for piece in cut.pieces for s in piece.steps]
    lost = Counter(map(_identity, every)) != Counter(map(_identity, found))
    assert not lost, f"steps of {cut.physical.placement} that are lost or done twice"
    moves = sum(isinstance(s, Box) for s in every)
    assert moves == sum(isinstance(s, Box) for s in found), "moves are lost"
    parts = [piece.part for piece in cut.pieces]
    assert len(set(parts)) == len(parts), f"two pieces of one part: {parts}"


def _identity(step: Step) -> int:
    """Of a step; one number for all moves. A step that a cut takes out of its bucket is a new object."""
    return 0 if isinstance(step, Box) else id(step.node)


def check_versions(cut: Cut) -> None:
    """In a piece, everything is read from a slot, is a number, or is made before it is used."""
    for piece in cut.pieces:
        known = {r.version for r in piece.reads} | {version for version, _ in piece.numbers}
        for step in piece.steps:
            missing = [v for v in reads_of(step) if v not in known]
            assert not missing, f"{piece.part}: {step} reads {missing}, which is not there"
            known.update(writes_of(step))
        for w in piece.writes:
            there = isinstance(w.operand, Const) or (w.operand, w.nd) in known
            assert there, f"{piece.part} writes {w.operand} as {w.nd}, which it does not have"


def check_slots(cut: Cut) -> None:
    """Whatever a piece reads has been written before, by one piece alone, or comes from elsewhere."""
    given = {*cut.arguments, *cut.closure, *cut.receives.values(), *cut.micro_receives.values()}
    writers: dict[Slot, list[Part]] = {}
    for piece in cut.pieces:
        for w in piece.writes:
            writers.setdefault(w.slot, []).append(piece.part)
    for slot, parts in writers.items():
        inside = [p for p in parts if p.phase not in OUTSIDE]
        most = 1 if slot.kind is not SlotKind.CARRY else 2
        assert len(parts) <= most and len(inside) <= 1, f"{slot} is written by {parts}"
    for piece in cut.pieces:
        for r in piece.reads:
            if r.slot not in given:
                assert r.slot in writers, f"{piece.part} reads {r.slot}, which nobody writes"
                assert any(_before(p, piece) for p in writers[r.slot]), (
                    f"{piece.part} reads {r.slot} too early"
                )
    for slot in (*cut.results, *cut.sends.values(), *cut.micro_sends.values()):
        assert slot in writers or slot in given, f"{slot} leaves, but nobody writes it"


_TIMES = {Phase.BEFORE: 0, Phase.FORWARD: 1, Phase.INPUT: 2, Phase.WEIGHT: 2, Phase.AFTER: 3}


def _before(part: Part, piece: Piece) -> bool:
    """Whether a part can have run when a piece does: the stages say in which order within a phase."""
    a, b = _TIMES[part.phase], _TIMES[piece.part.phase]
    if a != b or part == piece.part:
        return a <= b
    if a != _TIMES[Phase.INPUT]:
        return part.at <= piece.part.at
    return (-part.at, part.phase is Phase.WEIGHT) <= (-piece.part.at, piece.part.phase is Phase.WEIGHT)


def check_sent(cuts: Sequence[Cut]) -> None:
    """What a placement receives, one other placement sends, and it lies as an array can."""
    for q, c in enumerate(cuts):
        for v in c.receives:
            assert sum(v in other.sends for p, other in enumerate(cuts) if p != q) == 1, (
                f"value {v} is not sent"
            )
        for v in c.micro_receives:
            assert sum(v in other.micro_sends for p, other in enumerate(cuts) if p != q) == 1, (
                f"{v} is not passed"
            )
        hierarchy, values = c.physical.placement.shape, c.physical.graph
        for slot in (
            *c.receives.values(),
            *c.micro_receives.values(),
            *c.sends.values(),
            *c.micro_sends.values(),
        ):
            assert at_rest(slot.shape(values), slot.nd, hierarchy) == slot.nd, f"no array lies as {slot}"
    for made, read in flows(cuts):
        forward = made.at < read.at and made.phase is Phase.FORWARD
        assert forward or read.phase not in (Phase.FORWARD,), f"{read} waits for {made}"
