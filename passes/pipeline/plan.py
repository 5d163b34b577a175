"""The plan of a pipeline: those of its placements, its schedule, what is sent between them, and what its
stages cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sbp.passes.explain.plan import Collective, PlaceFigures, PlanData, StageFigures
from sbp.passes.physical.fusion import ShardSizes
from sbp.passes.physical.memory import peak
from sbp.passes.pipeline.cut import border_of
from sbp.passes.pipeline.edges import edges_of
from sbp.passes.pipeline.slots import Cut, How, Piece, Slot, SlotKind
from sbp.passes.pipeline.stages import Stages
from sbp.passes.pipeline.times import TransferTime, estimated_times, outside_seconds, serial_seconds, ways
from sbp.passes.plan.cost import local_bytes
from sbp.passes.program.role import Part, Phase
from sbp.passes.schedule.actions import Schedule
from sbp.passes.schedule.memory import Footprint, peaks
from sbp.passes.schedule.simulate import simulate
from sbp.passes.schedule.times import Times
from sbp.placement import Placement
from sbp.signature import B, NdSbp


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
        steady = {*self.cut.arguments, *self.cut.closure, *self.cut.receives.values()}
        for p in self.inside:
            steady |= {r.slot for r in p.reads if r.slot.kind is not SlotKind.EACH}
            steady |= {w.slot for w in p.writes if w.slot.kind is SlotKind.CARRY}
        working = max((self.working_bytes(p) for p in self.inside), default=0.0)
        # Its plan has what is sent and received for all micro-batches as one tensor.
        stacks = {*self.cut.micro_receives.values(), *self.cut.micro_sends.values()}
        outside = whole_bytes - microbatches * self.sum(stacks)
        return PlaceFigures(self.sum(steady), working, max(outside, self.sum(steady)))

    def working_of(self, stage: int) -> tuple[float, float, float]:
        """The most that a stage's forward, the gradients for others and the rest of the backward take."""
        parts = (self.pieces.get(Part(p, stage)) for p in (Phase.FORWARD, Phase.INPUT, Phase.WEIGHT))
        forward, inputs, weights = (0.0 if piece is None else self.working_bytes(piece) for piece in parts)
        return forward, inputs, weights

    def working_bytes(self, piece: Piece) -> float:
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
        return held - self.sum(self.residual_slots(piece))

    def residual_slots(self, piece: Piece) -> set[Slot]:
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


TOO_LARGE = (
    "it does not fit; try: PipelineOptions(schedule='auto'), which searches for a schedule that fits, "
    "smaller micro-batches, more stages, or splitting tensors that are whole. Options(memory_limit=...) "
    "refuses such a plan"
)


def pipeline_plan(
    name: str,
    placement: Placement,
    stages: Stages,
    schedule: Schedule | None,
    notes: Sequence[str] = (),
) -> PlanData:
    """The plan of a program that has been taken apart."""
    plans, timeline = stages.plans, None
    seconds, memory = sum(p.seconds for p in plans), tuple(p.memory_bytes for p in plans)
    step_seconds = sum(p.step_seconds for p in plans)
    merged = schedule is None or not schedule.splits
    cuts, figures = stages.cuts(merged), None
    if schedule is not None:
        figures = figures_of(stages)
        edges = edges_of(cuts)
        timeline = simulate(schedule, figures.times, edges)
        step_seconds = float(timeline.makespan) + outside_seconds(stages, cuts)
        serial = simulate(schedule, estimated_times(stages, stages.cuts(False), serial_seconds), edges)
        seconds = float(serial.makespan) + outside_seconds(stages, cuts, serial_seconds)
        memory = figures.memory(schedule)
    # What is sent once may be in the way of everything after it.
    once = sum(way.seconds(stages) for way in ways(stages, cuts) if not way.inside)
    ins, outs = dict[int, NdSbp](), dict[int, NdSbp]()
    for subgraph, plan in reversed(list(zip(stages.subgraphs, plans, strict=True))):
        ins.update(zip(subgraph.arguments, plan.in_sbp, strict=False))
        outs.update(zip(subgraph.results, plan.out_sbp, strict=False))
    traced = stages.traced
    whole = (B,) * plans[0].placement.ndim
    remarks = [*notes, *(n for p in plans for n in p.notes)]
    if schedule is not None and max(memory) > plans[0].hardware.memory_bytes:
        remarks.insert(0, TOO_LARGE)
    return PlanData(
        name=name,
        placement=placement,
        hardware=plans[0].hardware,
        collectives=(*(c for p in plans for c in p.collectives), *sends_of(stages, cuts)),
        seconds=seconds + once,
        step_seconds=step_seconds + once,
        bound=(seconds + once) * (1 - max(p.gap for p in plans)),
        memory_bytes=max(memory),
        in_sbp=tuple(ins.get(i, whole) for i in range(len(traced.in_paths))),
        out_sbp=tuple(outs.get(i, whole) for i in range(len(traced.out_paths))),
        in_paths=traced.in_paths,
        out_paths=traced.out_paths,
        notes=tuple(dict.fromkeys(remarks)),
        stages=tuple(replace(p, memory_bytes=m) for p, m in zip(plans, memory, strict=True)),
        schedule=schedule,
        timeline=timeline,
        figures=() if figures is None else figures.stages,
        memory=memory,
        places=() if figures is None else figures.places,
        program_stages=stages,
    )


def sends_of(stages: Stages, cuts: Sequence[Cut]) -> tuple[Collective, ...]:
    """What goes between placements, once and per micro-batch."""
    return tuple(_send(stages, way) for way in ways(stages, cuts))


def _send(stages: Stages, way: TransferTime) -> Collective:
    value, labels = stages.subgraphs[way.source].graph.values[way.value], stages.labels
    times = stages.microbatches if way.inside else 1
    return Collective(
        "send",
        labels.names.of(way.value),
        value.shape,
        str(value.dtype),
        way.before,
        way.after,
        (str(way.source), str(way.target)),
        2,
        times,
        times * way.wire_bytes,
        times * way.seconds(stages),
        0.0 if way.inside else way.seconds(stages),
        labels.source(way.value),
        f"{labels.maker(way.value)} makes it, {labels.readers(way.value)} "
        + ("needs" if " and " not in labels.readers(way.value) else "need")
        + f" it on placement {way.target}"
        + (", for every micro-batch" if way.inside else ""),
    )
