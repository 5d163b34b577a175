"""The graph with its collectives: ops gathered into boxes that a person can read, held by networkx."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import networkx as nx

from sbp import compat
from sbp.passes.explain.collectives import talking
from sbp.passes.explain.plan import PlanData
from sbp.passes.look.user_lines import clean_scope, function_at
from sbp.passes.physical.program import Border, Box, Compute, Physical, Step, Version, reads, writes
from sbp.passes.program.control import ports
from sbp.passes.program.graph import Const, Source
from sbp.passes.program.names import Names
from sbp.signature import format_sbp

MAX_BOXES = 48
HARD_LIMIT = 240
MIN_OPS = 3
GroupKey: TypeAlias = tuple[str, ...]
At: TypeAlias = tuple[str, int]
"""A node of the graph: ("ops", k), ("collective", i), ("argument", i) or ("result", i)."""


def _by_line(s: Source) -> GroupKey:
    return (clean_scope(s.scope), s.file, str(s.line))


def _by_function(s: Source) -> GroupKey:
    return (clean_scope(s.scope), s.file, function_at(s))


def _by_scope(s: Source) -> GroupKey:
    return (clean_scope(s.scope),)


# How ops are gathered into boxes, from fine to coarse, and up to how many boxes each is taken.
LEVELS: tuple[tuple[Callable[[Source], GroupKey], int], ...] = (
    (_by_line, MAX_BOXES),
    (_by_function, 10 * MAX_BOXES),
    (_by_scope, 20 * MAX_BOXES),
)


@dataclass(slots=True)
class OpBox:
    """Ops that are drawn as one box: one phase, one part of the user's program."""

    phase: str
    sources: list[Source] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The functions that most of the ops stand in."""
        if self.phase == "update":
            return "update"
        names = [name for name, _ in Counter(function_at(s) for s in self.sources).most_common() if name]
        return " + ".join(names[:2]) + (" + ..." if len(names) > 2 else "") or self.scope or "program"

    @property
    def lines(self) -> str:
        """The user's lines, such as "gpt.py:136-145"."""
        first = self.sources[0]
        here = [s.line for s in self.sources if s.file == first.file]
        low, high = min(here), max(here)
        return str(first) if low == high else f"{Source(first.file, low)}-{high}"

    @property
    def scope(self) -> str:
        """The scope that the ops share."""
        scopes = {clean_scope(s.scope) for s in self.sources}
        return scopes.pop() if len(scopes) == 1 else ""


