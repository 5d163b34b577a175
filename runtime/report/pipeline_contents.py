"""The report of a pipeline: figures of plan and compiled pieces, its placements, pieces and transfers."""

import dataclasses
import json
from typing import Any

from sbp.passes.render.files import plan_json
from sbp.passes.schedule.spans import Timeline
from sbp.runtime.report.contents import Contents, ReportTable
from sbp.runtime.report.pipeline_comparison import (
    ComparedPipeline,
    ComparedPlace,
    ComparedTransfer,
    CompiledPiece,
)
from sbp.runtime.report.program_contents import percent
from sbp.text.units import bytes_text, seconds_text

FORMAT, VERSION = "sbp-pipeline-report", 1
PLACES = (
    "placement",
    "stage",
    "programs",
    "size",
    "compiled in",
    "memory",
    "planned",
    "sent inside",
    "planned",
)
PIECES = ("placement", "piece", "times", "size", "compiled in", "temporary", "sent", "time", "exposed")
TRANSFERS = ("from to", "ways", "sent once", "programs", "size", "compiled in", "each receives")
NUMBERS = ("programs", "size", "compiled in", "times", "temporary", "sent", "time", "exposed", "memory")
NOT_KNOWN = "not known"


def title(report: ComparedPipeline) -> str:
    """What was compiled for what."""
    plan = report.plan
    how = ""
    if plan.schedule is not None:
        s = plan.schedule
        how = f", {s.stages} stages, {s.microbatches} micro-batches, schedule {s.name}"
    return f"{plan.name} on {plan.placement}{how}, compiled by XLA for {report.target}"


def figures(report: ComparedPipeline) -> list[tuple[str, str]]:
    """What is compared, each with its name."""
    plan = report.plan
    planned = sum(p.plan.wire_bytes for p in report.places)
    held = [p.peak.bytes for p in report.places if p.peak is not None]
    most = bytes_text(max(held)) + " compiled" if held else "the backend does not say what it takes"
    verdict = "fits" if report.fits else "DOES NOT FIT"
    by_plan = f"{seconds_text(plan.step_seconds)} by the plan"
    step = f"{by_plan}; not simulated: no rates of {report.target} are known"
    if report.simulated_seconds is not None:
        step = f"{seconds_text(report.simulated_seconds)} simulated{_bubble(report.timeline)}; {by_plan}"
        step += _bubble(plan.timeline)
    return [
        (
            "sent inside",
            f"{bytes_text(planned)} planned, {bytes_text(report.wire_bytes)} compiled "
            f"({percent(report.byte_error)}): of one device per placement, all of them together",
        ),
        (
            "memory",
            f"{bytes_text(plan.memory_bytes)} planned, {most} per device of the placement with most; "
            f"off by {percent(report.memory_error)} at the most; {verdict}",
        ),
        ("step", step),
    ]


def _bubble(timeline: Timeline | None) -> str:
    return "" if timeline is None else f", bubble {timeline.bubble_fraction:.1%}"


def contents(report: ComparedPipeline) -> Contents:
    """What the report of a pipeline shows."""
    plan = report.plan
    found = [
        ("placements", [PLACES, *(_place(i, p) for i, p in enumerate(report.places))]),
        ("pieces", [PIECES, *(_piece(i, c) for i, p in enumerate(report.places) for c in p.pieces)]),
        ("crossings, where placements are of different processes", [TRANSFERS, *_transfers(report)]),
    ]
    return Contents(
        plan,
        report.target,
        title(report),
        f"<PipelineReport {plan.name} on {plan.placement}: {len(report.places)} placements, "
        f"bytes {percent(report.byte_error)}, memory {percent(report.memory_error)}>",
        "compiled pieces",
        figures(report),
        [ReportTable(name, f"Compiled: {name}", rows) for name, rows in found if len(rows) > 1],
        NUMBERS,
    )


def _place(i: int, p: ComparedPlace) -> tuple[str, ...]:
    return (
        str(i),
        ", ".join(map(str, p.stages)),
        str(len(p.programs)),
        bytes_text(p.size_bytes),
        seconds_text(p.cpu_seconds),
        NOT_KNOWN if p.peak is None else bytes_text(p.peak.bytes),
        f"{bytes_text(p.plan.memory_bytes)} ({percent(p.memory_error)})",
        bytes_text(p.wire_bytes),
        bytes_text(p.plan.wire_bytes),
    )


def _piece(i: int, c: CompiledPiece) -> tuple[str, ...]:
    return (
        str(i),
        c.name,
        str(c.times),
        NOT_KNOWN if c.size_bytes is None else bytes_text(c.size_bytes),
        seconds_text(c.cpu_seconds),
        NOT_KNOWN if c.memory is None else bytes_text(c.memory.temporary),
        bytes_text(c.wire_bytes),
        "" if c.simulation is None else seconds_text(c.simulation.seconds),
        "" if c.simulation is None else seconds_text(c.simulation.exposed_seconds),
    )


def _transfers(report: ComparedPipeline) -> list[tuple[str, ...]]:
    """What crosses from each placement to each other one."""
    pairs: dict[tuple[int, int], list[ComparedTransfer]] = {}
    for w in report.ways:
        pairs.setdefault((w.source, w.target), []).append(w)
    rows = list[tuple[str, ...]]()
    for (a, b), own in pairs.items():
        programs = {w.program: w for w in reversed(own)}
        rows.append(
            (
                f"{a} to {b}",
                str(len(own)),
                str(sum(not w.inside for w in own)),
                str(len(programs) + sum(w.relaid for w in own)),
                bytes_text(sum(w.size_bytes or 0 for w in programs.values())),
                seconds_text(sum(w.cpu_seconds for w in programs.values())),
                bytes_text(sum(w.times * w.shard_bytes for w in own)),
            )
        )
    return rows


def data(report: ComparedPipeline) -> dict[str, Any]:
    """The report as JSON has it."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "target": report.target,
        "step_seconds": {"plan": report.plan.step_seconds, "simulated": report.simulated_seconds},
        "places": [
            {
                "stages": p.stages,
                "wire_bytes": {"plan": p.plan.wire_bytes, "compiled": p.wire_bytes},
                "memory_bytes": {
                    "plan": p.plan.memory_bytes,
                    "compiled": None if p.peak is None else p.peak.bytes,
                },
                "pieces": [_piece_data(c) for c in p.pieces],
            }
            for p in report.places
        ],
        "ways": [dataclasses.asdict(w) for w in report.ways],
        "plan": json.loads(plan_json(report.plan)),
    }


def _piece_data(c: CompiledPiece) -> dict[str, Any]:
    return {
        "phase": str(c.part.phase),
        "at": c.part.at,
        "times": c.times,
        "program": c.program,
        "size_bytes": c.size_bytes,
        "cpu_seconds": c.cpu_seconds,
        "wire_bytes": c.wire_bytes,
        "memory": None if c.memory is None else dataclasses.asdict(c.memory),
        "seconds": None if c.simulation is None else c.simulation.seconds,
        "exposed_seconds": None if c.simulation is None else c.simulation.exposed_seconds,
    }
