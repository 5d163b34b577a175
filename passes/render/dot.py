"""The folded graph of a plan in Graphviz's language."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sbp.passes.explain.plan import PlanData
from sbp.passes.render.colours import mark_of
from sbp.passes.render.folded_graph import fold
from sbp.passes.render.stage_tables import merged_sends, place_heading
from sbp.passes.render.svg import lanes_of
from sbp.passes.render.text import heading
from sbp.text.units import bytes_text

if TYPE_CHECKING:
    import networkx as nx


def dot_text(plan: PlanData) -> str:
    """The drawing of a plan; of several placements with a cluster for each.

    Raises:
      ValueError: for a plan without a program.
    """
    if plan.stages:
        title, body, more = heading(plan), _clusters(plan), ", compound=true"
    else:
        title = f"{plan.name} on {plan.placement}: {bytes_text(plan.wire_bytes)} sent per device per step"
        body, more = dot_lines(fold(plan)), ""
    lines = [
        f"digraph {quote(plan.name)} {{",
        f'  graph [rankdir=TB, fontname="Helvetica", labelloc=t, label={quote(title)}{more}];',
        '  node [shape=box, style="filled,rounded", fontname="Helvetica", fontsize=10];',
        '  edge [color="#8c959f", fontname="Helvetica", fontsize=8];',
    ]
    return "\n".join([*lines, *body, "}", ""])


def _clusters(plan: PlanData) -> list[str]:
    """A cluster per placement, and what is sent between them."""
    lines, ends = list[str](), list[tuple[str, str]]()
    for i, p in enumerate(plan.stages):
        out, prefix = fold(p), f"p{i}"
        ends.append((f"{prefix}n{min(out, default=0)}", f"{prefix}n{max(out, default=0)}"))
        lines += [f"subgraph cluster_{prefix} {{", f"  label={quote(place_heading(plan, i))};"]
        lines += [f"  {line}" for line in dot_lines(out, prefix)] + ["}"]
    pairs: dict[tuple[str, ...], list[str]] = {}
    for c in merged_sends(plan):
        pairs.setdefault(c.axes, []).append(f"{c.count} x {c.tensor}, {bytes_text(c.wire_bytes)}")
    for (a, b), texts in pairs.items():
        node = f"send{a}to{b}"
        body = texts[:5] + ([f"and {len(texts) - 5} more"] if len(texts) > 5 else [])
        lines += [
            f"  {node} [{dot_node({'kind': 'send', 'head': 'send', 'body': body})}];",
            f"  {ends[int(a)][1]} -> {node} [ltail=cluster_p{a}];",
            f"  {node} -> {ends[int(b)][0]} [lhead=cluster_p{b}];",
        ]
    return lines


def dot_lines(out: nx.DiGraph, prefix: str = "") -> list[str]:
    """The nodes and edges of a drawing; `prefix` tells those of several apart."""
    lines = []
    for lane in lanes_of(out):
        members = [(n, d) for n, d in out.nodes(data=True) if d["lane"] == lane]
        lines += [
            f"  subgraph {quote('cluster_' + prefix + lane)} {{",
            f'    label={quote(lane)}; color="#d0d7de"; fontname="Helvetica";',
            *(f"    {prefix}n{n} [{dot_node(d)}];" for n, d in members),
            "  }",
        ]
    for a, b, d in out.edges(data=True):
        style = ", style=dashed, constraint=false" if d["back"] else ""
        lines.append(f"  {prefix}n{a} -> {prefix}n{b} [label={quote(d['label'])}{style}];")
    return lines


def dot_node(d: dict[str, Any]) -> str:
    """The attributes of a node."""
    fill, border, _ = mark_of(d["kind"])
    text = [" ".join(t for t in (d["head"], d.get("note", "")) if t), *d["body"]]
    label = quote("\n".join(t for t in text if t))
    return f'label={label}, fillcolor="{fill}", color="{border}"'


def quote(text: str) -> str:
    """A text as Graphviz reads it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
