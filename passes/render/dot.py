"""The folded graph in Graphviz's language."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sbp.passes.explain.plan import PlanData
from sbp.passes.render.colours import mark_of
from sbp.passes.render.folded_graph import folded
from sbp.passes.render.svg import lanes_of
from sbp.text.units import bytes_text

if TYPE_CHECKING:
    import networkx as nx


def dot_text(plan: PlanData) -> str:
    """The drawing of a plan.

    Raises:
      ValueError: for a plan without a program.
    """
    title = f"{plan.name} on {plan.placement}: {bytes_text(plan.wire_bytes)} sent per device per step"
    return digraph(plan.name, title, dot_lines(folded(plan)))


def digraph(name: str, title: str, body: Iterable[str], more: str = "") -> str:
    """A whole file in Graphviz's language.

    Arguments:
      more: further attributes of the graph.
    """
    lines = [
        f"digraph {quoted(name)} {{",
        f'  graph [rankdir=TB, fontname="Helvetica", labelloc=t, label={quoted(title)}{more}];',
        '  node [shape=box, style="filled,rounded", fontname="Helvetica", fontsize=10];',
        '  edge [color="#8c959f", fontname="Helvetica", fontsize=8];',
    ]
    return "\n".join([*lines, *body, "}", ""])


def dot_lines(out: nx.DiGraph, prefix: str = "") -> list[str]:
    """The nodes and edges of a drawing; `prefix` tells those of several apart."""
    lines = []
    for lane in lanes_of(out):
        members = [(n, d) for n, d in out.nodes(data=True) if d["lane"] == lane]
        lines.append(f"  subgraph {quoted('cluster_' + prefix + lane)} {{")
        lines.append(f'    label={quoted(lane)}; color="#d0d7de"; fontname="Helvetica";')
        lines += [f"    {prefix}n{n} [{dot_node(d)}];" for n, d in members]
        lines.append("  }")
    for a, b, d in out.edges(data=True):
        style = ", style=dashed, constraint=false" if d["back"] else ""
        lines.append(f"  {prefix}n{a} -> {prefix}n{b} [label={quoted(d['label'])}{style}];")
    return lines


def dot_node(d: dict[str, Any]) -> str:
    """The attributes of a node."""
    fill, border, _ = mark_of(d["kind"])
    text = [" ".join(t for t in (d["head"], d.get("note", "")) if t), *d["body"]]
    label = quoted("\n".join(t for t in text if t))
    return f'label={label}, fillcolor="{fill}", color="{border}"'


def quoted(text: str) -> str:
    """A text as Graphviz reads it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
