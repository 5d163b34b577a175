"""The folded graph as SVG: a lane per phase, forward down and backward up, collectives where they happen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import Any

import networkx as nx

from sbp.passes.explain.plan import PlanData
from sbp.passes.explain.words import kind_text, verdict_text
from sbp.passes.look.colours import mark_of
from sbp.passes.look.folded import folded, kinds_of
from sbp.passes.program.names import PHASES
from sbp.units import bytes_text, seconds_text

MARGIN, HEADER = 24.0, 92.0
TOP, GAP, ROW_GAP, PAD = 34.0, 22.0, 30.0, 16.0
WIDTH, LINE_HEIGHT = 212.0, 13.0
MAX_ROW = 4
"""Nodes beside each other; more stand below."""
SANS = "Inter,'Helvetica Neue',Helvetica,Arial,'DejaVu Sans',sans-serif"
INK, SOFT, LINE, GROUND = "#1f2933", "#57606a", "#b6bfc9", "#f3f6f9"
ALARM = "#b42318"


@dataclass(frozen=True, slots=True)
class Spot:
    """The rectangle of a node."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Arrangement:
    """A finished layout; `lanes` are the phases and their grounds."""

    width: float
    height: float
    lanes: tuple[tuple[str, Spot], ...]
    spots: Mapping[int, Spot]


def place(graph: nx.DiGraph) -> Arrangement:
    """Where everything goes: lanes side by side, in each a row per rank of the graph."""
    spots: dict[int, Spot] = {}
    lanes: list[tuple[str, Spot]] = []
    x = 0.0
    for lane in lanes_of(graph):
        members = [n for n, of in graph.nodes(data="lane") if of == lane]
        rows = _rows(graph, members)
        width = max(len(row) for row in rows) * (WIDTH + GAP) - GAP
        y = TOP
        for row in reversed(rows) if lane == "backward" else rows:
            left = x + PAD + (width - len(row) * (WIDTH + GAP) + GAP) / 2
            height = max(_height(graph.nodes[n]) for n in row)
            for k, n in enumerate(row):
                own = _height(graph.nodes[n])
                spots[n] = Spot(left + k * (WIDTH + GAP), y + (height - own) / 2, WIDTH, own)
            y += height + ROW_GAP
        lanes.append((lane, Spot(x, 0, width + 2 * PAD, y - ROW_GAP + PAD)))
        x += width + 2 * PAD + 2 * GAP
    return Arrangement(
        max(0.0, x - 2 * GAP), max((s.height for _, s in lanes), default=0.0), tuple(lanes), spots
    )


def lanes_of(graph: nx.DiGraph) -> list[str]:
    """The lanes that the drawing has, in order."""
    present = {lane for _, lane in graph.nodes(data="lane")}
    return [p for p in ("program", *PHASES) if p in present]


def _rows(graph: nx.DiGraph, members: list[int]) -> list[list[int]]:
    """The nodes of a lane by how many stand before them, neighbours of the row above near each other."""
    own = graph.subgraph(members)
    forward = nx.DiGraph()
    forward.add_nodes_from(members)
    forward.add_edges_from((a, b) for a, b, back in own.edges(data="back") if not back)
    rank: dict[int, int] = {}
    for n in nx.topological_sort(forward):
        rank[n] = 1 + max((rank[m] for m in forward.predecessors(n)), default=-1)
    # What nothing leads to stands right above what it leads to.
    for n in reversed(members):
        if not forward.in_degree(n) and forward.out_degree(n):
            rank[n] = min(rank[m] for m in forward.successors(n)) - 1
    rows: dict[int, list[int]] = {}
    for n in members:
        rows.setdefault(rank[n], []).append(n)
    at: dict[int, float] = {}
    ordered = []
    for _, row in sorted(rows.items()):
        mean = {n: fmean([at[m] for m in forward.predecessors(n) if m in at] or [0.5]) for n in row}
        row.sort(key=mean.__getitem__)
        at.update({n: (k + 0.5) / len(row) for k, n in enumerate(row)})
        ordered += [row[k : k + MAX_ROW] for k in range(0, len(row), MAX_ROW)]
    return ordered


def _height(d: Mapping[str, Any]) -> float:
    return 26.0 + LINE_HEIGHT * len(d["body"])


def plan_svg(plan: PlanData) -> str:
    """The picture of a plan, with its heading and legend.

    Raises:
      ValueError: for a plan without a program.
    """
    graph = folded(plan)
    layout = place(graph)
    width, height = max(layout.width, 720.0) + 2 * MARGIN, layout.height + HEADER + 2 * MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" font-family="{SANS}" role="img">',
            f"<title>{escape(plan.name)} on {escape(str(plan.placement))}</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'markerUnits="userSpaceOnUse" orient="auto">'
            '<path d="M0,0.6 L8,4 L0,7.4 z" fill="#8c959f"/></marker></defs>',
            *_heading(plan),
            f'<g transform="translate({MARGIN:g},{HEADER + MARGIN:g})">',
            *_lanes(layout),
            *_edges(graph, layout),
            *_nodes(graph, layout),
            "</g>",
            "</svg>",
            "",
        ]
    )


