"""The plan of a pipeline: those of its placements, its schedule, and what is sent between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sbp.passes.explain.plan import Collective, PlanData
from sbp.passes.pipeline.edges import edges_of
from sbp.passes.pipeline.figures import PlaceFigures, StageFigures, figures_of
from sbp.passes.pipeline.slots import Cut
from sbp.passes.pipeline.stages import Stages
from sbp.passes.pipeline.times import TransferTime, estimated_times, outside_seconds, serial_seconds, ways
from sbp.passes.schedule.actions import Schedule
from sbp.passes.schedule.memory import peaks, units
from sbp.passes.schedule.simulate import simulate
from sbp.passes.schedule.spans import Timeline
from sbp.placement import Placement
from sbp.signature import B, NdSbp

TOO_LARGE = (
    "it does not fit; try: PipelineOptions(schedule='auto'), which searches for a schedule that fits, "
    "smaller micro-batches, more stages, or splitting tensors that are whole. Options(memory_limit=...) "
    "refuses such a plan"
)


@dataclass(frozen=True, repr=False)
class PipelineData(PlanData):
    """What a program with stages will do, and why.

    Arguments:
      stages: per placement, its plan; a loop over micro-batches counts as often as it runs. `collectives` are
        those of all of them, then what is sent between placements.
      schedule: in which order; None without micro-batches.
      timeline: the schedule as simulated with the estimated times, those of pieces with overlap; likewise.
      figures: what every stage costs; () without micro-batches.
      memory: per placement, the peak per device with this schedule, bytes.
      places: what every placement holds but for micro-batches; () without these.
      apart: the program taken apart; None for a plan that was loaded from a file.
    """

    stages: tuple[PlanData, ...] = ()
    schedule: Schedule | None = None
    timeline: Timeline | None = None
    figures: tuple[StageFigures, ...] = ()
    memory: tuple[float, ...] = ()
    places: tuple[PlaceFigures, ...] = ()
    apart: Stages | None = field(default=None, compare=False, repr=False)

    @property
    def sends(self) -> tuple[Collective, ...]:
        """What goes from one placement to another; it stands behind the collectives of the placements."""
        return self.collectives[sum(len(p.collectives) for p in self.stages) :]

    @property
    def wire_bytes(self) -> float:
        """What one device sends per step at the most, bytes: of one placement, and to others."""
        given = [p.wire_bytes for p in self.stages]
        for c in self.sends:
            given[int(c.axes[0])] += c.wire_bytes
        return max(given, default=0.0)

    @property
    def exposed_seconds(self) -> float:
        """What the kernels of one placement wait for its collectives at the most."""
        return max((p.exposed_seconds for p in self.stages), default=0.0)

    @property
    def gap(self) -> float:
        """The largest gap of any placement's plan."""
        return max((p.gap for p in self.stages), default=0.0)

    @property
    def live(self) -> tuple[float, ...]:
        """Per placement, the most micro-batches of its stages that are held at once."""
        return () if self.schedule is None else peaks(self.schedule, units(self.schedule.stages))

    def part(self, index: int) -> tuple[PlanData, int]:
        """The plan of a placement that a collective belongs to, and its number there."""
        for plan in self.stages:
            if index < len(plan.collectives):
                return plan, index
            index -= len(plan.collectives)
        return self, index + len(self.collectives) - len(self.sends)


def pipeline_plan(
    name: str,
    placement: Placement,
    stages: Stages,
    schedule: Schedule | None,
    notes: Sequence[str] = (),
) -> PipelineData:
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
    for share, plan in reversed(list(zip(stages.shares, plans, strict=True))):
        ins.update(zip(share.arguments, plan.in_sbp, strict=False))
        outs.update(zip(share.results, plan.out_sbp, strict=False))
    traced = stages.traced
    whole = (B,) * plans[0].placement.ndim
    remarks = [*notes, *(n for p in plans for n in p.notes)]
    if schedule is not None and max(memory) > plans[0].hardware.memory_bytes:
        remarks.insert(0, TOO_LARGE)
    return PipelineData(
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
        apart=stages,
    )


def sends_of(stages: Stages, cuts: Sequence[Cut]) -> tuple[Collective, ...]:
    """What goes between placements, once and per micro-batch."""
    return tuple(_send(stages, way) for way in ways(stages, cuts))


def _send(stages: Stages, way: TransferTime) -> Collective:
    value, labels = stages.shares[way.source].graph.values[way.value], stages.labels
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
