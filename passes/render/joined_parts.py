"""The page data of a program with stages: its placements as one graph, with transfers between them."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sbp.passes.explain.measurement import MeasuredStep
from sbp.passes.explain.plan import Collective, PlanData, StageFigures, merged_collective
from sbp.passes.explain.words import bubble_cause
from sbp.passes.render.measurement_data import places_data, sent_apart
from sbp.passes.render.page_data import columns, figures, part_data, row_columns
from sbp.passes.render.stage_memory import memories
from sbp.passes.render.stage_tables import alike_sends, place_heading
from sbp.passes.render.timeline import WORDS
from sbp.passes.render.timeline_data import SPAN
from sbp.passes.schedule.actions import SENDS
from sbp.passes.schedule.memory import Footprint
from sbp.passes.schedule.spans import Span, Timeline

Columns = Mapping[str, list[Any]]


def joined_data(
    plan: PlanData, timelines: Sequence[Timeline] = (), places: Sequence[MeasuredStep] = ()
) -> dict[str, Any]:
    """The data of the page of a program with stages.

    Arguments:
      timelines: instead of the plan's own, such as it and a measured one.
      places: a measured step per placement; none for no measured figures.
    """
    sends = alike_sends(plan)
    parts = [part_data(p, places[i] if places else None, plan) for i, p in enumerate(plan.stages)]
    joined = joined_parts(plan, parts, sends, sent_apart(len(sends)) if places else {})
    rows = sends_by_ends(sends, len(joined["rows"]["kind"]) - len(sends))
    if places:
        joined["beside"] = places_data(parts)
    schedule = "" if plan.schedule is None else f", schedule {plan.schedule.name}"
    shown = timelines or ([plan.timeline] if plan.timeline is not None else [])
    return {
        "name": plan.name,
        "placement": f"{len(plan.stages)} placements of {plan.placement}{schedule}",
        "hardware": plan.hardware.name,
        "figures": figures(plan) | _bubble(plan),
        "notes": list(plan.notes),
        "timelines": [timeline_data(t, plan.figures, places_of(joined), rows) for t in shown],
        "stages": stage_columns(plan),
        "memories": memories(plan, parts),
        **joined,
    }


def _bubble(plan: PlanData) -> dict[str, float | str | None]:
    timeline = plan.timeline
    if timeline is None:
        return {"bubble": None}
    return {"bubble": timeline.bubble_fraction, "bubble_cause": bubble_cause(timeline)}


def stage_columns(plan: PlanData) -> Columns:
    """The stages and their costs."""
    names = ("stage", "place", "forward", "inputs", "weights", "kept_bytes", "weight_bytes")
    rows = (
        (
            k,
            place_heading(plan, s.place),
            s.forward_seconds,
            s.input_seconds,
            s.weight_seconds,
            s.residual_bytes,
            s.weight_bytes,
        )
        for k, s in enumerate(plan.figures)
    )
    return columns(names, rows)


def joined_parts(
    plan: PlanData,
    parts: Sequence[Mapping[str, Any]],
    sends: Sequence[Sequence[Collective]],
    more: Columns = MappingProxyType({}),
) -> dict[str, Any]:
    """The graphs of all placements as one, each in a group of its own, with transfers as nodes between.

    Arguments:
      sends: the transfers between placements, equal ones together.
      more: further columns of transfers, which the rows of placements have too.
    """
    n_groups = 1 + sum(len(p["groups"]["kind"]) if "groups" in p else 1 for p in parts)
    n_sent = sum(len(p["sent"]["kind"]) for p in parts if "sent" in p)
    group, sent, row, tensor = 1, n_groups, 0, 0
    roots: list[int] = []
    found: list[Mapping[str, Columns]] = []
    lines: dict[str, Any] = {}
    for place, part in enumerate(parts):
        roots.append(group)
        own = len(part["groups"]["kind"]) if "groups" in part else 1
        found.append(_Moved(group, own, sent, row, tensor, place).part(part, place_heading(plan, place)))
        lines.update(part.get("lines", {}))
        group, sent = group + own, sent + len(found[-1]["sent"]["kind"])
        row, tensor = row + len(part["rows"]["kind"]), tensor + len(found[-1]["tensors"]["name"])
    found.append(_Sends(found, roots, n_groups + n_sent, row).columns(sends, more))
    top: dict[str, Any] = {"groups": columns(GROUP, [("program", "program", "", -1, 1, 0, 0.0)])}
    measured = [p["groups"].get("measured") for p in found if "groups" in p]
    if any(measured):
        top["groups"]["measured"] = [math.fsum(own[0] for own in measured if own)]
    tables = {k: dict.fromkeys(columns_of) for p in found for k, columns_of in p.items()}
    joined: dict[str, Any] = {
        name: {c: [x for p in (top, *found) for x in p.get(name, {}).get(c, [])] for c in cs}
        for name, cs in tables.items()
    }
    joined["groups"]["ops"][0] = sum(joined["groups"]["ops"][r] for r in roots)
    joined["groups"]["seconds"][0] = sum(joined["groups"]["seconds"][r] for r in roots)
    return joined | {"places": [p for part in parts for p in part["places"]], "lines": lines}


GROUP = ("kind", "title", "where", "parent", "times", "ops", "seconds")
SENT = ("kind", "parent", "rows", "count", "bytes", "seconds", "exposed")
EDGE = ("from", "to", "bytes", "next", "count", "tensors")


class _Moved:
    """The columns of a part as columns of the whole: numbers of groups, rows and tensors are shifted."""

    def __init__(self, group: int, groups: int, sent: int, row: int, tensor: int, place: int) -> None:
        self.group, self.groups, self.sent = group, groups, sent
        self.row, self.tensor, self.place = row, tensor, place

    def node(self, v: int) -> int:
        return self.group + v if v < self.groups else self.sent + v - self.groups

    def part(self, part: Mapping[str, Any], title: str) -> Mapping[str, Columns]:
        none: dict[str, Columns] = {
            "groups": columns(GROUP, [("program", title, "", -1, 1, 0, 0.0)]),
            "sent": columns(SENT, []),
            "edges": columns(EDGE, []),
            "made": columns(("group", "tensor"), []),
            "tensors": columns(("name", "dtype", "shape", "sbp", "bytes", "place"), []),
        }
        p = {**none, **part}
        groups = p["groups"] | {
            "parent": [0 if v < 0 else self.group + v for v in p["groups"]["parent"]],
            "kind": ["place", *p["groups"]["kind"][1:]],
            "title": [title, *p["groups"]["title"][1:]],
        }
        sent = p["sent"] | {
            "parent": [self.group + v for v in p["sent"]["parent"]],
            "rows": [[self.row + r for r in rows] for rows in p["sent"]["rows"]],
        }
        edges = p["edges"] | {
            "from": list(map(self.node, p["edges"]["from"])),
            "to": list(map(self.node, p["edges"]["to"])),
            "tensors": [[self.tensor + t for t in ts] for ts in p["edges"]["tensors"]],
        }
        made = {
            "group": list(map(self.node, p["made"]["group"])),
            "tensor": [self.tensor + t for t in p["made"]["tensor"]],
        }
        rest = p["at_rest"] | {"nodes": [list(map(self.node, vs)) for vs in p["at_rest"]["nodes"]]}
        found = {"groups": groups, "sent": sent, "edges": edges, "made": made, "at_rest": rest}
        found |= {"rows": p["rows"], "tensors": p["tensors"]}
        for name in ("rows", "tensors", "at_rest"):
            found[name] = found[name] | {"place": [self.place] * len(found[name]["place"])}
        return found


class _Sends:
    """Transfers between placements, as nodes between their makers and their readers.

    Arguments:
      parts: the columns of the placements.
      roots: the group of each.
      node, row: the first of these nodes, and of their rows.
    """

    def __init__(
        self, parts: Sequence[Mapping[str, Columns]], roots: Sequence[int], node: int, row: int
    ) -> None:
        self.parts, self.roots, self.node, self.row = parts, roots, node, row

    def columns(
        self, sends: Sequence[Sequence[Collective]], more: Columns = MappingProxyType({})
    ) -> Mapping[str, Columns]:
        """Rows, nodes and edges."""
        sent, edges = list[tuple[Any, ...]](), dict[tuple[int, int], tuple[Any, ...]]()
        for k, same in enumerate(sends):
            c = merged_collective(same)
            sent.append(("send", 0, [self.row + k], c.count, c.wire_bytes, c.seconds, c.exposed_seconds))
            for one in same:
                a, b = map(int, one.axes)
                carried, at = self.tensors(one, a), self.node + k
                ends = [(x, at) for x in self.ends(one, a, "to ")] + [
                    (at, x) for x in self.ends(one, b, "from ")
                ]
                for pair in ends:
                    _, _, size, _, count, listed = edges.get(pair, (*pair, 0.0, 0, 0, []))
                    size += one.wire_bytes / max(one.count, 1)
                    edges[pair] = (*pair, size, 0, count + 1, [*listed, *carried])
        rows = row_columns([merged_collective(same) for same in sends]) | dict(more)
        return {"rows": rows, "sent": columns(SENT, sent), "edges": columns(EDGE, list(edges.values()))}

    def ends(self, c: Collective, place: int, word: str) -> list[int]:
        """The nodes that make or read a transfer, by its name on the placement; else the placement itself."""
        rest, found = self.parts[place]["at_rest"], list[int]()
        for path, nodes in zip(rest["path"], rest["nodes"], strict=True):
            if path.startswith(word) and names_tensor(path, c.tensor, c.source):
                found += nodes
        return list(dict.fromkeys(found)) or [self.roots[place]]

    def tensors(self, c: Collective, place: int) -> list[int]:
        """The transfer among the tensors of a placement."""
        before = sum(len(p["tensors"]["name"]) for p in self.parts[:place])
        t = self.parts[place]["tensors"]
        pairs = enumerate(zip(t["name"], t["shape"], strict=True), before)
        return [k for k, (name, shape) in pairs if name == c.tensor and shape == list(c.shape)][:1]


_NUMBERED = re.compile(r" \(\d+\)$")


def names_tensor(path: str, tensor: str, source: str) -> bool:
    """Whether the path of a transfer on a placement means a tensor.

    >>> names_tensor("from stage 1: max, f.py:3 (2)", "max", "f.py:3")
    True
    """
    said = path.partition(": ")[2]
    return any(name in (tensor, f"{tensor}, {source}") for name in (said, _NUMBERED.sub("", said)))


def places_of(joined: Mapping[str, Any]) -> list[int]:
    """The groups of placements."""
    return [k for k, kind in enumerate(joined["groups"]["kind"]) if kind == "place"]


def sends_by_ends(sends: Sequence[Sequence[Collective]], first: int) -> dict[tuple[int, int], list[int]]:
    """The rows of transfers, by the two placements.

    Arguments:
      first: the first of these rows.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for row, same in enumerate(sends, first):
        a, b = map(int, same[0].axes)
        found.setdefault((a, b), []).append(row)
    return found


