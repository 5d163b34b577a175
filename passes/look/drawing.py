"""What is drawn of a plan: boxes, collectives of one kind and place as one node, arguments in groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import networkx as nx

from sbp.passes.explain.plan import Collective, PlanData
from sbp.passes.explain.words import collapse, kind_text
from sbp.passes.look.picture import At, between, depth, nodes_of, plan_graph
from sbp.passes.program.names import PHASES, common
from sbp.signature import NdSbp, format_sbp
from sbp.units import bytes_text

# Fill, border: light enough for dark text. Okabe and Ito's hues, told apart by colour-blind readers too.
COLOURS = {
    "ops": ("#ffffff", "#9aa5b1"),
    "argument": ("#f6f8fa", "#d0d7de"),
    "result": ("#f6f8fa", "#d0d7de"),
    "all_reduce": ("#fde3da", "#d55e00"),
    "all_gather": ("#d8ecfa", "#0072b2"),
    "reduce_scatter": ("#fdf0cf", "#e69f00"),
    "all_to_all": ("#f6e1ee", "#b0578d"),
    "ragged_all_to_all": ("#f6e1ee", "#b0578d"),
    "permute": ("#d5f0e6", "#009e73"),
    "send": ("#e4f3fb", "#56b4e9"),
}
MAX_LINES = 5
BoxPlace: TypeAlias = tuple[Any, ...]
"""The name of a node: what kind it is of, and its number or what it stands for."""


def drawing(plan: PlanData, max_boxes: int | None = None) -> nx.DiGraph:
    """The graph that DOT and SVG draw.

    Every node has a `kind` (a key of `COLOURS`), a `lane` (a phase), a `head` and further `body` lines; a
    collective also `count` and `wire_bytes`. Edges have a `label` and a `title`.

    Raises:
      ValueError: for a plan that was loaded from a file.
    """
    graph = plan_graph(plan) if max_boxes is None else plan_graph(plan, max_boxes)
    places = _collective_places(graph, plan)
    out: nx.DiGraph = nx.DiGraph(name=plan.name)
    for n in nodes_of(graph, "ops"):
        box = graph.nodes[n]["box"]
        where = f"{box.scope} · {box.lines}" if box.scope else box.lines
        out.add_node(n, kind="ops", lane=box.phase, head=box.title, body=[where], count=len(box.sources))
    for place, members in _grouped(places).items():
        cs = [plan.collectives[i] for _, i in members]
        out.add_node(place, lane=_lane(graph, members[0]), **_pill(cs))
    _add_edges(graph, places, out)
    _add_chips(graph, plan, places, out)
    return nx.convert_node_labels_to_integers(out, ordering="default")


def _grouped(places: dict[At, BoxPlace]) -> dict[BoxPlace, list[At]]:
    out: dict[BoxPlace, list[At]] = {}
    for node, place in places.items():
        out.setdefault(place, []).append(node)
    return out


def _collective_places(graph: nx.DiGraph, plan: PlanData) -> dict[At, BoxPlace]:
    """Collectives of one kind between the same boxes stand in one place."""
    out: dict[At, BoxPlace] = {}
    for n in nodes_of(graph, "collective"):
        c = plan.collectives[n[1]]
        before = between(graph, n, forwards=False)
        after = between(graph, n, forwards=True)
        start = frozenset(("argument",) if x[0] == "argument" else x for x in before)
        end = frozenset(("result",) if x[0] == "result" else x for x in after)
        out[n] = ("collectives", c.kind, c.axes, depth(graph, n), start, end)
    return out


def _lane(graph: nx.DiGraph, node: At) -> str:
    """The phase of the first box after a collective, else of the one before it."""
    for forwards in (True, False):
        phases: set[str] = {
            graph.nodes[x]["box"].phase for x in between(graph, node, forwards=forwards) if x[0] == "ops"
        }
        if phases:
            return min(phases, key=PHASES.index)
    return PHASES[0]


def _pill(cs: Sequence[Collective]) -> dict[str, Any]:
    """The texts of one place's collectives."""
    times, sent = sum(c.count for c in cs), sum(c.wire_bytes for c in cs)
    moves = list(dict.fromkeys(f"{format_sbp(c.before)} → {format_sbp(c.after)}" for c in cs))
    return {
        "kind": cs[0].kind,
        "head": kind_text(cs[0].kind) + (f" ×{times}" if times > 1 else ""),
        "note": bytes_text(sent),
        "body": [
            common(c.tensor.replace("gradient of ", "∇ ") for c in cs),
            moves[0] if len(moves) == 1 else f"over {' x '.join(cs[0].axes)}",
        ],
        "count": len(cs),
        "times": times,
        "wire_bytes": sent,
        "title": "\n".join(dict.fromkeys(c.reason for c in cs)),
    }


def _add_edges(graph: nx.DiGraph, places: dict[At, BoxPlace], out: nx.DiGraph) -> None:
    """Edges between boxes and collectives, each with its largest tensor in words."""
    tensors: dict[tuple[BoxPlace, BoxPlace], list[tuple[str, str, str, float]]] = {}
    for a, b, carried in graph.edges(data="tensors"):
        if a[0] in ("ops", "collective") and b[0] in ("ops", "collective"):
            tensors.setdefault((places.get(a, a), places.get(b, b)), []).extend(carried)
    for (a, b), carried in tensors.items():
        name, shape, signature, _ = max(carried, key=lambda t: t[3])
        more = len(carried) - 1
        lines = [f"{n}: {s} {nd}" for n, s, nd, _ in carried]
        out.add_edge(
            a,
            b,
            label=f"{short_dtype(shape)} {signature}" + (f" +{more}" if more else ""),
            title="\n".join(lines[:12] + ([f"and {len(lines) - 12} more"] if len(lines) > 12 else [])),
            name=name,
        )


