"""Plans as files: JSON to load again or to compare, a page, a picture."""

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from sbp.errors import ArgumentError, Problem
from sbp.hardware.catalogue import hardware_of
from sbp.passes.explain.choices import RowChoices
from sbp.passes.explain.plan import Collective, PlaceFigures, PlanData, StageFigures
from sbp.passes.plan.record import read_record, record_data
from sbp.passes.render.dot import dot_text
from sbp.passes.render.program_data import json_text, program_data
from sbp.passes.render.shardings import shardings_text
from sbp.passes.render.svg import plan_svg
from sbp.passes.render.timeline import chrome_trace
from sbp.passes.render.timeline_data import read_schedule, read_timeline, schedule_data, timeline_data
from sbp.passes.render.web_page import NO_CHOICES, PageProfile, plan_page, profiled_page
from sbp.placement import Placement
from sbp.signature import format_sbp, parse_sbp
from sbp.text.json_reader import json_of

READERS = {".html": "to read it", ".json": "to load it again"}
FORMAT, VERSION = "sbp-plan", 4
TRACE = ".trace.json"
OF_STAGES = ("stages", "schedule", "timeline", "figures", "memory", "places")
"""Fields that only the file of a plan with stages has."""
NOT_SAVED = ("physical", "program", "replanner", "writer", "choice", "program_stages", *OF_STAGES)
"""Fields of a plan that a file does not have, or has in a form of its own."""


def plan_json(plan: PlanData) -> str:
    """Every figure, exactly, and what every device executes."""
    return json_text(plan_data(plan))


def plan_data(plan: PlanData) -> dict[str, Any]:
    """The plan as JSON has it."""
    data: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    for f in dataclasses.fields(plan):
        if f.name not in NOT_SAVED:
            data[f.name] = getattr(plan, f.name)
    data["placement"] = dataclasses.asdict(plan.placement)
    data["hardware"] = _without_infinity(dataclasses.asdict(plan.hardware))
    data["in_sbp"] = [format_sbp(nd) for nd in plan.in_sbp]
    data["out_sbp"] = [format_sbp(nd) for nd in plan.out_sbp]
    data["collectives"] = [
        dataclasses.asdict(c) | {"before": format_sbp(c.before), "after": format_sbp(c.after)}
        for c in plan.collectives
    ]
    if (program := program_data(plan)) is not None:
        data["program"] = program
    data["choice"] = None if plan.choice is None else record_data(plan.choice)
    if plan.stages:
        data["stages"] = [plan_data(p) for p in plan.stages]
        data["schedule"] = None if plan.schedule is None else schedule_data(plan.schedule)
        data["timeline"] = None if plan.timeline is None else timeline_data(plan.timeline)
        data["figures"] = [dataclasses.asdict(s) for s in plan.figures]
        data["memory"] = plan.memory
        data["places"] = [dataclasses.asdict(p) for p in plan.places]
    return data


def _without_infinity(data: object) -> object:
    """JSON has no infinity: a figure without a bound is null.

    >>> _without_infinity({"name": "x", "rates": ((8, math.inf),)}), _with_infinity({"memory_bytes": None})
    ({'name': 'x', 'rates': [[8, None]]}, {'memory_bytes': inf})
    """
    if isinstance(data, dict):
        return {k: _without_infinity(x) for k, x in data.items()}
    if isinstance(data, list | tuple):
        return [_without_infinity(x) for x in data]
    return None if data == math.inf else data


def _with_infinity(data: Any) -> Any:
    """What `_without_infinity` was given, lists for tuples."""
    if isinstance(data, dict):
        return {k: _with_infinity(x) for k, x in data.items()}
    if isinstance(data, list | tuple):
        return [_with_infinity(x) for x in data]
    return math.inf if data is None else data


def trace(plan: PlanData) -> str:
    """The estimated timeline for Perfetto and Chrome."""
    if plan.timeline is None:
        raise problem(
            f"a plan of {plan.name!r} without micro-batches",
            ", ".join(s for s in writers_of(plan) if s != TRACE),
            "only a program with micro-batches has a timeline",
            "sbp.microbatch(jax.value_and_grad(loss), 8, batch_args=1)",
            "saving a trace",
        )
    return chrome_trace([plan.timeline])


WRITERS: Mapping[str, Callable[[PlanData], str]] = {
    ".json": plan_json,
    ".html": plan_page,
    ".dot": dot_text,
    ".svg": plan_svg,
    ".py": shardings_text,
    TRACE: trace,
}


def writers_of(plan: PlanData) -> Mapping[str, Callable[[PlanData], str]]:
    """How a plan can be written: with stages as a trace, without as shardings."""
    left_out = ".py" if plan.stages else TRACE
    return {suffix: write for suffix, write in WRITERS.items() if suffix != left_out}


def check_suffix(path: str | os.PathLike[str], writers: Collection[str]) -> str:
    """The suffix of a file that a plan can be saved to, the longest of those that it ends with.

    Raises:
      ArgumentError: for another suffix.
    """
    name, suffix = Path(path).name.lower(), Path(path).suffix.lower()
    known = [s for s in writers if name.endswith(s) and name != s]
    # What another kind of plan can be saved as is not what the end of it says.
    if not known or (name.endswith(TRACE) and TRACE not in writers):
        raise problem(
            f"the suffix {suffix!r}" if suffix else "no suffix",
            ", ".join(writers),
            "the suffix of the file says in which form the plan is written",
            ", ".join(f"{Path(path).stem}{s} {what}" for s, what in READERS.items() if s in writers),
            f"saving a plan to {os.fspath(path)!r}",
        )
    return max(known, key=len)


