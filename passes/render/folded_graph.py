"""The folded graph of a plan: as many boxes as a picture can hold, with the collectives between them.

SVG and DOT draw it. Groups of the outline are opened from the outside in, the costliest first, until the
number of boxes reaches its limit. A group that stays closed lists the collectives inside it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sbp.passes.explain.plan import Collective, PlanData
from sbp.passes.explain.words import kind_text
from sbp.passes.program.names import common
from sbp.passes.render.colours import COLLECTIVES
from sbp.passes.render.outline import Outline
from sbp.passes.render.program_data import program_data
from sbp.passes.render.wiring import Wiring, WordedVersion
from sbp.signature import format_sbp
from sbp.text.units import bytes_text, seconds_text

if TYPE_CHECKING:
    import networkx as nx

MAX_BOXES = 36
MAX_LANE = 20
"""Nodes of a lane, beyond which its collectives of a kind are one."""
MAX_LINES = 3
"""Arguments that a box lists."""


def outline_of(plan: PlanData) -> Outline:
    """The groups of a plan's program.

    Raises:
      ValueError: for a plan without a program.
    """
    program = program_data(plan)
    if program is None:
        raise ValueError("the plan has no program to draw")
    return Outline.of(program, plan.in_paths)


def fold(plan: PlanData, max_boxes: int = MAX_BOXES, outline: Outline | None = None) -> nx.DiGraph:
    """The graph of a plan.

    Every node has a `kind` (of a collective, or "ops"), a `lane` (a phase), a `head`, further `body` lines,
    its `rows` of the plan, and a `title` as its tooltip. Edges have a `label`, a `title`, and `back` if they
    lead to an earlier node, such as the next of several equal layers.

    Arguments:
      outline: of the plan, where it is known.

    Raises:
      ValueError: for a plan without a program.
    """
    outline = outline or outline_of(plan)
    return _Fold(plan, outline, Wiring.of(outline, plan.placement.shape), max_boxes).graph()


@dataclass
class _Fold:
    plan: PlanData
    outline: Outline
    wiring: Wiring
    max_boxes: int

    def graph(self) -> nx.DiGraph:
        """The visible nodes, in the order of the program, and their edges."""
        import networkx as nx  # takes long to load

        found: nx.DiGraph = nx.DiGraph(name=self.plan.name)
        open_ = self.open_groups()
        shown = {
            v: self.visible_node(v, open_) for v in range(1, len(self.wiring.collectives) + self.n_groups)
        }
        shown = self.gather_lanes(shown)
        order = sorted(set(shown.values()) - {0}, key=self.place)
        at = {v: k for k, v in enumerate(order)}
        for v in order:
            same = [x for x, of in shown.items() if of == v and x >= self.n_groups]
            found.add_node(v, **(self.box(v) if v < self.n_groups else self.pill(v, same)))
        for (a, b), carried in self.wiring.edges.items():
            x, y = shown[a], shown[b]
            if x and y and x != y:
                self.connect(found, (x, y), carried.versions, back=carried.next or at[y] < at[x])
        for _, _, d in found.edges(data=True):
            d.update(self.words(d.pop("versions")))
        return found

    @property
    def n_groups(self) -> int:
        return len(self.outline.groups)

    def parent(self, v: int) -> int:
        n = self.n_groups
        return self.outline.groups[v].parent if v < n else self.wiring.collectives[v - n].parent

    def place(self, v: int) -> tuple[float, int]:
        """The position of a node in the program: a collective stands just before its reader."""
        if v < self.n_groups:
            return float(v), 0
        made, wanted = self.neighbours[v]
        return (min(wanted) - 0.5 if wanted else max(made, default=0) + 0.5), v

    @cached_property
    def neighbours(self) -> Mapping[int, tuple[Sequence[int], Sequence[int]]]:
        """Per collective, the groups that make what it sends, and those that want it."""
        found = defaultdict[int, tuple[list[int], list[int]]](lambda: ([], []))
        for a, b in self.wiring.edges:
            if a < self.n_groups:
                found[b][0].append(a)
            if b < self.n_groups:
                found[a][1].append(b)
        return found

    def open_groups(self) -> set[int]:
        """The groups that are open."""
        members: dict[int, list[int]] = {}
        for v in range(1, self.n_groups + len(self.wiring.collectives)):
            members.setdefault(self.parent(v), []).append(v)
        open_, count = {0}, len(members.get(0, ()))
        waiting = [v for v in members.get(0, ()) if v in members]
        while waiting:
            first = max(
                waiting,
                key=lambda v: (self.outline.groups[v].kind == "phase", self.outline.groups[v].seconds, -v),
            )
            waiting.remove(first)
            more = count + len(members[first]) - 1
            if more <= self.max_boxes or self.outline.groups[first].kind == "phase":
                open_.add(first)
                count = more
                waiting += [v for v in members[first] if v in members]
        return open_

    def visible_node(self, v: int, open_: set[int]) -> int:
        """The visible node of a node; 0 for an open group."""
        return next((x for x in reversed(self.chain(v)) if x not in open_), 0)

    def chain(self, v: int) -> list[int]:
        """A node and the groups around it."""
        chain = [v]
        while self.parent(chain[-1]) > 0:
            chain.append(self.parent(chain[-1]))
        return chain

    def gather_lanes(self, shown: dict[int, int]) -> dict[int, int]:
        """The same, but in lanes with many nodes the collectives of a kind are one node."""
        crowded = Counter(self.lane(v) for v in set(shown.values()) - {0})
        first: dict[tuple[str, str], int] = {}
        for v, at in sorted(shown.items()):
            if at >= self.n_groups and crowded[lane := self.lane(at)] > MAX_LANE:
                key = lane, self.wiring.collectives[at - self.n_groups].kind
                shown[v] = first.setdefault(key, at)
        return shown

    def lane(self, v: int) -> str:
        """The phase of a node."""
        at = v
        while at > 0:
            if at < self.n_groups and self.outline.groups[at].kind == "phase":
                return self.outline.groups[at].title
            at = self.parent(at)
        return "program"

    def box(self, v: int) -> dict[str, Any]:
        """A group that is closed, or a line."""
        g = self.outline.groups[v]
        inside = [s for k, s in enumerate(self.wiring.collectives) if self.stands_in(self.n_groups + k, v)]
        rows = [r for s in inside for r in s.rows]
        read = [k for k, nodes in self.wiring.readers.items() if any(self.stands_in(x, v) for x in nodes)]
        body = [f"{g.where} · {seconds_text(g.seconds)}", *self.sent_words(rows), *self.read_words(read)]
        count = math.prod(self.outline.groups[x].times for x in self.chain(v))
        times = f" ×{count}" if count > 1 else ""
        title = f"{g.ops} ops"
        return {
            "kind": "ops",
            "lane": self.lane(v),
            "head": g.title + times,
            "body": body,
            "rows": rows,
            "title": title,
        }

    def stands_in(self, v: int, group: int) -> bool:
        """Whether a node is a group or lies in it."""
        at = v
        while at > 0 and at != group:
            at = self.parent(at)
        return at == group

    def sent_words(self, rows: Sequence[int]) -> list[str]:
        """The collectives inside a closed group, in words."""
        count, sent = Counter[str](), Counter[str]()
        for c in map(self.row, rows):
            count[c.kind] += c.count
            sent[c.kind] += int(c.wire_bytes)
        return [f"{n} {kind_text(kind)}, {bytes_text(sent[kind])}" for kind, n in count.items()]

    def read_words(self, values: Sequence[int]) -> list[str]:
        """The arguments that are read, with their signatures; if there are many, their number."""
        given: dict[int, str] = dict(self.outline.program["inputs"])
        names: dict[str, list[str]] = {}
        for v in values:
            if v in self.outline.arguments:
                names.setdefault(given[v], []).append(self.outline.arguments[v])
        lines = [f"{common(paths)} {nd}" for nd, paths in names.items()]
        heads = Counter(p.split("[")[0] for paths in names.values() for p in paths)
        most = len(lines) > MAX_LINES or any(len(line) > 60 for line in lines)
        return [f"{head}: {n} leaves" if n > 1 else head for head, n in heads.items()] if most else lines

    def row(self, k: int) -> Collective:
        return self.plan.collectives[k]

    def pill(self, v: int, same: Sequence[int]) -> dict[str, Any]:
        """Collectives at one place, or at several places that are one node."""
        sent = self.wiring.collectives[v - self.n_groups]
        rows = [r for x in same for r in self.wiring.collectives[x - self.n_groups].rows]
        cs = list(map(self.row, rows))
        times, moves = sum(c.count for c in cs), Counter(_move(c) for c in cs)
        return {
            "kind": sent.kind,
            "lane": self.lane(v),
            "head": kind_text(sent.kind) + (f" ×{times}" if times > 1 else ""),
            "note": bytes_text(sum(c.wire_bytes for c in cs)),
            "body": [
                common(c.tensor.replace("gradient of ", "∇ ") for c in cs),
                next(iter(moves)) if len(moves) == 1 else f"over {' x '.join(cs[0].axes)}",
            ],
            "rows": rows,
            "title": "\n".join(dict.fromkeys(c.reason for c in cs)),
            "seconds": sum(c.seconds for c in cs),
        }

    def connect(
        self, graph: nx.DiGraph, ends: tuple[int, int], versions: Mapping[WordedVersion, float], back: bool
    ) -> None:
        if not graph.has_edge(*ends):
            graph.add_edge(*ends, versions={}, back=back)
        d = graph.edges[ends]
        d["versions"].update(versions)
        d["back"] = d["back"] and back

    def words(self, versions: Mapping[WordedVersion, float]) -> dict[str, str]:
        """The tensors along an edge: the largest as its label, all of them in the tooltip."""
        values, names = self.outline.program["values"], self.outline.program["names"]

        def said(version: WordedVersion) -> str:
            shape, dtype, _ = values[str(version[0])]
            return f"{short_dtype(dtype)}[{', '.join(map(str, shape))}] {version[1]}"

        listed = sorted(versions, key=lambda v: -versions[v])
        more = f" +{len(listed) - 1}" if len(listed) > 1 else ""
        lines = [f"{names[str(v[0])]}: {said(v)}" for v in listed[:12]]
        rest = [f"and {len(listed) - 12} more"] if len(listed) > 12 else []
        return {"label": said(listed[0]) + more, "title": "\n".join([*lines, *rest])}


def _move(c: Collective) -> str:

    return f"{format_sbp(c.before)} → {format_sbp(c.after)}"


def short_dtype(text: str) -> str:
    """A dtype with JAX's short name.

    >>> short_dtype("float32"), short_dtype("bool")
    ('f32', 'bool')
    """
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if text.startswith(long):
            return short + text.removeprefix(long)
    return text


def kinds_of(plan: PlanData) -> Iterator[tuple[str, int, float]]:
    """The collectives of a plan by kind, in the order of the colours: how many, and their bytes."""
    by_kind = plan.by_kind()
    return ((kind, *by_kind[kind]) for kind in COLLECTIVES if kind in by_kind)