def timeline_data(
    timeline: Timeline,
    stages: Sequence[StageFigures],
    places: Sequence[int] = (),
    rows: Mapping[tuple[int, int], list[int]] = MappingProxyType({}),
) -> dict[str, Any]:
    """A timeline as it is drawn: lanes with their spans, and the bytes of micro-batches on each rank.

    Arguments:
      places: the groups of placements.
      rows: of transfers, by the two placements.
    """
    start = float(timeline.start)
    place = [s.place for s in stages]

    def drawn(rank: int, s: Span) -> tuple[Any, ...]:
        kind, stage, peer = s.action.kind, s.action.stage, s.action.peer
        sends = kind in SENDS
        known = stage < len(place) and (not sends or (peer is not None and peer < len(place)))
        at = place[stage] if known else None
        sent = rows.get((at, place[peer]), []) if sends and at is not None and peer is not None else []
        node = None if sends or at is None or at >= len(places) else places[at]
        title = f"{WORDS[kind]}, stage {stage}, micro-batch {s.action.microbatch}"
        ends = float(s.start) - start, float(s.end) - start
        return 2 * rank + sends, *ends, kind.value, str(s.action.microbatch), title, stage, sent, node, None

    spans = [drawn(rank, s) for rank, row in enumerate(timeline.spans) for s in row if s.action.kind in WORDS]
    lanes = [name for rank in range(timeline.ranks) for name in (f"rank {rank}", f"rank {rank}, sends")]
    return {
        "name": timeline.name,
        "seconds": float(timeline.makespan),
        "bubble": timeline.bubble_fraction,
        "lanes": lanes,
        "spans": columns(SPAN, spans),
        "held": [list(_held(row, stages, start)) for row in timeline.spans] if stages else [],
    }


def _held(
    spans: Sequence[Span], stages: Sequence[StageFigures], start: float
) -> Iterator[tuple[float, float]]:
    """The bytes of micro-batches on a rank over time: (time of a change, bytes from then on)."""
    own = Footprint(tuple(s.residual_bytes for s in stages), tuple(s.for_weights_bytes for s in stages))
    changes = [
        *((float(s.start), own.before(s.action)) for s in spans),
        *((float(s.end), -own.after(s.action)) for s in spans),
    ]
    bytes_held = 0.0
    for at, change in sorted(changes):
        if change:
            bytes_held += change
            yield at - start, max(0.0, bytes_held)