class _Gather:
    """Walks the physical program once and gathers its ops at one level."""

    def __init__(self, physical: Physical, names: Names, level: Callable[[Source], GroupKey]) -> None:
        self.physical, self.names, self.level = physical, names, level
        self.boxes: list[OpBox] = []
        self.graph: nx.DiGraph = nx.DiGraph()
        self.holder: dict[Version, At] = {}
        self.talking: dict[int, list[int]] = {}  # per step: its collectives
        for i, (s, _) in enumerate(talking(physical)):
            self.talking.setdefault(id(s if isinstance(s, Box) else s.step), []).append(i)
        self.latest: dict[GroupKey, int] = {}

    def run(self) -> nx.DiGraph:
        p = self.physical
        for i, version in enumerate(zip(p.graph.inputs, p.inputs, strict=True)):
            self.holder[version] = ("argument", i)
            self.graph.add_node(("argument", i), kind="argument")
        self.walk(p.steps)
        for i, (x, nd) in enumerate(zip(p.graph.outputs, p.outputs, strict=True)):
            self.graph.add_node(("result", i), kind="result")
            if not isinstance(x, Const):
                self.edge((x, nd), ("result", i))
        return self.graph

    def walk(self, steps: Iterable[Step]) -> None:
        for step in steps:
            if isinstance(step, Box):
                self.move(step)
            elif isinstance(step, Border):
                self.border(step)
            elif all(isinstance(x, Const) for x in step.node.inputs):
                continue
            elif self.names.same_tensor(step.node.outputs[0]) is not None:
                self.hand_on(reads(step)[0], writes(step)[0])
            else:
                self.compute(step)

    def hand_on(self, before: Version, after: Version) -> None:
        """What is the same tensor comes from the same place."""
        if before in self.holder:
            self.holder[after] = self.holder[before]

    def border(self, step: Border) -> None:
        """The bodies of a loop or a branch are drawn once, in place; what goes round is not drawn."""
        wired = list(zip(ports(step.node), step.inside, strict=True))
        for port, nd in wired:
            outside = None if port.operand is None else step.node.inputs[port.operand]
            for inside in port.enters if isinstance(outside, int) else ():
                self.hand_on((outside, port.outer(nd)), (inside, nd))  # type: ignore[arg-type]
        for body in step.bodies:
            self.walk(body)
        for port, nd in wired:
            if port.result is not None:
                for x in port.leaves:
                    if isinstance(x, int):
                        self.hand_on((x, nd), (step.node.outputs[port.result], port.outer(nd)))

    def move(self, step: Box) -> None:
        """A collective becomes a node; a local move is not drawn."""
        before, after = (step.value, step.move.before), (step.value, step.move.after)
        if id(step) not in self.talking:
            self.hand_on(before, after)
            return
        at = ("collective", self.talking[id(step)][0])
        self.graph.add_node(at, kind="collective")
        self.edge(before, at)
        self.holder[after] = at

    def compute(self, step: Compute) -> None:
        node = step.node
        phase = self.names.phases[node.id]
        key = (phase, *self.level(node.source))
        k = self.latest.get(key)
        if k is None or id(step) in self.talking or not self.fits(step, ("ops", k)):
            k = self.latest[key] = len(self.boxes)
            self.boxes.append(OpBox(phase))
            self.graph.add_node(("ops", k), kind="ops", box=self.boxes[k])
        self.boxes[k].sources.append(node.source)
        for version in reads(step):
            self.edge(version, ("ops", k))
        for i in self.talking.get(id(step), ()):
            self.inside(step, ("collective", i), ("ops", k))
        self.holder.update(dict.fromkeys(writes(step), ("ops", k)))

    def inside(self, step: Compute, at: At, box: At) -> None:
        """A collective inside an op stands beside the edges of what the op reads."""
        self.graph.add_node(at, kind="collective")
        for version in reads(step):
            self.edge(version, at)
            _connect(self.graph, at, box, [version])

    def fits(self, step: Compute, at: At) -> bool:
        """Whether an op may join a box: not if what it reads was made from the box's results elsewhere."""
        others = {self.holder[v] for v in reads(step) if v in self.holder} - {at}
        seen = set(others)
        while others:
            x = others.pop()
            for y in self.graph.predecessors(x):
                if y == at:
                    return False
                if y not in seen:
                    seen.add(y)
                    others.add(y)
        return True

    def edge(self, version: Version, to: At) -> None:
        source = self.holder.get(version)
        if source is None or source == to:
            return
        _connect(self.graph, source, to, [version])


def plan_graph(plan: PlanData, max_boxes: int = MAX_BOXES) -> nx.DiGraph:
    """The program as a graph that a person can read: boxes of ops, collectives, arguments, results.

    Nodes: `("ops", k)` with its `OpBox` as `box`, `("collective", i)` for `plan.collectives[i]`,
    `("argument", i)`, `("result", i)`. Every edge has the tensors that run along it, as `tensors`: (name,
    dtype and shape, signature, bytes of the logical tensor). Ops are gathered by line or by function; then
    small boxes join their neighbours in the same `jax.named_scope` until at most `max_boxes` are left.

    Raises:
      ValueError: for a plan that was loaded from a file: it has no program.
    """
    physical = plan.physical
    if physical is None:
        raise ValueError(
            "this plan was loaded from a file, which holds no program to draw; draw the compiled one"
        )
    names = Names(physical.graph, plan.in_paths, plan.out_paths)
    graph: nx.DiGraph = nx.DiGraph()
    for level, limit in LEVELS:
        graph = _Gather(physical, names, level).run()
        if len(list(nodes_of(graph, "ops"))) <= limit:
            break
    _absorb(graph, max_boxes)
    for _, _, data in graph.edges(data=True):
        data["tensors"] = [_tensor(physical, names, v) for v in data.pop("versions")]
    graph.remove_nodes_from([n for n in graph if n[0] == "argument" and not graph.out_degree(n)])
    return graph


