"""The folded graph as SVG: a lane per phase, forward down and backward up, collectives where they happen."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import TYPE_CHECKING, Any

from sbp.passes.explain.plan import PlanData
from sbp.passes.program.names import PHASES
from sbp.passes.render.colours import mark_of
from sbp.passes.render.folded_graph import fold, outline_of
from sbp.passes.render.outline import Outline
from sbp.passes.render.svg_claim import claim, streams
from sbp.passes.render.svg_parts import (
    GROUND,
    INK,
    INK_ON_COLOUR,
    LINE,
    MARGIN,
    SOFT,
    SOFT_ON_COLOUR,
    TIP,
    Spot,
    document,
    fit_text,
    rect,
    text_at,
)
from sbp.passes.render.text import heading
from sbp.passes.render.timeline import as_estimate, timeline_svg

if TYPE_CHECKING:
    import networkx as nx

_SIZE = re.compile(r'<svg [^>]*?width="(\d+)" height="(\d+)"')

TOP, GAP, ROW_GAP, PAD = 34.0, 22.0, 30.0, 16.0
WIDTH, LINE_HEIGHT = 212.0, 13.0
TALLER = 64.0
"""Of the costliest collective; nothing shorter than its words."""
MAX_ROW = 4
"""Nodes beside each other; more stand below."""
ASPECT = 1.6
"""Width to height of a picture that fits a screen and a sheet of paper."""
LEAST_WIDTH = 860.0
"""What pages of text show without making letters smaller."""


@dataclass(frozen=True)
class Arrangement:
    """A finished layout; `lanes` are the phases and their grounds."""

    width: float
    height: float
    lanes: tuple[tuple[str, Spot], ...]
    spots: Mapping[int, Spot]


def place(graph: nx.DiGraph) -> Arrangement:
    """Where everything goes: lanes side by side, as wide as makes a picture nearest to `ASPECT`."""

    def off(found: Arrangement) -> float:
        return abs(math.log((found.width + 1) / (found.height + 1) / ASPECT))

    return min((_placed(graph, n) for n in range(1, MAX_ROW + 1)), key=off)


def _placed(graph: nx.DiGraph, most: int) -> Arrangement:
    """Lanes side by side, in each a row per rank of the graph, of `most` nodes at the most."""
    spots: dict[int, Spot] = {}
    lanes: list[tuple[str, Spot]] = []
    x = 0.0
    for lane in lanes_of(graph):
        rows = _rows(graph, [n for n, of in graph.nodes(data="lane") if of == lane], most)
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


def _rows(graph: nx.DiGraph, members: list[int], most: int) -> list[list[int]]:
    """The nodes of a lane by how many stand before them, neighbours of the row above near each other."""
    own = graph.subgraph(members)
    import networkx as nx  # takes long to load

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
        ordered += [row[k : k + most] for k in range(0, len(row), most)]
    return ordered


def _height(d: Mapping[str, Any]) -> float:
    return 26.0 + LINE_HEIGHT * len(d["body"]) + float(d.get("taller", 0.0))


def scale_collectives(graph: nx.DiGraph) -> nx.DiGraph:
    """The graph with collectives as much taller as they take longer, the costliest by `TALLER`."""
    most = max((s for _, s in graph.nodes(data="seconds", default=0.0)), default=0.0)
    for _, d in graph.nodes(data=True):
        if most and "seconds" in d:
            d["taller"] = TALLER * d["seconds"] / most
    return graph


def plan_svg(plan: PlanData) -> str:
    """The picture of a plan: its figures, where the time goes, and the folded graph.

    Of several placements it has the schedule, and a picture of each.

    Raises:
      ValueError: for a plan without a program.
    """
    return _each_placement(plan, _placement_svg)


def _each_placement(plan: PlanData, draw: Callable[[PlanData], str]) -> str:
    if not plan.stages:
        return draw(plan)
    title = f"{plan.name}: the schedule"
    pictures = [] if plan.timeline is None else [timeline_svg([as_estimate(plan.timeline)], title)]
    pictures += [draw(p) for p in plan.stages if p.has_program]
    sizes = [(int(found[1]), int(found[2])) for svg in pictures if (found := _SIZE.search(svg)) is not None]
    tops = itertools.accumulate((h for _, h in sizes), initial=0)
    lines = [p.replace("<svg ", f'<svg x="0" y="{y}" ', 1) for p, y in zip(pictures, tops, strict=False)]
    width, height = max((w for w, _ in sizes), default=0), sum(h for _, h in sizes)
    return document(width, height, heading(plan), lines)


def _placement_svg(plan: PlanData) -> str:
    outline = outline_of(plan)
    graph = scale_collectives(fold(plan, outline=outline))
    layout = place(graph)
    # Rows that have a node each need no list.
    listed = any((d["kind"] == "ops" and d["rows"]) or len(d["rows"]) > 1 for _, d in graph.nodes(data=True))
    head, y, wide = _head(plan, outline, layout.width, listed)
    return document(
        wide + 2 * MARGIN,
        y + layout.height + 1.5 * MARGIN,
        f"{plan.name} on {plan.placement}",
        [
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'markerUnits="userSpaceOnUse" orient="auto">'
            f'<path d="M0,0.6 L8,4 L0,7.4 z" fill="{TIP}"/></marker></defs>',
            *head,
            f'<g transform="translate({MARGIN + (wide - layout.width) / 2:g},{y + MARGIN / 2:g})">',
            *_lanes(layout),
            *_edges(graph, layout),
            *_nodes(graph, layout),
            "</g>",
        ],
    )


def claim_svg(plan: PlanData) -> str:
    """The head of a plan's picture by itself: what fits a page of text, of a program of any size.

    Raises:
      ValueError: for a plan without a program.
    """
    return _each_placement(plan, _claim_svg)


def _claim_svg(plan: PlanData) -> str:
    head, y, wide = _head(plan, outline_of(plan), LEAST_WIDTH, listed=True)
    return document(wide + 2 * MARGIN, y + MARGIN / 2, f"{plan.name} on {plan.placement}", head)


def _head(plan: PlanData, outline: Outline, width: float, listed: bool) -> tuple[list[str], float, float]:
    """What stands above a graph of some width; where it ends, and how wide it is."""
    wide = max(width, LEAST_WIDTH)
    head, y = claim(plan, outline, Spot(MARGIN, MARGIN, wide, 0), listed)
    lanes, y = streams(plan, outline, Spot(MARGIN, y, wide, 0))
    return head + lanes, y, wide


def _lanes(layout: Arrangement) -> Iterator[str]:
    """A pale ground and a name for each phase."""
    for name, s in layout.lanes:
        yield rect(s, 10, GROUND)
        middle = s.x + s.width / 2
        yield text_at(middle, s.y + 21, name, 12, text_anchor="middle", fill=SOFT, font_weight="600")


def _nodes(graph: nx.DiGraph, layout: Arrangement) -> Iterator[str]:
    for n, d in graph.nodes(data=True):
        s, is_sent = layout.spots[n], d["kind"] != "ops"
        fill, border, _ = mark_of(d["kind"])
        ink, soft = (INK_ON_COLOUR, SOFT_ON_COLOUR) if is_sent else (INK, SOFT)
        bold = {"font_weight": "600", "fill": ink}
        yield f"<g><title>{escape(d['title'])}</title>"
        yield rect(s, 11 if is_sent else 5, fill, border, 1.6 if is_sent else 1.0)
        y = s.y + 18
        room = s.width - 20 - 7.0 * len(d.get("note", ""))
        yield text_at(s.x + 10, y, fit_text(d["head"], room, 6.6), 12, **bold)
        if d.get("note"):
            yield text_at(s.x + s.width - 10, y, d["note"], 12, text_anchor="end", **bold)
        for line in d["body"]:
            y += LINE_HEIGHT
            yield text_at(s.x + 10, y, fit_text(line, s.width - 16, 5.7), 11, fill=soft)
        yield "</g>"


def _edges(graph: nx.DiGraph, layout: Arrangement) -> Iterator[str]:
    """Curves from a node to the next; faint between phases, dashed to the next of equal layers."""
    for a, b, d in graph.edges(data=True):
        kinds = [graph.nodes[n]["kind"] for n in (a, b)]
        colour = next((mark_of(k).border for k in kinds if k != "ops"), LINE)
        across = graph.nodes[a]["lane"] != graph.nodes[b]["lane"]
        style = ' opacity="0.4"' if across else ' stroke-dasharray="4 3"' if d["back"] else ""
        ends = layout.spots[a], layout.spots[b]
        path = _across(*ends) if across else _around(*ends) if _hidden(*ends, layout) else _curve(*ends)
        yield (
            f'<path d="{path}" fill="none" stroke="{colour}" '
            f'stroke-width="1.3"{style} marker-end="url(#tip)"><title>{escape(d["title"])}</title></path>'
        )


def _hidden(a: Spot, b: Spot, layout: Arrangement) -> bool:
    """Whether a node stands between two of a lane that are one below the other."""
    if a.x != b.x:
        return False
    low, high = sorted((a.y, b.y))
    return any(s.x == a.x and low < s.y < high for s in layout.spots.values())


def _across(a: Spot, b: Spot) -> str:
    """From side to side."""
    right = b.x > a.x
    x0, x1 = (a.x + a.width, b.x) if right else (a.x, b.x + b.width)
    y0, y1, bend = a.y + a.height / 2, b.y + b.height / 2, 30 if right else -30
    return f"M{x0:.1f},{y0:.1f} C{x0 + bend:.1f},{y0:.1f} {x1 - bend:.1f},{y1:.1f} {x1:.1f},{y1:.1f}"


def _around(a: Spot, b: Spot) -> str:
    """Past what stands between, down on the right and up on the left."""
    down = b.y > a.y
    x, bend = (a.x + a.width, PAD) if down else (a.x, -PAD)
    y0, y1 = a.y + a.height / 2, b.y + b.height / 2
    return f"M{x:.1f},{y0:.1f} C{x + bend:.1f},{y0:.1f} {x + bend:.1f},{y1:.1f} {x:.1f},{y1:.1f}"


def _curve(a: Spot, b: Spot) -> str:
    """From the foot of one to the head of the next, or the other way."""
    down = b.y > a.y
    x0, x1 = a.x + a.width / 2, b.x + b.width / 2
    y0, y1, bend = (a.y + a.height, b.y, 16) if down else (a.y, b.y + b.height, -16)
    return f"M{x0:.1f},{y0:.1f} C{x0:.1f},{y0 + bend:.1f} {x1:.1f},{y1 - bend:.1f} {x1:.1f},{y1:.1f}"
