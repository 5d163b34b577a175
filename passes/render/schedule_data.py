"""Schedules and timelines as JSON has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sbp.passes.schedule.actions import Action, Kind, Schedule
from sbp.passes.schedule.spans import Span, Timeline


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
