"""The drawing as SVG: a lane per phase, forward down and backward up, collectives where they happen."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import networkx as nx

from sbp.passes.explain.plan import PlanData
from sbp.passes.explain.words import kind_text, verdict_text
from sbp.passes.look.drawing import COLOURS, drawing, kinds_of
from sbp.passes.look.layered import Arrangement, Spot, place
from sbp.units import bytes_text, seconds_text

MARGIN = 24.0
HEADER = 92.0
SANS = "Inter,'Helvetica Neue',Helvetica,Arial,'DejaVu Sans',sans-serif"
INK, SOFT, LINE, GROUND = "#1f2933", "#57606a", "#b6bfc9", "#f3f6f9"
ALARM = "#b42318"


def plan_svg(plan: PlanData) -> str:
    """The picture of a plan, with its heading and legend.

    Raises:
      ValueError: for a plan that was loaded from a file.
    """
    graph = drawing(plan)
    layout = place(graph)
    width, height = max(layout.width, 720.0) + 2 * MARGIN, layout.height + HEADER + 2 * MARGIN
    body = [*_lanes(layout), *_edges(graph, layout), *_nodes(graph, layout)]
    shift = f"translate({MARGIN:g},{HEADER + MARGIN:g})"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" font-family="{SANS}" role="img">',
            f"<title>{escape(plan.name)} on {escape(str(plan.placement))}</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'markerUnits="userSpaceOnUse" orient="auto">'
            '<path d="M0,0.6 L8,4 L0,7.4 z" fill="#8c959f"/></marker></defs>',
            *_heading(plan, graph),
            f'<g transform="{shift}">',
            *body,
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


def _heading(plan: PlanData, graph: nx.DiGraph) -> list[str]:
    """What it is, its figures, and what the colours mean."""
    figures = (
        f"{bytes_text(plan.wire_bytes)} sent per device per step · "
        f"{seconds_text(plan.step_seconds)} estimated · "
        f"{bytes_text(plan.memory_bytes)} peak per device · {verdict_text(plan)}"
    )
    out = [
        _text(MARGIN, 38, plan.name, 19, font_weight="700", fill=INK),
        _text(MARGIN + 11.5 * len(plan.name) + 12, 38, f"on {plan.placement}", 14, fill=SOFT),
        _text(MARGIN, 60, figures, 12, fill=SOFT if plan.fits else ALARM),
    ]
    x = MARGIN
    for kind, (count, wire) in kinds_of(graph).items():
        fill, border = COLOURS[kind]
        label = f"{count} {kind_text(kind)}, {bytes_text(wire)}"
        out.append(_rect(Spot(x, 76, 16, 12), 4, fill, border, 1.4))
        out.append(_text(x + 22, 86.5, label, 11.5, fill=INK))
        x += 22 + 6.3 * len(label) + 22
    return out


def _lanes(layout: Arrangement) -> list[str]:
    """A pale ground and a name for each phase."""
    out = []
    for name, s in layout.lanes:
        out.append(_rect(s, 10, GROUND))
        out.append(
            _text(s.x + s.width / 2, s.y + 21, name, 12, text_anchor="middle", fill=SOFT, font_weight="600")
        )
    return out


def _nodes(graph: nx.DiGraph, layout: Arrangement) -> list[str]:
    out = []
    for n, d in graph.nodes(data=True):
        s = layout.spots[n]
        fill, border = COLOURS[d["kind"]]
        heavy = d["kind"] not in ("ops", "argument", "result")
        title = d.get("title") or (f"{d['count']} ops" if "count" in d else "")
        out.append("<g>" + (f"<title>{escape(title)}</title>" if title else ""))
        out.append(_rect(s, 11 if heavy else 5, fill, border, 1.6 if heavy else 1.0))
        out += _label(d, s)
        out.append("</g>")
    return out


def _label(d: dict[str, Any], s: Spot) -> list[str]:
    """The lines of a node: its head, a note at the right end, then the body."""
    out, y = [], s.y + 6
    if d["head"]:
        y += 12
        out.append(_text(s.x + 10, y, fitted(d["head"], s.width - 16, 6.6), 12, font_weight="600", fill=INK))
        if d.get("note"):
            out.append(
                _text(s.x + s.width - 10, y, d["note"], 12, text_anchor="end", font_weight="600", fill=INK)
            )
        y += 2
    for line in d["body"]:
        y += 12
        out.append(_text(s.x + 10, y, fitted(line, s.width - 16, 5.45), 10, fill=SOFT))
    return out


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


def _edges(graph: nx.DiGraph, layout: Arrangement) -> list[str]:
    """Lines first, then their words, so that no line runs through a word."""
    lines, words = [], []
    for a, b, d in graph.edges(data=True):
        curve = layout.curves[a, b]
        wire = max(graph.nodes[n].get("wire_bytes", 0.0) for n in (a, b))
        colour = next(
            (COLOURS[graph.nodes[n]["kind"]][1] for n in (a, b) if "wire_bytes" in graph.nodes[n]), LINE
        )
        width = 1.1 if not wire else 1.6
        title = f"<title>{escape(d['title'])}</title>" if d["title"] else ""
        faint = ' opacity="0.55"' if curve.faint else ""
        lines.append(
            f'<path d="{_path(curve.points)}" fill="none" stroke="{colour}" stroke-width="{width}"{faint} '
            f'marker-end="url(#tip)">{title}</path>'
        )
        if curve.word is not None and d["label"]:
            words += _word(*curve.word, d["label"])
    return [*lines, *words]


def _word(x: float, y: float, text: str) -> list[str]:
    """The words of an edge, on a ground that hides the line below."""
    width = 4.9 * len(text)
    ground = _rect(Spot(x - width / 2, y - 9, width, 12), 0, GROUND)
    return [ground, _text(x, y, text, 9, text_anchor="middle", fill=SOFT)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    (x0, y0), *rest = points
    return f"M{x0:.1f},{y0:.1f} C" + " ".join(f"{x:.1f},{y:.1f}" for x, y in rest)
