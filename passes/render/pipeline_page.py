"""The plan of a pipeline as a page, a picture and a graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape

from sbp.passes.explain.plan import PlanData
from sbp.passes.explain.words import misfit_text
from sbp.passes.pipeline.plan import PipelineData
from sbp.passes.render import page
from sbp.passes.render.dot import digraph, dot_lines, dot_node, quoted
from sbp.passes.render.folded_graph import folded
from sbp.passes.render.pipeline_text import (
    NUMBERS,
    figures,
    heading,
    merged_sends,
    own_signatures,
    place_heading,
    send_rows,
    stage_rows,
)
from sbp.passes.render.svg import plan_svg as one_svg
from sbp.passes.render.svg_parts import document
from sbp.passes.render.timeline import timeline_svg
from sbp.passes.schedule.spans import Timeline
from sbp.text.units import bytes_text

_SIZE = re.compile(r'<svg [^>]*?width="(\d+)" height="(\d+)"')


def plan_html(plan: PipelineData) -> str:
    """What notebooks show: figures, the timeline, stages and sends; the placements to be unfolded."""
    places = [
        f"<details><summary>{escape(place_heading(plan, i))}</summary>{''.join(_place(plan, i))}</details>"
        for i in range(len(plan.stages))
    ]
    return page.short([*_top(plan), *places, page.notes(plan)])


def _top(plan: PipelineData) -> list[str]:
    """What is not about one placement."""
    name, _, rest = heading(plan).partition(" ")
    parts = [page.heading(name.rstrip(":"), rest, figures(plan), misfit_text(plan))]
    if plan.timeline is not None:
        svg = timeline_svg([estimated(plan)], f"{plan.name}: the schedule")
        parts += ["<h2>Timeline</h2>", page.picture(svg)]
    for title, lines in (("Stages", stage_rows(plan)), ("Sent between placements", send_rows(plan))):
        if len(lines) > 1:
            parts += [f"<h2>{title}</h2>", page.figures_table(lines, NUMBERS)]
    return parts


def estimated(plan: PipelineData) -> Timeline:
    """The simulated timeline, with a name that says so."""
    assert plan.timeline is not None
    return Timeline(f"{plan.timeline.name}, estimated", plan.timeline.spans)


def _place(plan: PipelineData, place: int) -> list[str]:
    """One placement: its collectives, its picture, its arguments and results."""
    p = plan.stages[place]
    drawn = [page.picture(one_svg(p))] if p.program or p.physical is not None else []
    return [*page.table(p), *drawn, *page.signatures(own_signatures(p), plan)]


def plan_svg(plan: PipelineData, draw: Callable[[PlanData], str] = one_svg) -> str:
    """The timeline, with the pictures of the placements below.

    Arguments:
      draw: makes the picture of a placement.
    """
    parts = (
        [timeline_svg([estimated(plan)], f"{plan.name}: the schedule")] if plan.timeline is not None else []
    )
    parts += [draw(p) for p in plan.stages if p.program or p.physical is not None]
    return stacked(parts, heading(plan))


def stacked(pictures: Sequence[str], title: str) -> str:
    """Pictures one below the other as one."""
    sizes = [(int(found[1]), int(found[2])) for svg in pictures if (found := _SIZE.search(svg)) is not None]
    width, height = max((w for w, _ in sizes), default=0), sum(h for _, h in sizes)
    lines, y = list[str](), 0
    for svg, (_, h) in zip(pictures, sizes, strict=True):
        lines.append(svg.replace("<svg ", f'<svg x="0" y="{y}" ', 1))
        y += h
    return document(width, height, title, lines)


def dot_text(plan: PipelineData) -> str:
    """A cluster per placement in Graphviz's language, and what is sent between them.

    Raises:
      ValueError: for a plan that was loaded from a file.
    """
    lines, ends = list[str](), list[tuple[str, str]]()
    for i, p in enumerate(plan.stages):
        out, prefix = folded(p), f"p{i}"
        first, last = min(out, default=0), max(out, default=0)
        ends.append((f"{prefix}n{first}", f"{prefix}n{last}"))
        lines += [f"subgraph cluster_{prefix} {{", f"  label={quoted(place_heading(plan, i))};"]
        lines += [f"  {line}" for line in dot_lines(out, prefix)] + ["}"]
    pairs: dict[tuple[str, ...], list[str]] = {}
    for c in merged_sends(plan):
        pairs.setdefault(c.axes, []).append(f"{c.count} x {c.tensor}, {bytes_text(c.wire_bytes)}")
    for (a, b), texts in pairs.items():
        node = f"send{a}to{b}"
        body = texts[:5] + ([f"and {len(texts) - 5} more"] if len(texts) > 5 else [])
        lines.append(f"  {node} [{dot_node({'kind': 'send', 'head': 'send', 'body': body})}];")
        lines.append(f"  {ends[int(a)][1]} -> {node} [ltail=cluster_p{a}];")
        lines.append(f"  {node} -> {ends[int(b)][0]} [lhead=cluster_p{b}];")
    return digraph(plan.name, heading(plan), lines, ", compound=true")
