"""What a device of each placement of a pipeline holds over the schedule, as the page draws it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sbp.passes.explain.plan import PlanData, StageFigures
from sbp.passes.render.stage_tables import place_heading
from sbp.passes.schedule.actions import Kind
from sbp.passes.schedule.memory import Footprint, peaks
from sbp.passes.schedule.spans import Span

OUTSIDE = "instead of these two, before and after all micro-batches"
LARGEST = 6
"""Of what lies at rest, those that are named."""
ROW = ("what", "type", "sbp", "bytes", "inner")
"""Of what is held: `inner` is part of the row above it."""


def memories(plan: PlanData, parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per placement, its curve and what is held at the most; none without micro-batches.

    Arguments:
      parts: what the page has of each placement.
    """
    if plan.schedule is None or plan.timeline is None or not plan.places:
        return []
    trains = plan.schedule.trains
    footprint = Footprint(
        tuple(s.residual_bytes if trains else 0.0 for s in plan.figures),
        tuple(s.for_weights_bytes if trains else 0.0 for s in plan.figures),
    )
    held, live = peaks(plan.schedule, footprint), plan.live
    found = []
    for k, place in enumerate(plan.places):
        spans = plan.timeline.compute_spans(k)
        points = list(_course(spans, plan.figures, footprint, float(plan.timeline.start), place.rest_bytes))
        end = float(plan.timeline.makespan)
        rest = [
            ("at rest: arguments, and sums over micro-batches", "", "", place.rest_bytes, 0),
            *_largest(parts[k]),
            (f"micro-batches, at most {live[k]:g} at once", "", "", held[k], 0),
            ("while a piece runs, the one that needs most", "", "", place.working_bytes, 0),
            (OUTSIDE, "", "", place.outside_bytes - place.rest_bytes, 0),
        ]
        found.append(
            {
                "title": place_heading(plan, k),
                "peak": plan.memory[k],
                "course": [b for _, b in points] + [points[-1][1] if points else place.rest_bytes],
                "seconds": [t for t, _ in points] + [end],
                "rows": {name: [row[c] for row in rest] for c, name in enumerate(ROW)},
            }
        )
    return found


def _course(
    spans: Sequence[Span],
    stages: Sequence[StageFigures],
    footprint: Footprint,
    start: float,
    rest_bytes: float,
) -> Iterator[tuple[float, float]]:
    """When what is held changes, and the bytes from then on: what stays, micro-batches, and what runs."""
    changes: list[tuple[float, int, float]] = []
    for s in spans:
        own = _working(s.action.kind, stages[s.action.stage])
        changes += [
            (float(s.start), 1, footprint.before(s.action) + own),
            (float(s.end), 0, -footprint.after(s.action) - own),
        ]
    bytes_held = rest_bytes
    yield 0.0, bytes_held
    for at, _, change in sorted(changes):
        bytes_held += change
        yield at - start, max(rest_bytes, bytes_held)


def _working(kind: Kind, stage: StageFigures) -> float:
    """What an action of a stage needs while it runs."""
    both = max(stage.input_working_bytes, stage.weight_working_bytes)
    return {
        Kind.F: stage.forward_working_bytes,
        Kind.B: both,
        Kind.I: stage.input_working_bytes,
        Kind.W: stage.weight_working_bytes,
    }.get(kind, 0.0)


def _largest(part: Mapping[str, Any]) -> Iterator[tuple[str, str, str, float, int]]:
    """The largest arguments of a placement."""
    rest = part["at_rest"]
    own = [
        k
        for k, kind in enumerate(rest["kind"])
        if kind == "argument" and rest["bytes"][k] and not rest["path"][k].startswith("from ")
    ]
    for k in sorted(own, key=lambda k: (-rest["bytes"][k], rest["path"][k]))[:LARGEST]:
        text = f"{rest['dtype'][k]}[{', '.join(map(str, rest['shape'][k]))}]"
        yield rest["path"][k], text, rest["sbp"][k], rest["bytes"][k], 1
