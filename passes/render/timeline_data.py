"""When what runs in a step, and what a device holds meanwhile, as the page of a plan draws it.

Schedules and timelines as JSON has them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from sbp.passes.explain.plan import Collective
from sbp.passes.explain.words import kind_text
from sbp.passes.program.names import PHASES
from sbp.passes.render.outline import Outline
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


LANES = ("kernels", "network")
SPAN = ("lane", "from", "to", "kind", "label", "title", "stage", "rows", "node", "opens")
"""Of spans: `rows` of the table and the `node` of the graph that they belong to, and the timeline that they
`open`, as a loop does; None for none."""
MOST_TRIPS = 12
"""Loops whose trips are drawn, the longest."""


@dataclass(frozen=True)
class _Loop:
    """A loop or a branch that runs in a step.

    Arguments:
      seconds: of all its trips.
    """

    step: Mapping[str, Any]
    seconds: float


def step_timelines(
    outline: Outline, every: Sequence[Collective], row_of: Mapping[str, int], seconds: float
) -> list[dict[str, Any]]:
    """The estimated step of a program, and one trip of each of its loops; none for a plan without it.

    Arguments:
      every: the collectives of the plan.
      row_of: the row that is shown for each, by its name.
      seconds: of the step.
    """
    program = outline.program
    if "timeline" not in program:
        return []
    drawn = _Drawn(outline, every, row_of)
    name = "one step on one device, estimated"
    found = [drawn.timeline(name, program["timeline"], program["steps"], seconds)]
    course = program.get("course", {})
    if "seconds" in course:
        found[0] |= {
            "held": [list(zip(course["seconds"], course["bytes"], strict=True))],
            "holder": "the device",
        }
    # Loops in loops come behind those around them.
    for loop in drawn.loops:
        times, bodies = loop.step["trips"], loop.step["bodies"]
        for k, timeline in enumerate(loop.step.get("timelines", ())):
            trip = f"branch {k}" if len(bodies) > 1 else "one trip"
            name = f"{trip} of {loop.step['name']} at {loop.step['at']}" + (
                f", of {times}" if times > 1 else ""
            )
            length = max((end for _, end, _ in (*timeline["kernels"], *timeline["sent"])), default=0.0)
            if length and len(found) <= MOST_TRIPS:
                drawn.opened.setdefault(id(loop.step), len(found))
                lanes = drawn.timeline(name, timeline, bodies[k], length)
                found.append(lanes | {"trip": True} | _trip_held(timeline, length))
    for t in found:
        t["spans"]["opens"] = [drawn.opened.get(step) for step in t["spans"]["opens"]]
    return found


def _trip_held(timeline: Mapping[str, Any], length: float) -> dict[str, Any]:
    """What one trip holds beyond what stays, over as long as the trip is; nothing from older files."""
    seconds, held = timeline.get("held", ((), ()))
    if not any(held):
        return {}
    total = seconds[-1] or 1.0
    points = [[length * at / total, b] for at, b in zip(seconds, held, strict=True)]
    return {"held": [points], "holder": "a trip, beyond what stays from trip to trip,"}


@dataclass
class _Drawn:
    """Timelines as they are drawn.

    Arguments:
      loops: those seen so far, which have timelines of their own.
      opened: by the id of a loop, its timeline.
    """

    outline: Outline
    every: Sequence[Collective]
    row_of: Mapping[str, int]
    loops: list[_Loop] = field(default_factory=list)
    opened: dict[int, int] = field(default_factory=dict)

    def timeline(
        self, name: str, ran: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], seconds: float
    ) -> dict[str, Any]:
        """Lanes with their spans."""
        spans = [*self.kernels(ran["kernels"], steps), *map(self.transfer_data, ran["sent"])]
        columns = {name: [s[k] for s in spans] for k, name in enumerate(SPAN)}
        return {"name": name, "seconds": seconds, "lanes": list(LANES), "spans": columns, "held": []}

    def kernels(
        self, ran: Sequence[Sequence[Any]], steps: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[Any, ...]]:
        """Kernels of a part of the program that follow each other as one span, a loop by itself."""
        found: list[_Loop] = []
        for (phase, title, node, loop), some in groupby(ran, key=lambda x: self.part(steps[x[2]])):
            own = list(some)
            for start, end in _runs([(a, b) for a, b, _ in own]):
                yield 0, start, end, phase, title, f"{phase}: {title}", 0, [], node, loop
            if loop is not None:
                found.append(_Loop(steps[own[0][2]], own[-1][1] - own[0][0]))
        self.loops += sorted(found, key=lambda x: -x.seconds)

    def part(self, step: Mapping[str, Any]) -> tuple[str, str, int | None, int | None]:
        """The phase, the title and the group of the part of the program that a step belongs to; of a loop its
        id besides."""
        leaf = self.outline.leaf.get(id(step), 0)
        phase, title, node = part_of(self.outline, leaf)
        if "loop" not in step:
            return phase, title, node or None, None
        return phase, self.outline.groups[leaf].title, leaf, id(step)

    def transfer_data(self, ran: Sequence[Any]) -> tuple[Any, ...]:
        """What is sent at a time."""
        start, end, rows = ran
        first = self.every[rows[0]]
        more = f" and {len(rows) - 1} more, sent as one" if len(rows) > 1 else ""
        title = f"{kind_text(first.kind)} of {first.tensor}{more}"
        shown = list(dict.fromkeys(self.row_of[self.every[r].name] for r in rows))
        return 1, start, end, first.kind, kind_text(first.kind), title, 0, shown, None, None


def part_of(outline: Outline, leaf: int) -> tuple[str, str, int]:
    """The phase of a line, the part of it, such as a layer, and its group."""
    around = [leaf]
    while outline.groups[around[-1]].parent > 0:
        around.append(outline.groups[around[-1]].parent)
    chain = around[::-1]
    phase = next((outline.groups[k].title for k in chain if outline.groups[k].kind == "phase"), PHASES[0])
    inside = [k for k in chain if outline.groups[k].kind not in ("phase", "loop", "program")]
    node = inside[0] if inside else chain[0]
    return phase, outline.groups[node].title if inside else phase, node


def _runs(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of which those that touch are one."""
    found = list[tuple[float, float]]()
    for start, end in spans:
        if found and start - found[-1][1] <= 1e-12:
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return found


def memory_data(program: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a device holds, over the step and at the peak; None where that is not known."""
    if "peak" not in program:
        return None
    names, values = program["names"], program["values"]
    live = sorted(program["peak"], key=lambda x: -x[2])
    return {
        "course": program.get("course", {}).get("bytes", []),
        "seconds": program.get("course", {}).get("seconds", []),
        "between_bytes": program["between_bytes"],
        "live": {
            "name": [names[str(v)] for v, _, _ in live],
            "type": [f"{values[str(v)][1]}[{', '.join(map(str, values[str(v)][0]))}]" for v, _, _ in live],
            "sbp": [nd for _, nd, _ in live],
            "bytes": [n for _, _, n in live],
        },
    }
