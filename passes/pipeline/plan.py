"""The plan of a pipeline: those of its placements, its schedule, and what is sent between them."""

from collections.abc import Sequence
from dataclasses import replace

from sbp.passes.explain.plan import Collective, PlanData
from sbp.passes.pipeline.edges import edges_of
from sbp.passes.pipeline.figures import figures_of
from sbp.passes.pipeline.slots import Cut
from sbp.passes.pipeline.stages import Stages
from sbp.passes.pipeline.times import TransferTime, estimated_times, outside_seconds, serial_seconds, ways
from sbp.passes.schedule.actions import Schedule
from sbp.passes.schedule.simulate import simulate
from sbp.placement import Placement
from sbp.signature import B, NdSbp

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
        apart=stages,
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