def _add_chips(graph: nx.DiGraph, plan: PlanData, places: dict[At, BoxPlace], out: nx.DiGraph) -> None:
    """Arguments beside what reads them first, results beside what makes them."""
    readers: dict[BoxPlace, list[int]] = {}
    for n in nodes_of(graph, "argument"):
        targets = [places.get(x, x) for x in graph.successors(n) if x[0] != "result"]
        lane = min((out.nodes[t]["lane"] for t in targets), key=PHASES.index, default="")
        for t in dict.fromkeys(t for t in targets if out.nodes[t]["lane"] == lane):
            readers.setdefault(t, []).append(n[1])
    for target, which in readers.items():
        known = [i for i in which if i < len(plan.in_paths)]
        body = _chip([plan.in_paths[i] for i in known], [plan.in_sbp[i] for i in known], plan.in_paths)
        body += [f"{len(which) - len(known)} constants"] if len(which) > len(known) else []
        chip = ("arguments", target)
        out.add_node(chip, kind="argument", lane=out.nodes[target]["lane"], head="", body=body)
        out.add_edge(chip, target, label="", title="")
    makers: dict[BoxPlace, list[int]] = {}
    for n in nodes_of(graph, "result"):
        for x in graph.predecessors(n):
            makers.setdefault(places.get(x, x), []).append(n[1])
    for source, which in makers.items():
        if source in out:
            body = _chip([plan.out_paths[i] for i in which], [plan.out_sbp[i] for i in which], plan.out_paths)
            out.add_node(
                ("results", source), kind="result", lane=out.nodes[source]["lane"], head="", body=body
            )
            out.add_edge(source, ("results", source), label="", title="")


def _chip(paths: Sequence[str], sbps: Sequence[NdSbp], every: Sequence[str]) -> list[str]:
    """Signatures at rest in a few lines."""
    lines = [f"{path} {format_sbp(nd)}" for path, nd, _ in collapse(paths, sbps, every)]
    if len(lines) <= MAX_LINES:
        return lines
    heads: dict[str, int] = {}
    for path in paths:
        head = path.split("[")[0] if not path.startswith("result[") else path[: path.index("]") + 1]
        heads[head] = heads.get(head, 0) + 1
    return [f"{head}: {n} {'leaves' if n > 1 else 'leaf'}" for head, n in heads.items()]


def short_dtype(text: str) -> str:
    """A dtype and shape with JAX's short names.

    >>> short_dtype("float32[2, 3]"), short_dtype("bool[]")
    ('f32[2, 3]', 'bool[]')
    """
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if text.startswith(long):
            return short + text.removeprefix(long)
    return text


def kinds_of(out: nx.DiGraph) -> dict[str, tuple[int, float]]:
    """The collectives of a drawing by kind: how many, and their bytes; in the order of the colour table."""
    found: dict[str, tuple[int, float]] = {}
    for kind in COLOURS:
        pills = [d for _, d in out.nodes(data=True) if d["kind"] == kind and "wire_bytes" in d]
        if pills:
            found[kind] = (sum(d["times"] for d in pills), sum(d["wire_bytes"] for d in pills))
    return found


def dot_text(plan: PlanData) -> str:
    """The drawing in Graphviz's language.

    Raises:
      ValueError: for a plan that was loaded from a file.
    """
    title = f"{plan.name} on {plan.placement}: {bytes_text(plan.wire_bytes)} sent per device per step"
    return digraph(plan.name, title, dot_lines(drawing(plan)))


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
    for lane in PHASES:
        members = [(n, d) for n, d in out.nodes(data=True) if d["lane"] == lane]
        if members:
            lines.append(f"  subgraph {quoted('cluster_' + prefix + lane)} {{")
            lines.append(f'    label={quoted(lane)}; color="#d0d7de"; fontname="Helvetica";')
            lines += [f"    {prefix}n{n} [{dot_node(d)}];" for n, d in members]
            lines.append("  }")
    for a, b, d in out.edges(data=True):
        label = f" [label={quoted(d['label'])}]" if d["label"] else ""
        lines.append(f"  {prefix}n{a} -> {prefix}n{b}{label};")
    return lines


def dot_node(d: dict[str, Any]) -> str:
    """The attributes of a node."""
    fill, border = COLOURS[d["kind"]]
    text = [" ".join(t for t in (d["head"], d.get("note", "")) if t), *d["body"]]
    label = quoted("\n".join(t for t in text if t))
    return f'label={label}, fillcolor="{fill}", color="{border}"'


def quoted(text: str) -> str:
    """A text as Graphviz reads it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def lanes_of(out: nx.DiGraph) -> list[str]:
    """The phases that the drawing has, in order."""
    present: Iterable[str] = {d["lane"] for _, d in out.nodes(data=True)}
    return [p for p in PHASES if p in present]
