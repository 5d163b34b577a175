"""What the page of a plan is given: figures, the folded graph, rows, tensors and lines, in columns.

Columns instead of records keep a page of many layers small. Every text is data: the page writes it as text.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sbp.layout import local_shape
from sbp.passes.explain.choices import HeldPlan, PlanFigures, Removal, SentAt, TensorChoices
from sbp.passes.explain.measurement import MeasuredStep
from sbp.passes.explain.plan import Collective, PlanData
from sbp.passes.explain.plan_figures import is_gone
from sbp.passes.explain.rest_lines import rest_lines
from sbp.passes.explain.words import kind_text, misfit_text, over_text, proof_text, tensor_text, verdict_text
from sbp.passes.render.measurement_data import beside_data, group_seconds, measured_timeline, row_times
from sbp.passes.render.outline import Outline
from sbp.passes.render.program_data import program_data
from sbp.passes.render.timeline_data import memory_data, step_timelines
from sbp.passes.render.wiring import Wiring, WordedVersion
from sbp.signature import NdSbp, format_sbp
from sbp.text.units import bytes_text

MAX_TENSORS = 60
"""Of a line, the largest; a line of an optimizer makes thousands."""
SAID = 0.05
"""Of a collective that is gone: what is sent instead and takes less is not worth a word."""
MAX_CARRIED = 6
"""Tensors of an edge that are named, the largest."""


def page_data(plan: PlanData, beside: MeasuredStep | None = None) -> dict[str, Any]:
    """The data of the page of a plan on one placement.

    Arguments:
      beside: what a step took, to stand beside the estimates.
    """
    found = {"name": plan.name, "placement": str(plan.placement), "hardware": plan.hardware.name}
    return found | {"figures": figures(plan), "notes": list(plan.notes), **part_data(plan, beside)}


def part_data(
    plan: PlanData, beside: MeasuredStep | None = None, whole: PlanData | None = None
) -> dict[str, Any]:
    """What is drawn and listed of a plan on one placement.

    Arguments:
      beside: as of `page_data`.
      whole: the plan of the program that this one is of a placement of.
    """
    program = program_data(plan)
    merged = [c for c, _ in plan.merged_collectives()]
    found: dict[str, Any] = {"places": [place_data(plan, whole)], "rows": row_columns(merged)}
    if beside is not None:
        found["rows"] |= row_times(merged, beside)
        found["beside"] = beside_data(plan, beside, program)
    if program is None:
        return found | {"at_rest": at_rest(plan, {}, {})}
    outline = Outline.of(program, plan.in_paths)
    wiring = Wiring.of(outline, plan.placement.shape)
    row_of = {name: k for k, c in enumerate(merged) for name in c.name.split("+")}
    timelines = step_timelines(outline, plan.collectives, row_of, plan.step_seconds)
    drawn = graph(outline, wiring, plan.collectives, row_of)
    if beside is not None:
        ran = measured_timeline(beside, outline, {c.name: c for c in plan.collectives}, row_of)
        timelines += [] if ran is None else [ran]
        if beside.step_seconds:
            drawn["groups"] |= {"measured": group_seconds(outline, beside)}
    return found | {
        "timelines": timelines,
        "memory": memory_data(program),
        "at_rest": at_rest(plan, wiring.readers, wiring.makers, program),
        "lines": dict(program.get("lines", {})),
        **drawn,
    }


def row_columns(merged: Sequence[Collective], place: int = 0) -> dict[str, list[Any]]:
    """Rows of the table."""
    return columns(ROW_COLUMNS, (_row(c, place) for c in merged))


def figures(plan: PlanData) -> dict[str, Any]:
    """The figures of the first screen, and what they mean in words."""
    capacity = plan.hardware.memory_bytes
    return {
        "step_seconds": plan.step_seconds,
        "serial_seconds": plan.seconds,
        "exposed_seconds": plan.exposed_seconds,
        "sent_seconds": sum(c.seconds for c in plan.collectives),
        "wire_bytes": plan.wire_bytes,
        "count": sum(c.count for c in plan.collectives),
        "kinds": [[k, n, b] for k, (n, b) in plan.by_kind().items()],
        "memory_bytes": plan.memory_bytes,
        "capacity_bytes": capacity if math.isfinite(capacity) else None,
        "fits": plan.fits,
        "cut_short": plan.cut_short,
        "misfit": misfit_text(plan),
        "verdict": verdict_text(plan),
        "proven": plan.cheapest_seconds is None and plan.cheapest_gap == 0.0 and plan.fits,
        "gap": _headline(plan),
    }


def _headline(plan: PlanData) -> str:
    """How good a plan is, in a few words; no proof is claimed for a step with overlap."""
    if not plan.fits:
        return "does not fit"
    if plan.cut_short:
        return "cut short"
    return proof_text(plan) if plan.cheapest_seconds is None else "shortest step found"


ROW_COLUMNS = (
    "kind",
    "tensor",
    "type",
    "shape",
    "before",
    "after",
    "over",
    "axes",
    "times",
    "bytes",
    "seconds",
    "exposed",
    "line",
    "reason",
    "names",
    "message",
    "place",
)
"""Of rows: what is sent alike in all layers is one."""


def _row(c: Collective, place: int) -> tuple[Any, ...]:
    how = c.before, c.after
    return (
        c.kind,
        c.tensor,
        tensor_text(c),
        list(c.shape),
        *map(format_sbp, how),
        over_text(c),
        list(c.axes),
        c.count,
        c.wire_bytes,
        c.seconds,
        c.exposed_seconds,
        c.source,
        c.reason,
        c.name,
        c.message,
        place,
    )


def columns(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> dict[str, list[Any]]:
    """Rows as columns.

    >>> columns(("a", "b"), [(1, "x"), (2, "y")])
    {'a': [1, 2], 'b': ['x', 'y']}
    """
    listed = list(rows)
    return {name: [row[k] for row in listed] for k, name in enumerate(names)}


def graph(
    outline: Outline, wiring: Wiring, every: Sequence[Collective], row_of: Mapping[str, int]
) -> dict[str, Any]:
    """Groups, collectives where they stand, edges, and the tensors of every line.

    Arguments:
      every: the collectives of the plan.
      row_of: the row that is shown for each, by its name.
    """
    tensors = _Tensors(wiring)
    made = [
        (at, tensors.number(v))
        for at, versions in wiring.versions.items()
        for v in sorted(versions, key=wiring.bytes, reverse=True)[:MAX_TENSORS]
    ]
    groups = columns(
        ("kind", "title", "where", "parent", "times", "ops", "seconds"),
        ((g.kind, g.title, g.where, g.parent, g.times, g.ops, g.seconds) for g in outline.groups),
    )
    sent = columns(
        ("kind", "parent", "rows", "count", "bytes", "seconds", "exposed"),
        (_place(s.kind, s.parent, [every[r] for r in s.rows], row_of) for s in wiring.collectives),
    )
    edges = columns(
        ("from", "to", "bytes", "next", "count", "tensors"),
        (
            (
                a,
                b,
                sum(e.versions.values()),
                int(e.next),
                len(e.versions),
                [tensors.number(v) for v in sorted(e.versions, key=lambda v: -e.versions[v])[:MAX_CARRIED]],
            )
            for (a, b), e in wiring.edges.items()
        ),
    )
    return {
        "groups": groups,
        "sent": sent,
        "edges": edges,
        "made": columns(("group", "tensor"), made),
        "tensors": tensors.columns(),
    }


def _place(kind: str, parent: int, own: Sequence[Collective], row_of: Mapping[str, int]) -> tuple[Any, ...]:
    """Collectives that stand in one place."""
    return (
        kind,
        parent,
        list(dict.fromkeys(row_of[c.name] for c in own)),
        sum(c.count for c in own),
        sum(c.wire_bytes for c in own),
        sum(c.seconds for c in own),
        sum(c.exposed_seconds for c in own),
    )


class _Tensors:
    """The tensors that are spoken of, numbered."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self.numbers: dict[WordedVersion, int] = {}

    def number(self, version: WordedVersion) -> int:
        return self.numbers.setdefault(version, len(self.numbers))

    def columns(self) -> dict[str, list[Any]]:
        program = self.wiring.outline.program
        values, names = program["values"], program["names"]
        return columns(
            ("name", "dtype", "shape", "sbp", "bytes", "place"),
            (
                (names[str(v)], *values[str(v)][1::-1], nd, self.wiring.bytes((v, nd)), 0)
                for v, nd in self.numbers
            ),
        )


