"""A report as a file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from sbp.passes.render import files
from sbp.runtime.report.page import report_page
from sbp.runtime.report.text import report_text
from sbp.runtime.target.comparison import ComparedProgram
from sbp.runtime.target.trace import trace_json

FORMAT, VERSION = "sbp-report", 1


def report_json(report: ComparedProgram) -> str:
    """Every figure of the report and of its plan, exactly."""
    return json.dumps(report_data(report), indent=1) + "\n"


def report_data(report: ComparedProgram) -> dict[str, Any]:
    """The report as JSON has it."""
    simulation = report.simulation
    return {
        "format": FORMAT,
        "version": VERSION,
        "target": report.target,
        "wire_bytes": {"plan": report.plan.wire_bytes, "compiled": report.wire_bytes},
        "memory_bytes": {
            "plan": report.plan.memory_bytes,
            "compiled": None if report.memory is None else report.memory.peak,
        },
        "memory": None if report.memory is None else dataclasses.asdict(report.memory),
        "collectives": [dataclasses.asdict(c) for c in report.collectives],
        "rows": [dataclasses.asdict(r) for r in report.rows],
        "unexplained": list(report.unexplained),
        "simulation": None if simulation is None else dataclasses.asdict(simulation),
        "plan": files.plan_data(report.plan),
    }


def _trace(report: ComparedProgram) -> str:
    """The simulated schedule for Perfetto, collectives under the names of their rows."""
    assert report.simulation is not None
    rows = {
        c.instruction: ", ".join(f"{row} {c.kind} of {report.tensors[row]}" for row in c.rows)
        for c in report.collectives
        if c.rows
    }
    paths = {name: origin.path for name, origin in report.origins.items() if origin.path}
    return trace_json(report.simulation, rows, paths, f"{report.plan.name} on {report.plan.placement}")


WRITERS: Mapping[str, Callable[[ComparedProgram], str]] = {
    ".json": report_json,
    ".html": report_page,
    ".txt": report_text,
}
TRACE: Mapping[str, Callable[[ComparedProgram], str]] = {files.TRACE: _trace}


def writers(report: ComparedProgram) -> Mapping[str, Callable[[ComparedProgram], str]]:
    """The forms that a report can be saved in, by suffix; a trace only where the schedule was simulated."""
    return WRITERS if report.simulation is None else {**WRITERS, **TRACE}


def save_report(report: ComparedProgram, path: str | os.PathLike[str]) -> None:
    """Writes the report; the suffix chooses the form.

    Raises:
      ArgumentError: for a suffix that is not a key of `writers(report)`.
    """
    forms = writers(report)
    suffix = files.check_suffix(path, forms)
    files.write(path, forms[suffix](report))