def save_plan(
    plan: PlanData,
    path: str | os.PathLike[str],
    choices: Mapping[str, RowChoices] = NO_CHOICES,
    profile: PageProfile | None = None,
) -> None:
    """Writes the plan; the suffix chooses the form.

    Arguments:
      choices: what tensors could lie as instead, by their names; a page shows them.
      profile: what a step took; a page shows it beside the estimates.

    Raises:
      ArgumentError: for a suffix that is not a key of `WRITERS`, or a picture of a plan without its program;
        for a profile of another program, or one that is to stand in anything but a page.
    """
    writers = writers_of(plan)
    suffix = check_suffix(path, writers)
    if profile is not None:
        check_page(path, suffix)
        write(path, profiled_page(plan, profile, choices))
        return
    drawn = (".dot",) if plan.stages else (".dot", ".svg")  # the picture of a schedule needs no program
    if suffix in drawn and not plan.has_program:
        raise no_picture(plan, path, ", ".join(s for s in writers if s not in (*drawn, ".py")))
    write(path, plan_page(plan, choices=choices) if suffix == ".html" else writers[suffix](plan))


def check_page(path: str | os.PathLike[str], suffix: str) -> None:
    """Refuses a profile in anything but a page.

    Raises:
      ArgumentError: for a suffix other than that of a page.
    """
    if suffix != ".html":
        raise problem(
            f"the suffix {suffix!r} with a profile",
            ".html",
            "only a page shows measured beside estimated times",
            f"{Path(path).name.removesuffix(suffix)}.html, or the plan without profile=...",
            f"saving a plan to {os.fspath(path)!r}",
        )


def write(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file."""
    Path(path).write_text(text, encoding="utf-8")


def no_picture(plan: PlanData, path: str | os.PathLike[str], legal: str) -> ArgumentError:
    """The error for the picture of a plan that has no program."""
    return problem(
        f"a plan of {plan.name!r} without its program",
        legal,
        "the picture shows the program",
        "save the picture of the plan that Program.plan(...) returns",
        f"saving a plan to {os.fspath(path)!r}",
    )


def load_plan(path: str | os.PathLike[str]) -> PlanData:
    """Reads a plan that was saved as .json; its `physical` is None.

    Raises:
      ArgumentError: if the file holds no plan, or one of a version that is not known.
    """
    where = f"loading a plan from {os.fspath(path)!r}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise problem(str(e), _LEGAL, "the file cannot be read as JSON", _FIX, where) from None
    return parse_plan(text, where)


_LEGAL = f"JSON of format {FORMAT!r}, version {VERSION}"
_FIX = "plan.save('plan.json') writes such a file"


def parse_plan(text: str, where: str) -> PlanData:
    """The plan of a text that `plan_json` has written.

    Arguments:
      where: the beginning of an error.

    Raises:
      ArgumentError: as `load_plan` does.
    """
    try:
        data = json_of(text)
    except ValueError as e:
        raise problem(str(e), _LEGAL, "the file cannot be read as JSON", _FIX, where) from None
    if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (FORMAT, VERSION):
        found = (data.get("format"), data.get("version")) if isinstance(data, dict) else type(data).__name__
        raise problem(f"{found}", _LEGAL, "only files of this format can be read", _FIX, where)
    try:
        return read_plan(data)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as e:
        raise problem(
            f"{type(e).__name__}: {e}", _LEGAL, "a field is missing or has no legal value", _FIX, where
        ) from None


def _placement(at: Mapping[str, Any]) -> Placement:
    ranks, shape, axes = (tuple(at[name]) for name in ("ranks", "shape", "axes"))
    return Placement(at["kind"], ranks, shape, axes, tuple(at.get("axis_types", ())))


def read_plan(data: Mapping[str, Any]) -> PlanData:
    """The plan of such data."""
    at, on = data["placement"], _with_infinity(data["hardware"])
    more = _of_stages(data) if "stages" in data else {}
    return PlanData(
        data["name"],
        _placement(at),
        hardware_of(on),
        tuple(_collective(c) for c in data["collectives"]),
        data["seconds"],
        data["step_seconds"],
        data["bound"],
        data["memory_bytes"],
        tuple(map(parse_sbp, data["in_sbp"])),
        tuple(map(parse_sbp, data["out_sbp"])),
        tuple(data["in_paths"]),
        tuple(data["out_paths"]),
        tuple(data["notes"]),
        donated=tuple(data.get("donated", ())),
        program=data.get("program"),
        cheapest_seconds=data.get("cheapest_seconds"),
        step_bound=data.get("step_bound", 0.0),
        choice=None if data["choice"] is None else read_record(data["choice"]),
        **more,
    )


def _of_stages(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a plan with stages."""
    schedule, timeline = data["schedule"], data["timeline"]
    return {
        "stages": tuple(map(read_plan, data["stages"])),
        "schedule": None if schedule is None else read_schedule(schedule),
        "timeline": None if timeline is None else read_timeline(timeline),
        "figures": tuple(StageFigures(**s) for s in data["figures"]),
        "memory": tuple(data["memory"]),
        "places": tuple(PlaceFigures(**p) for p in data.get("places", ())),
    }


def _collective(c: Mapping[str, Any]) -> Collective:
    read: dict[str, Callable[[Any], Any]] = {
        "before": parse_sbp,
        "after": parse_sbp,
        "shape": tuple,
        "axes": tuple,
    }
    return Collective(**{k: read[k](v) if k in read else v for k, v in c.items()})


def problem(got: str, legal: str, why: str, fix: str, where: str) -> ArgumentError:
    """The error for a file or a plan that does not suit."""
    return ArgumentError(Problem("argument", where, got, legal, why, fix))