def at_rest(
    plan: PlanData,
    readers: Mapping[int, Sequence[int]],
    makers: Mapping[int, int],
    program: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Arguments and results: how they lie, and the nodes that read or make them."""
    rows = []
    values = {} if program is None else program["values"]
    given = [] if program is None else [v for v, _ in program["inputs"]]
    for k, (path, nd) in enumerate(zip(plan.in_paths, plan.in_sbp, strict=True)):
        value = values.get(str(given[k])) if k < len(given) else None
        nodes = list(readers.get(given[k], ())) if k < len(given) else []
        told = *(value[1::-1] if value else ("", None)), nodes, 0, _held(plan, value, nd)
        rows.append(("argument", path, format_sbp(nd), *told))
    made = [] if program is None else [v for v, _ in program["outputs"]]
    for k, (path, nd) in enumerate(zip(plan.out_paths, plan.out_sbp, strict=True)):
        value = values.get(str(made[k])) if k < len(made) else None
        nodes = [makers[k]] if k in makers else []
        told = *(value[1::-1] if value else ("", None)), nodes, 0, _held(plan, value, nd)
        rows.append(("result", path, format_sbp(nd), *told))
    return columns(("kind", "path", "sbp", "dtype", "shape", "nodes", "place", "bytes"), rows)


def _held(plan: PlanData, value: Sequence[Any] | None, nd: NdSbp) -> float | None:
    """The bytes of a device's part; None for what no file says."""
    if value is None:
        return None
    shape, _, itemsize = value
    return math.prod(local_shape(shape, nd, plan.placement.shape)) * float(itemsize)


def row_key(c: Collective) -> str:
    """What tells a row of a page from all others; rows of several placements may be called alike."""
    return " ".join((c.name, c.kind, c.tensor, c.source))


def choices_data(found: TensorChoices, row: Collective | None, plan: PlanData) -> dict[str, Any]:
    """What a tensor could lie as instead, and what the whole plan would take then; how it lies first.

    Arguments:
      row: the collective that is asked about, if it is known whether that is gone then.
    """
    how, where = found.hold
    lies = " → ".join(map(format_sbp, found.signatures))
    first = _choice(lies, found.plan, found.limit_bytes) | {"chosen": True, "gone": None, "instead": ""}
    others = [
        _choice(format_sbp(held.signature), held.figures, found.limit_bytes)
        | {"chosen": False}
        | _gone(held, row, plan)
        for held in found.alternatives
    ]
    said = {"tensor": found.tensor, "alike": found.alike, "hold": how, "where": where, "near": found.near}
    return said | {"row": None if row is None else row_key(row), "rows": [first, *others]}


def _choice(nd: str, f: PlanFigures, limit_bytes: float) -> dict[str, Any]:
    figures = {"seconds": f.step_seconds, "bytes": f.wire_bytes, "memory": f.memory_bytes}
    return {"sbp": nd, **figures, "fits": f.memory_bytes <= limit_bytes}


def _gone(held: HeldPlan, row: Collective | None, plan: PlanData) -> dict[str, Any]:
    """Whether a collective is gone from a plan, and the dearest that this sends at its line instead."""
    if row is None or held.sent_at is None:
        return {"gone": None, "instead": ""}
    return {"gone": is_gone(row, held.sent_at, plan), "instead": _instead(held.sent_at, row, plan)}


def _instead(sent: Sequence[SentAt], row: Collective, plan: PlanData) -> str:
    """What a plan sends more than another, the dearest; "" for nothing."""
    before: dict[tuple[str, str, tuple[int, ...]], float] = {}
    for c in plan.collectives:
        key = c.kind, c.source, c.shape
        before[key] = before.get(key, 0.0) + c.seconds
    more = [(s.seconds - before.get(s.key, 0.0), s) for s in sent]
    seconds, dearest = max(more, key=lambda x: x[0], default=(0.0, None))
    worth = dearest is not None and seconds > SAID * row.seconds
    return f"{kind_text(dearest.kind)} at {dearest.source}" if worth and dearest is not None else ""


def removal_data(found: Removal, row: Collective, plan: PlanData) -> dict[str, Any]:
    """What to write to do without a collective."""
    said: dict[str, Any] = {"row": row_key(row), "remark": found.remark, "whole": found.whole}
    f = found.figures
    if f is None:
        return said | {"holds": []}
    limit = plan.hardware.memory_bytes
    holds = [
        {"tensor": h.tensor, "hold": h.how, "where": h.where, "sbp": format_sbp(h.signature)}
        for h in found.holds
    ]
    figures = {"seconds": f.step_seconds, "bytes": f.wire_bytes, "memory": f.memory_bytes}
    more = {"fits": f.memory_bytes <= limit, "now": plan.step_seconds}
    return said | {"holds": holds, "instead": _instead(found.sent_at, row, plan)} | figures | more


def data_text(data: Mapping[str, Any]) -> str:
    """Data as JSON that may stand in a page: no text in it can end the script that holds it."""
    text = json.dumps(_short(data), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _short(x: Any) -> Any:
    """Numbers with as many digits as can be read."""
    if isinstance(x, float):
        return float(f"{x:.6g}")
    if isinstance(x, Mapping):
        return {k: _short(v) for k, v in x.items()}
    return [_short(v) for v in x] if isinstance(x, list | tuple) else x


def place_data(plan: PlanData, whole: PlanData | None = None) -> dict[str, Any]:
    """A placement with its devices.

    Arguments:
      whole: the plan of the program that this one is of a placement of.

    `hosts` is how many devices a host has, None where there is one host; `levels` says of every axis what
    its devices talk through; `rest` is what lies there at rest, what lies alike as one.
    """
    placement, (inner, *outer) = plan.placement, plan.hardware.links
    return {
        "name": str(placement),
        "axes": list(placement.axes),
        "mesh": list(placement.shape),
        "ranks": list(placement.ranks),
        "hosts": inner.devices if outer and inner.devices < placement.size else None,
        "levels": [_level(plan, a) for a in range(placement.ndim)],
        "memory_bytes": plan.memory_bytes,
        "rest": _at_rest(plan, plan if whole is None else whole),
    }


def _level(plan: PlanData, axis: int) -> str:
    """What the devices of an axis talk through."""
    groups = plan.placement.groups([axis]).tolist()
    if len(groups[0]) == 1:
        return "which exchange nothing"
    found = [plan.hardware.link(group) for group in groups]
    link = min(found, key=lambda x: x.bytes_per_second)
    where = "in a host" if link == plan.hardware.links[0] else "between hosts"
    rate = f", {bytes_text(link.bytes_per_second)}/s" if math.isfinite(link.bytes_per_second) else ""
    return f"{where}{rate} each way"


def _at_rest(plan: PlanData, whole: PlanData) -> Mapping[str, list[Any]]:
    """Arguments, and results that do not lie as these; not what other placements send or get."""
    ins, outs = rest_lines(plan, whole)
    lines = [*ins, *(line for line in outs if not line[1].startswith("as "))]
    return {name: [line[k] for line in lines] for k, name in enumerate(("path", "sbp", "leaves"))}
