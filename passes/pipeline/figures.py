"""What the stages of a pipeline cost, estimated: seconds of their actions, and bytes that they hold."""

from dataclasses import dataclass

from sbp.passes.explain.plan import PlaceFigures, StageFigures
from sbp.passes.physical.fusing import ShardSizes
from sbp.passes.physical.memory import peak
from sbp.passes.pipeline.cut import border_of
from sbp.passes.pipeline.slots import Cut, How, Piece, Slot, SlotKind
from sbp.passes.pipeline.stages import Stages
from sbp.passes.pipeline.times import estimated_times
from sbp.passes.plan.cost import local_bytes
from sbp.passes.program.role import Part, Phase
from sbp.passes.schedule.actions import Schedule
from sbp.passes.schedule.memory import Footprint, peaks
from sbp.passes.schedule.times import Times


@dataclass(frozen=True)
class Figures:
    """All stages and placements of a program, and the times that follow from them."""

    stages: tuple[StageFigures, ...]
    places: tuple[PlaceFigures, ...]
    times: Times

    @property
    def footprint(self) -> Footprint:
        """What a micro-batch leaves on each stage."""
        return Footprint(
            tuple(s.residual_bytes for s in self.stages), tuple(s.for_weights_bytes for s in self.stages)
        )

    def memory(self, schedule: Schedule) -> tuple[float, ...]:
        """The peak per device of each placement with a schedule, bytes."""
        held = peaks(schedule, self.footprint)
        return tuple(max(p.outside_bytes, p.steady_bytes + h) for p, h in zip(self.places, held, strict=True))


def figures_of(stages: Stages) -> Figures:
    """The figures of a program with micro-batches."""
    cuts = stages.cuts(False)
    times = estimated_times(stages, cuts)
    sizes = [Sizes(c) for c in cuts]
    found = []
    for s, place in enumerate(stages.stages):
        residual, late = sizes[place].residuals(s)
        seconds = times.forward[s], times.input_gradient[s], times.weight_gradient[s]
        working = sizes[place].working_of(s)
        found.append(StageFigures(place, *seconds, residual, late, sizes[place].weights(s), *working))
    places = [
        size.place(plan.memory_bytes, stages.microbatches)
        for size, plan in zip(sizes, stages.plans, strict=True)
    ]
    return Figures(tuple(found), tuple(places), times)


class Sizes:
    """Bytes per device of what lies in the slots of a placement."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.pieces = {p.part: p for p in cut.pieces}
        loop = border_of(cut.physical)
        self.stacks = set[int]() if loop is None else set(loop.node.outputs)
        self.backward = [p for p in cut.pieces if p.part.phase in (Phase.INPUT, Phase.WEIGHT)]
        self.inside = [*self.backward, *(p for p in cut.pieces if p.part.phase is Phase.FORWARD)]

    def of(self, slot: Slot) -> float:
        """The bytes in a slot; those of all micro-batches lie in one each."""
        if slot.value < 0:
            return 8.0
        value, hierarchy = self.cut.physical.graph.values[slot.value], self.cut.physical.placement.shape
        each = slot.kind is SlotKind.EACH and slot.value in self.stacks
        return local_bytes(value.shape[1:] if each else value.shape, value.dtype, slot.nd, hierarchy)

    def sum(self, slots: set[Slot]) -> float:
        """The bytes in several."""
        return sum(self.of(s) for s in sorted(slots, key=lambda s: s.value))

    def residuals(self, stage: int) -> tuple[float, float]:
        """What a stage's forward keeps for the backward, and what is left of it for the last part of that."""
        forward, late = (self.pieces.get(Part(p, stage)) for p in (Phase.FORWARD, Phase.WEIGHT))
        kept = _each(forward, True) & {slot for p in self.backward for slot in _each(p, False)}
        left = _each(late, False) & (kept | _each(self.pieces.get(Part(Phase.INPUT, stage)), True))
        return self.sum(kept), self.sum(left)

    def weights(self, stage: int) -> float:
        """The bytes of the weights that the forward of a stage reads, equal for all micro-batches."""
        piece = self.pieces.get(Part(Phase.FORWARD, stage))
        return 0.0 if piece is None else self.sum(_whole(piece))

    def place(self, whole_bytes: float, microbatches: int) -> PlaceFigures:
        """What the placement holds but for micro-batches."""
        steady = {*self.cut.arguments, *self.cut.closed, *self.cut.received.values()}
        for p in self.inside:
            steady |= {r.slot for r in p.reads if r.slot.kind is not SlotKind.EACH}
            steady |= {w.slot for w in p.writes if w.slot.kind is SlotKind.CARRY}
        working = max((self.working(p) for p in self.inside), default=0.0)
        # Its plan has what is sent and received for all micro-batches as one tensor.
        stacks = {*self.cut.fed.values(), *self.cut.passed.values()}
        outside = whole_bytes - microbatches * self.sum(stacks)
        return PlaceFigures(self.sum(steady), working, max(outside, self.sum(steady)))

    def working_of(self, stage: int) -> tuple[float, float, float]:
        """The most that a stage's forward, the gradients for others and the rest of the backward take."""
        parts = (self.pieces.get(Part(p, stage)) for p in (Phase.FORWARD, Phase.INPUT, Phase.WEIGHT))
        forward, inputs, weights = (0.0 if piece is None else self.working(piece) for piece in parts)
        return forward, inputs, weights

    def working(self, piece: Piece) -> float:
        """The most that a piece's own tensors take while it runs."""
        kept = [(w.operand, w.nd) for w in piece.writes if isinstance(w.operand, int)]
        # What one piece alone carries on it writes over (pipeline/stage_programs.py); slots count apart.
        others = {r.slot for p in self.inside if p is not piece for r in p.reads}
        carried = (r for r in piece.reads if r.slot.kind is SlotKind.CARRY and r.slot not in others)
        before = {r.slot: r.version for r in carried}
        over = {
            (w.operand, w.nd): before[w.slot]
            for w in piece.writes
            if w.slot in before and isinstance(w.operand, int)
        }
        sizes = ShardSizes(self.cut.physical)
        found = peak(piece.steps, sizes, kept, over.values(), over)
        held = sum(x.bytes for x in found.live) - sum(map(sizes.bytes, set(over.values())))
        return held - self.sum(self.left(piece))

    def left(self, piece: Piece) -> set[Slot]:
        """What a forward makes of what it leaves for the backward: schedules count it from the forward's
        beginning (passes/schedule/memory.py), so it is not working memory too."""
        if piece.part.phase is not Phase.FORWARD:
            return set()
        made = {w.slot for w in piece.writes if w.slot.kind is SlotKind.EACH}
        return made & {slot for p in self.backward for slot in _each(p, False)}


def _each(piece: Piece | None, writes: bool) -> set[Slot]:
    """What a piece reads of a micro-batch's own tensors, and what it writes of them."""
    if piece is None:
        return set()
    found = {r.slot for r in piece.reads if r.slot.kind is SlotKind.EACH}
    return found | ({w.slot for w in piece.writes if w.slot.kind is SlotKind.EACH} if writes else set())


def _whole(piece: Piece) -> set[Slot]:
    return {r.slot for r in piece.reads if r.slot.kind is SlotKind.ONCE and r.how is How.WHOLE}