def _text(x: float, y: float, text: str, size: float, **attributes: str) -> str:
    more = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}"{more}>{escape(text)}</text>'


def _rect(s: Spot, radius: float, fill: str, stroke: str = "none", line: float = 1.0) -> str:
    return (
        f'<rect x="{s.x:.1f}" y="{s.y:.1f}" width="{s.width:.1f}" height="{s.height:.1f}" rx="{radius:g}" '
        f'fill="{fill}" stroke="{stroke}" stroke-width="{line:g}"/>'
    )


def _heading(plan: PlanData) -> Iterator[str]:
    """What it is, its figures, and what the colours mean."""
    figures = (
        f"{bytes_text(plan.wire_bytes)} sent per device per step · "
        f"{seconds_text(plan.step_seconds)} estimated · "
        f"{bytes_text(plan.memory_bytes)} peak per device · {verdict_text(plan)}"
    )
    yield _text(MARGIN, 38, plan.name, 19, font_weight="700", fill=INK)
    yield _text(MARGIN + 11.5 * len(plan.name) + 12, 38, f"on {plan.placement}", 14, fill=SOFT)
    yield _text(MARGIN, 60, figures, 12, fill=SOFT if plan.fits else ALARM)
    x = MARGIN
    for kind, count, wire in kinds_of(plan):
        fill, border, _ = mark_of(kind)
        label = f"{count} {kind_text(kind)}, {bytes_text(wire)}"
        yield _rect(Spot(x, 76, 16, 12), 4, fill, border, 1.4)
        yield _text(x + 22, 86.5, label, 11.5, fill=INK)
        x += 22 + 6.3 * len(label) + 22


def _lanes(layout: Arrangement) -> Iterator[str]:
    """A pale ground and a name for each phase."""
    for name, s in layout.lanes:
        yield _rect(s, 10, GROUND)
        middle = s.x + s.width / 2
        yield _text(middle, s.y + 21, name, 12, text_anchor="middle", fill=SOFT, font_weight="600")


def _nodes(graph: nx.DiGraph, layout: Arrangement) -> Iterator[str]:
    for n, d in graph.nodes(data=True):
        s, is_sent = layout.spots[n], d["kind"] != "ops"
        fill, border, _ = mark_of(d["kind"])
        yield f"<g><title>{escape(d['title'])}</title>"
        yield _rect(s, 11 if is_sent else 5, fill, border, 1.6 if is_sent else 1.0)
        y = s.y + 18
        room = s.width - 20 - 7.0 * len(d.get("note", ""))
        yield _text(s.x + 10, y, fitted(d["head"], room, 6.6), 12, font_weight="600", fill=INK)
        if d.get("note"):
            yield _text(s.x + s.width - 10, y, d["note"], 12, text_anchor="end", font_weight="600", fill=INK)
        for line in d["body"]:
            y += LINE_HEIGHT
            yield _text(s.x + 10, y, fitted(line, s.width - 16, 5.7), 11, fill=SOFT)
        yield "</g>"


def fitted(text: str, width: float, advance: float) -> str:
    """A text cut in the middle to what fits: both ends of a path tell something.

    >>> fitted("params['layers'][*]['qkv']", 60, 6)
    "par…'qkv']"
    """
    room = int(width / advance)
    if len(text) <= room:
        return text
    left = max(1, (room - 1) * 2 // 5)
    return f"{text[:left]}…{text[len(text) - (room - 1 - left) :]}"


def _edges(graph: nx.DiGraph, layout: Arrangement) -> Iterator[str]:
    """Curves from a node to the next; faint between phases, dashed to the next of equal layers."""
    for a, b, d in graph.edges(data=True):
        kinds = [graph.nodes[n]["kind"] for n in (a, b)]
        colour = next((mark_of(k).border for k in kinds if k != "ops"), LINE)
        across = graph.nodes[a]["lane"] != graph.nodes[b]["lane"]
        style = ' opacity="0.4"' if across else ' stroke-dasharray="4 3"' if d["back"] else ""
        yield (
            f'<path d="{_curve(layout.spots[a], layout.spots[b], across)}" fill="none" stroke="{colour}" '
            f'stroke-width="1.3"{style} marker-end="url(#tip)"><title>{escape(d["title"])}</title></path>'
        )


def _curve(a: Spot, b: Spot, across: bool) -> str:
    if across:
        right = b.x > a.x
        x0, x1 = (a.x + a.width, b.x) if right else (a.x, b.x + b.width)
        y0, y1, bend = a.y + a.height / 2, b.y + b.height / 2, 30 if right else -30
        return f"M{x0:.1f},{y0:.1f} C{x0 + bend:.1f},{y0:.1f} {x1 - bend:.1f},{y1:.1f} {x1:.1f},{y1:.1f}"
    down = b.y > a.y
    x0, x1 = a.x + a.width / 2, b.x + b.width / 2
    y0, y1, bend = (a.y + a.height, b.y, 16) if down else (a.y, b.y + b.height, -16)
    return f"M{x0:.1f},{y0:.1f} C{x0:.1f},{y0 + bend:.1f} {x1:.1f},{y1 - bend:.1f} {x1:.1f},{y1:.1f}"
