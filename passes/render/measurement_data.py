"""A measured step as data of the page of a plan: columns beside the estimated ones, and a timeline."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from sbp.passes.explain.measurement import (
    MADE_BY_XLA,
    MeasuredSpan,
    MeasuredStep,
    group_times,
    kernels_estimate,
    steps_by_number,
)
from sbp.passes.explain.plan import Collective, PlanData
from sbp.passes.explain.words import kind_text
from sbp.passes.render.outline import Outline
from sbp.passes.render.timeline_data import LANES, SPAN, part_of


def row_times(merged: Sequence[Collective], step: MeasuredStep) -> dict[str, list[Any]]:
    """More columns for the table of collectives."""
    found = [step.of(c) for c in merged]
    return {
        "measured": [m.seconds for m in found],
        "alone": [m.exposed_seconds for m in found],
        "waited": [m.waiting_seconds for m in found],
        "remark": [m.remark for m in found],
    }


def group_seconds(outline: Outline, step: MeasuredStep) -> list[float]:
    """The kernels of each group, with those inside it."""
    found = [0.0] * len(outline.groups)
    for (own, _), seconds in zip(steps_by_number(outline.program["steps"]), step.step_seconds, strict=True):
        if id(own) in outline.leaf:
            found[outline.leaf[id(own)]] += seconds
    for k in range(len(found) - 1, 0, -1):
        found[outline.groups[k].parent] += found[k]
    return found


def beside_data(plan: PlanData, step: MeasuredStep, program: Mapping[str, Any] | None) -> dict[str, Any]:
    """The parts of the step, and the lines with their times."""
    groups = [] if program is None else group_times(program, step)
    return {
        "word": step.word,
        "how": step.how,
        "seconds": step.seconds,
        "total": step.seconds,
        "devices": step.devices,
        "kernels": [step.kernel_seconds, None if program is None else kernels_estimate(program)],
        "exposed": [step.exposed_seconds, plan.exposed_seconds],
        "waiting": step.waiting_seconds,
        "idle": [step.before_seconds, step.between_seconds, step.after_seconds],
        "lines": {
            "phase": [g.phase for g in groups],
            "line": [g.source for g in groups],
            "ops": [g.ops for g in groups],
            "estimated": [g.estimated_seconds for g in groups],
            "seconds": [g.seconds for g in groups],
        },
    }


SENT_APART = "what a stage sends is measured as one: Actions has it, SF and SB"


def sent_apart(rows: int) -> dict[str, list[Any]]:
    """The columns of `row_times` for transfers between placements."""
    values: dict[str, Any] = {"measured": None, "alone": 0.0, "waited": 0.0, "remark": SENT_APART}
    return {name: [value] * rows for name, value in values.items()}


def places_data(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The steps of all placements as one: their parts added up, in a total of as many steps.

    Arguments:
      parts: the data of each placement's page, with `beside`.
    """
    each: list[dict[str, Any]] = [p["beside"] for p in parts]

    def total(name: str, at: int) -> float | None:
        known = [x for b in each if (x := b[name][at]) is not None]
        return math.fsum(known) if known else None

    return each[0] | {
        "total": math.fsum(b["seconds"] for b in each),
        "devices": sum(b["devices"] for b in each),
        "kernels": [total("kernels", 0), total("kernels", 1)],
        "exposed": [total("exposed", 0), total("exposed", 1)],
        "waiting": math.fsum(b["waiting"] for b in each),
        "idle": [total("idle", k) for k in range(3)],
        "lines": {name: [x for b in each for x in b["lines"][name]] for name in each[0]["lines"]},
        "places": len(each),
    }


def measured_timeline(
    step: MeasuredStep,
    outline: Outline,
    every: Mapping[str, Collective],
    row_of: Mapping[str, int],
) -> dict[str, Any] | None:
    """The timeline of the first device; None if there is none.

    Arguments:
      every: the collectives of the plan, by name.
      row_of: the visible row of each.
    """
    if not step.spans:
        return None
    steps = [own for own, _ in steps_by_number(outline.program["steps"])]
    spans = list[tuple[Any, ...]]()
    kernels = (s for s in step.spans if not s.sends)
    for (phase, title, node), some in groupby(kernels, key=lambda s: _part(s, steps, outline)):
        for start, end in _touching(some, step.seconds / MOST_GAPS):
            spans.append((0, start, end, phase, title, f"{phase}: {title}", 0, [], node or None, None))
    for s in (s for s in step.spans if s.sends):
        spans.append((1, s.start, s.end, *_sent(s, every, row_of), None, None))
    return {
        "name": f"one step on the first device, {step.word} {step.how}",
        "seconds": step.seconds,
        "lanes": list(LANES),
        "spans": {name: [s[k] for s in spans] for k, name in enumerate(SPAN)},
        "held": [],
    }


def _part(span: MeasuredSpan, steps: Sequence[Mapping[str, Any]], outline: Outline) -> tuple[str, str, int]:
    """The phase of a kernel, and its part of the program with its group; 0 for none."""
    leaf = outline.leaf.get(id(steps[span.step])) if 0 <= span.step < len(steps) else None
    return ("kernel", span.label or MADE_BY_XLA, 0) if leaf is None else part_of(outline, leaf)


def _sent(span: MeasuredSpan, every: Mapping[str, Collective], row_of: Mapping[str, int]) -> tuple[Any, ...]:
    known = [every[name] for name in span.rows if name in every]
    if not known:
        return "kernel", span.label, f"{span.label}, of no row of the plan", 0, []
    more = f" and {len(known) - 1} more, sent as one" if len(known) > 1 else ""
    title = f"{kind_text(known[0].kind)} of {known[0].tensor}{more}"
    shown = list(dict.fromkeys(row_of[c.name] for c in known))
    if span.waits:
        return "wait", "waits", f"waits for others, for the {title}", 0, shown
    return known[0].kind, kind_text(known[0].kind), title, 0, shown


def _touching(spans: Iterator[MeasuredSpan], gap: float) -> Iterator[tuple[float, float]]:
    """Spans, joined where no more than a gap lies between them.

    >>> spans = [MeasuredSpan(0.0, 1.0, 0), MeasuredSpan(1.1, 2.0, 0), MeasuredSpan(3.0, 4.0, 0)]
    >>> list(_touching(iter(spans), 0.5))
    [(0.0, 2.0), (3.0, 4.0)]
    """
    start, end = -1.0, -1.0
    for s in sorted(spans, key=lambda s: s.start):
        if end < 0:
            start, end = s.start, s.end
        elif s.start - end <= gap:
            end = max(end, s.end)
        else:
            yield start, end
            start, end = s.start, s.end
    if end >= 0:
        yield start, end


MOST_GAPS = 4000
"""In a step: kernels of one part of the program with less than such a share of it between them are one."""
