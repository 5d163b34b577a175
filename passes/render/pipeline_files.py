"""Plans of pipelines as files: JSON to load again, a page, a graph, pictures, a trace."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sbp.passes.explain.choices import RowChoices
from sbp.passes.pipeline.figures import PlaceFigures, StageFigures
from sbp.passes.pipeline.plan import PipelineData
from sbp.passes.render import files
from sbp.passes.render.pipeline_page import dot_text, plan_svg
from sbp.passes.render.program_data import json_text
from sbp.passes.render.timeline import chrome_trace
from sbp.passes.render.web_page import NO_CHOICES, PageProfile, plan_page, profiled_page
from sbp.passes.schedule.actions import Action, Kind, Schedule
from sbp.passes.schedule.spans import Span, Timeline


def plan_json(plan: PipelineData) -> str:
    """Every figure, exactly, and what every device executes."""
    data = files.plan_data(plan)
    data["stages"] = [files.plan_data(p) for p in plan.stages]
    data["schedule"] = None if plan.schedule is None else schedule_data(plan.schedule)
    data["timeline"] = None if plan.timeline is None else timeline_data(plan.timeline)
    data["figures"] = [dataclasses.asdict(s) for s in plan.figures]
    data["places"] = [dataclasses.asdict(p) for p in plan.places]
    return json_text(data)


def trace(plan: PipelineData) -> str:
    """The estimated timeline for Perfetto and Chrome."""
    if plan.timeline is None:
        raise files.problem(
            f"a plan of {plan.name!r} without micro-batches",
            ", ".join(s for s in WRITERS if s != ".trace.json"),
            "only a program with micro-batches has a timeline",
            "sbp.microbatch(jax.value_and_grad(loss), 8, batch_args=1)",
            "saving a trace",
        )
    return chrome_trace([plan.timeline])


WRITERS: Mapping[str, Callable[[PipelineData], str]] = {
    ".json": plan_json,
    ".html": plan_page,
    ".dot": dot_text,
    ".svg": plan_svg,
    ".trace.json": trace,
}


def save_plan(
    plan: PipelineData,
    path: str | os.PathLike[str],
    choices: Mapping[str, RowChoices] = NO_CHOICES,
    profile: PageProfile | None = None,
) -> None:
    """Writes the plan; the suffix chooses the form.

    Arguments:
      choices: what tensors could lie as instead, by their names; a page shows them.
      profile: what a step took; a page shows it beside the estimates.

    Raises:
      ArgumentError: for a suffix that is not a key of `WRITERS`, or the graph of a plan without its program;
        for a profile of another program, or one that is to stand in anything but a page.
    """
    suffix = files.check_suffix(path, WRITERS)
    if profile is not None:
        files.check_page(path, suffix)
        files.write(path, profiled_page(plan, profile, choices))
        return
    if suffix == ".dot" and all(p.physical is None and p.program is None for p in plan.stages):
        raise files.no_picture(plan, path, ", ".join(s for s in WRITERS if s != ".dot"))
    files.write(path, plan_page(plan, choices=choices) if suffix == ".html" else WRITERS[suffix](plan))


def read_plan(data: Mapping[str, Any]) -> PipelineData:
    """The plan that `plan_json` has written."""
    plan = files.read_plan(data)
    schedule, timeline = data["schedule"], data["timeline"]
    return PipelineData(
        **{f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)},
        stages=tuple(files.read_plan(p) for p in data["stages"]),
        schedule=None if schedule is None else read_schedule(schedule),
        timeline=None if timeline is None else read_timeline(timeline),
        figures=tuple(StageFigures(**s) for s in data["figures"]),
        memory=tuple(data["memory"]),
        places=tuple(PlaceFigures(**p) for p in data.get("places", ())),
    )


def schedule_data(schedule: Schedule) -> dict[str, Any]:
    """A schedule as JSON has it."""
    return {
        "name": schedule.name,
        "microbatches": schedule.microbatches,
        "rank_of": schedule.rank_of,
        "orders": [list(map(_action, order)) for order in schedule.orders],
        "pairs": sorted(map(_action, schedule.pairs), key=str),
    }


def read_schedule(data: Mapping[str, Any]) -> Schedule:
    """The schedule of such data."""
    return Schedule(
        data["name"],
        data["microbatches"],
        tuple(data["rank_of"]),
        tuple(tuple(map(_read_action, order)) for order in data["orders"]),
        frozenset(map(_read_action, data["pairs"])),
    )


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """A timeline as JSON has it."""
    spans = [[[*_action(s.action), s.start, s.end] for s in row] for row in timeline.spans]
    return {"name": timeline.name, "spans": spans}


def read_timeline(data: Mapping[str, Any]) -> Timeline:
    """The timeline of such data."""
    rows = enumerate(data["spans"])
    return Timeline(
        data["name"],
        tuple(tuple(Span(r, _read_action(s[:4]), s[4], s[5]) for s in row) for r, row in rows),
    )


def _action(a: Action) -> list[Any]:
    return [a.kind.value, a.stage, a.microbatch, a.peer]


def _read_action(data: Sequence[Any]) -> Action:
    kind, stage, microbatch, peer = data
    return Action(Kind(kind), stage, microbatch, peer)
