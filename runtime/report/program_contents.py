"""The report of one program: figures of plan and compiled program, its collectives, the plan's rows."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from sbp.passes.explain.words import kind_text
from sbp.passes.render.files import plan_data
from sbp.runtime.report.contents import Contents, ReportTable
from sbp.runtime.target.collective_sites import CompiledCollective
from sbp.runtime.target.comparison import ComparedProgram
from sbp.runtime.target.events import trace_json
from sbp.text.units import bytes_text, seconds_text

SHOWN = 40
"""Collectives of a table, the costliest first."""
MEANWHILE = 2
HEADINGS = ("collective", "x", "sent", "time", "exposed", "meanwhile", "rows of the plan", "line")
NUMBERS = ("x", "sent", "time", "exposed")


def contents(report: ComparedProgram) -> Contents:
    """What the report of a program shows."""
    plan, (shown, rest) = report.plan, costliest(report)
    count = sum(c.count for c in report.collectives)
    rows = [HEADINGS, *(cells(report, c) for c in shown)]
    return Contents(
        plan,
        report.target,
        f"{plan.name} on {plan.placement}, compiled by XLA for {report.target}",
        f"<ProgramReport {plan.name} on {plan.placement}: {count} collectives, "
        f"bytes {percent(report.byte_error)}, memory {percent(report.memory_error)}, "
        f"{len(report.unexplained_differences)} unexplained>",
        "compiled program",
        figures(report),
        [ReportTable("", "Compiled collectives", rows, rest)] if shown else [],
        NUMBERS,
        remarks(report),
    )


def percent(error: float) -> str:
    """A relative difference.

    >>> percent(0.0123), percent(0.0), percent(float("nan"))
    ('+1.2 %', '+0.0 %', 'not known')
    """
    return "not known" if math.isnan(error) else f"{100 * error:+.1f} %"


def figures(report: ComparedProgram) -> list[tuple[str, str]]:
    """What is compared, each with its name."""
    plan = report.plan
    found = [
        (
            "sent per device",
            f"{bytes_text(plan.wire_bytes)} planned, {bytes_text(report.wire_bytes)} compiled "
            f"({percent(report.byte_error)})",
        ),
        ("memory per device", _memory_text(report)),
        ("collectives", _count_text(report)),
        ("step", _step_text(report)),
    ]
    wrong = len(report.unexplained_differences)
    return [*found, ("unexplained", f"{wrong}, listed below" if wrong else "nothing")]


def _memory_text(report: ComparedProgram) -> str:
    planned, memory = bytes_text(report.plan.memory_bytes), report.memory
    if memory is None:
        return f"{planned} planned; the backend does not say what it takes"
    capacity = report.plan.hardware.memory_bytes
    parts = (("arguments", memory.arguments), ("results", memory.results), ("temporary", memory.temporary))
    held = ", ".join(f"{name} {bytes_text(n)}" for name, n in parts)
    verdict = (
        ""
        if math.isinf(capacity)
        else f"; of {bytes_text(capacity)}: " + ("fits" if report.fits else "DOES NOT FIT")
    )
    return (
        f"{planned} planned ({percent(report.memory_error)}), {bytes_text(memory.peak)} compiled: "
        f"{held}, of which {bytes_text(memory.aliased)} lie in donated memory{verdict}"
    )


def _count_text(report: ComparedProgram) -> str:
    """Executions per step, as planned and as compiled."""
    asynchronous = sum(c.count for c in report.collectives if c.asynchronous)
    synchronous = sum(c.count for c in report.collectives if not c.asynchronous)
    return (
        f"{sum(c.count for c in report.plan.collectives)} planned, {asynchronous + synchronous} compiled: "
        f"{asynchronous} asynchronous, {synchronous} synchronous"
    )


def _step_text(report: ComparedProgram) -> str:
    plan = report.plan
    planned = f"{seconds_text(plan.seconds)} by the plan, one thing after the other"
    if plan.overlaps:
        waiting = f"waiting {seconds_text(plan.exposed_seconds)}"
        planned = f"{seconds_text(plan.step_seconds)} by the plan, {waiting}"
    s = report.simulation
    if s is None:
        return f"{planned}; not simulated: no rates of {report.target} are known"
    return (
        f"{seconds_text(s.seconds)} simulated: kernels {seconds_text(s.kernel_seconds)}, waiting for "
        f"collectives {seconds_text(s.exposed_seconds)}; MFU {100 * s.mfu:.2g} %; {planned}"
    )


def costliest(report: ComparedProgram) -> tuple[Sequence[CompiledCollective], str]:
    """The collectives that cost most, and a line on the others ("" for none)."""
    order = sorted(report.collectives, key=lambda c: (-(c.exposed_seconds or 0.0), -c.wire_bytes))
    rest = order[SHOWN:]
    if not rest:
        return order, ""
    sent = bytes_text(math.fsum(c.wire_bytes for c in rest))
    return order[:SHOWN], f"and {len(rest)} smaller ones, {sent} in all"


def cells(report: ComparedProgram, c: CompiledCollective) -> tuple[str, ...]:
    """One collective of the table, under `HEADINGS`."""
    kind, named = f"{kind_text(c.kind)} over {c.group_size}", report.tensors
    times = ["" if s is None else seconds_text(s) for s in (c.seconds, c.exposed_seconds)]
    when = " (only if data demand it)" if c.conditional else ""
    return (
        f"{kind}{when}",
        str(c.count),
        bytes_text(c.wire_bytes),
        *times,
        meanwhile(report, c),
        rows_text([f"{r} {named[r]}" for r in c.rows]),
        c.source,
    )


def meanwhile(report: ComparedProgram, c: CompiledCollective) -> str:
    """What kernels do while a collective is under way."""
    if not c.asynchronous:
        return "waits"
    kernels = [report.origins[name] for name in c.kernels_beside if name in report.origins]
    lines = list(dict.fromkeys(o.source or o.instruction for o in kernels))
    named = f": {', '.join(lines[:MEANWHILE])}{', ...' if len(lines) > MEANWHILE else ''}" if lines else ""
    return f"{len(c.kernels_beside)} kernel{'s' * (len(c.kernels_beside) != 1)}{named}"


def rows_text(rows: Sequence[str]) -> str:
    """Rows of the plan in few words.

    >>> rows_text(["row1 x"]), rows_text(["row1 x", "row2 y", "row3 z"]), rows_text([])
    ('row1 x', 'row1 x and 2 more', 'none')
    """
    return f"{rows[0]} and {len(rows) - 1} more" if len(rows) > 1 else rows[0] if rows else "none"


def remarks(report: ComparedProgram) -> list[tuple[str, list[str]]]:
    """What is not as planned: headings with their lines, none of which is empty."""
    told = {r.row: f"{r.row} ({_what(report, r.row)}): {r.remark}" for r in report.rows if r.explained}
    removed = [told[r.row] for r in report.rows if r.row in told and r.removed]
    changed = [told[r.row] for r in report.rows if r.row in told and r.changed]
    loops = report.simulation.unknown_trip_counts if report.simulation is not None else ()
    found = [
        ("unexplained", list(report.unexplained_differences)),
        ("planned, and not sent", removed),
        ("sent otherwise", changed),
        ("loops of unknown length, counted as one trip", list(loops)),
    ]
    return [(name, lines) for name, lines in found if lines]


def _what(report: ComparedProgram, row: str) -> str:
    return f"{kind_text(report.kinds[row])} of {report.tensors[row]}"


FORMAT, VERSION = "sbp-report", 1


def data(report: ComparedProgram) -> dict[str, Any]:
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
        "unexplained": list(report.unexplained_differences),
        "simulation": None if simulation is None else dataclasses.asdict(simulation),
        "plan": plan_data(report.plan),
    }


def trace(report: ComparedProgram) -> str:
    """The simulated schedule for Perfetto, collectives under the names of their rows."""
    assert report.simulation is not None
    rows = {
        c.instruction: ", ".join(f"{row} {c.kind} of {report.tensors[row]}" for row in c.rows)
        for c in report.collectives
        if c.rows
    }
    paths = {name: origin.path for name, origin in report.origins.items() if origin.path}
    return trace_json(report.simulation, rows, paths, f"{report.plan.name} on {report.plan.placement}")