def _absorb(graph: nx.DiGraph, max_boxes: int) -> None:
    """Joins the smallest boxes with their neighbours: within a scope; across, if far too many are left."""
    boxes: dict[At, OpBox] = {n: graph.nodes[n]["box"] for n in nodes_of(graph, "ops")}

    def merge(limit: int, least: int, across: bool) -> None:
        stuck: set[At] = set()
        while open_ := [n for n in boxes if n not in stuck]:
            small = min(open_, key=lambda n: (len(boxes[n].sources), n))
            if len(boxes) <= limit and len(boxes[small].sources) >= least:
                return
            other = _neighbour(graph, small, across)
            if other is None:
                stuck.add(small)
                continue
            first, second = (small, other) if graph.has_edge(small, other) else (other, small)
            _join(graph, first, second)
            del boxes[second]
            stuck.discard(first)

    merge(max_boxes, MIN_OPS, across=False)
    if len(boxes) > HARD_LIMIT:
        merge(HARD_LIMIT, 0, across=True)


def _neighbour(graph: nx.DiGraph, small: At, across: bool) -> At | None:
    """The smallest box next to one that it can be joined with and the graph stay without cycles."""
    own: OpBox = graph.nodes[small]["box"]
    found = []
    for n in (*graph.successors(small), *graph.predecessors(small)):
        box: OpBox | None = graph.nodes[n].get("box")
        if box is None or box.phase != own.phase or not (across or box.scope == own.scope):
            continue
        first, second = (small, n) if graph.has_edge(small, n) else (n, small)
        if not _leads_round(graph, first, second):
            found.append((len(box.sources), n))
    return min(found)[1] if found else None


def _leads_round(graph: nx.DiGraph, first: At, second: At) -> bool:
    """Whether a path other than their edge leads from one node to another."""
    stack = [n for n in graph.successors(first) if n != second]
    seen = set(stack)
    while stack:
        for n in graph.successors(stack.pop()):
            if n == second:
                return True
            if n not in seen:
                seen.add(n)
                stack.append(n)
    return False


def _connect(graph: nx.DiGraph, source: At, target: At, versions: Iterable[Version]) -> None:
    """Has some versions run along an edge, which is made if there is none."""
    if not graph.has_edge(source, target):
        graph.add_edge(source, target, versions={})
    graph.edges[source, target]["versions"].update(dict.fromkeys(versions))


def _join(graph: nx.DiGraph, first: At, second: At) -> None:
    """Makes one box of two."""
    graph.nodes[first]["box"].sources += graph.nodes[second]["box"].sources
    for a, b, data in [*graph.in_edges(second, data=True), *graph.out_edges(second, data=True)]:
        source, target = (first, b) if a == second else (a, first)
        if source == target:
            continue
        _connect(graph, source, target, data["versions"])
    graph.remove_node(second)


def _tensor(physical: Physical, names: Names, version: Version) -> tuple[str, str, str, float]:
    value = physical.graph.values[version[0]]
    size = compat.itemsize(value.dtype)
    for n in value.shape:
        size *= n
    text = f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    return names.of(value.id), text, format_sbp(version[1]), size


def nodes_of(graph: nx.DiGraph, kind: str) -> Iterator[tuple[str, int]]:
    """The nodes of one kind."""
    return (n for n, k in graph.nodes(data="kind") if k == kind)


def between(graph: nx.DiGraph, start: At, *, forwards: bool) -> frozenset[At]:
    """The nearest nodes after (or before) a collective that are no collectives themselves."""
    step = graph.successors if forwards else graph.predecessors
    found: set[At] = set()
    stack: list[At] = [start]
    while stack:
        for x in step(stack.pop()):
            if graph.nodes[x]["kind"] == "collective":
                stack.append(x)
            else:
                found.add(x)
    return frozenset(found)


def depth(graph: nx.DiGraph, start: At) -> int:
    """How many collectives stand before this one in its chain."""
    before: list[At] = [x for x in graph.predecessors(start) if graph.nodes[x]["kind"] == "collective"]
    return 1 + max(depth(graph, x) for x in before) if before else 0
