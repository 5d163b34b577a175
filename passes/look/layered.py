"""Where everything of a drawing goes: a layered layout per phase (Sugiyama et al., 1981), side by side.

The forward runs down and the backward up, so that a box and its gradient lie next to each other. Collectives
between two phases, and those of arguments, stand in the channel left of the phase that they serve.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TypeAlias

import networkx as nx

from sbp.passes.look.drawing import BoxPlace, lanes_of

TOP, GAP, SIDE, PAD = 34.0, 26.0, 22.0, 14.0
BOX_WIDTH, PILL_WIDTH, CHIP_MIN, CHIP_MAX = 188.0, 206.0, 110.0, 236.0
EMPTY_CHANNEL = 84.0
Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Spot:
    """The rectangle of a node."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> Point:
        """Its centre."""
        return self.x + self.width / 2, self.y + self.height / 2


@dataclass(frozen=True, slots=True)
class Curve:
    """A cubic curve (four points), where its words go, and whether it is a mere saved value."""

    points: tuple[Point, ...]
    word: Point | None = None
    faint: bool = False


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A finished layout; `lanes` are the phases and their grounds."""

    width: float
    height: float
    lanes: tuple[tuple[str, Spot], ...]
    spots: Mapping[BoxPlace, Spot]
    curves: Mapping[tuple[BoxPlace, BoxPlace], Curve]


def size_of(d: Mapping[str, Any]) -> tuple[float, float]:
    """Width and height of a node by its texts."""
    height = (14.0 if d["head"] else 0.0) + 12.0 * len(d["body"]) + 14.0
    if d["kind"] in ("argument", "result"):
        longest = max(map(len, d["body"]), default=0)
        return min(CHIP_MAX, max(CHIP_MIN, 5.6 * longest + 18)), height
    return (BOX_WIDTH if d["kind"] == "ops" else PILL_WIDTH), height


def spread(wanted: Sequence[float], heights: Sequence[float], gap: float) -> list[float]:
    """Tops as near to the `wanted` middles as can be without overlap, in the same order.

    Least squares under an order: pool adjacent violators.

    >>> spread([10, 10, 100], [10, 10, 10], 2)
    [-1.0, 11.0, 95.0]
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[tuple[float, int]] = []
    offsets, at = [], 0.0
    for i in order:
        offsets.append(at)
        blocks.append((wanted[i] - heights[i] / 2 - at, 1))
        at += heights[i] + gap
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, n), (b, m) = blocks[-2:]
            blocks[-2:] = [((a * n + b * m) / (n + m), n + m)]
    flat = [mean for mean, n in blocks for _ in range(n)]
    tops = [0.0] * len(wanted)
    for i, mean, offset in zip(order, flat, offsets, strict=True):
        tops[i] = mean + offset
    return tops


class _Lane:
    """One phase: the nodes inside it in rows, and its channel on the left."""

    def __init__(self, name: str, graph: nx.DiGraph, last: bool) -> None:
        self.name, self.graph = name, graph
        self.rises = name == "backward"
        self.apart = last and name == "update"
        mine = [n for n, d in graph.nodes(data=True) if d["lane"] == name]
        chips = [n for n in mine if graph.nodes[n]["kind"] == "argument"]
        results = [n for n in mine if graph.nodes[n]["kind"] == "result"]
        channel: list[BoxPlace] = []
        for n in nx.topological_sort(graph.subgraph(mine)):
            if "wire_bytes" in graph.nodes[n]:
                sources = [p for p in graph.predecessors(n) if p not in chips]
                here = [p for p in sources if p in mine and p not in channel]
                if not here or len(here) < len(sources):
                    channel.append(n)
        self.pills = channel
        self.right = [*chips, *results] if self.apart else []
        self.chips = [] if self.apart else chips
        out = {*channel, *chips, *self.right}
        self.inside = [n for n in mine if n not in out]
        self.rows = self._rows()

    def _rows(self) -> list[list[BoxPlace]]:
        """Nodes by longest path; one that nothing leads to stands right before its first use."""
        inner = self.graph.subgraph(self.inside)
        rank = {n: i for i, row in enumerate(nx.topological_generations(inner)) for n in row}
        for n in reversed(list(nx.topological_sort(inner))):
            if not inner.in_degree(n) and inner.out_degree(n):
                rank[n] = min(rank[m] for m in inner.successors(n)) - 1
        rows: list[list[BoxPlace]] = [[] for _ in range(max(rank.values(), default=-1) + 1)]
        for n in sorted(rank):
            rows[rank[n]].append(n)
        rows = [row for row in rows if row]
        for sweep in range(4):
            at = {n: (i + 1) / (len(row) + 1) for row in rows for i, n in enumerate(row)}
            for row in rows if sweep % 2 == 0 else reversed(rows):
                near = inner.predecessors if sweep % 2 == 0 else inner.successors
                row.sort(key=lambda n: fmean([at[m] for m in near(n)] or [at[n]]))
                at.update({n: (i + 1) / (len(row) + 1) for i, n in enumerate(row)})
        return rows

    def sizes(self, nodes: Iterable[BoxPlace]) -> list[tuple[float, float]]:
        return [size_of(self.graph.nodes[n]) for n in nodes]

    @property
    def inner_width(self) -> float:
        return max(
            (sum(w for w, _ in self.sizes(row)) + SIDE * (len(row) - 1) for row in self.rows), default=0.0
        )

    @property
    def row_heights(self) -> list[float]:
        return [max(h for _, h in self.sizes(row)) for row in self.rows]

    @property
    def inner_height(self) -> float:
        return sum(self.row_heights) + GAP * max(0, len(self.rows) - 1)

    def fill(self, x: float, top: float, height: float, spots: dict[BoxPlace, Spot]) -> None:
        """Puts the rows into a rectangle that starts at (x, top), stretched to its height."""
        heights, n = self.row_heights, len(self.rows)
        gap = GAP + min(2.5 * GAP, max(0.0, height - self.inner_height) / max(1, n - 1))
        y = top + max(0.0, height - sum(heights) - gap * (n - 1)) / 2
        order = range(n - 1, -1, -1) if self.rises else range(n)
        for i in order:
            sizes = self.sizes(self.rows[i])
            left = x + (self.inner_width - sum(w for w, _ in sizes) - SIDE * (len(sizes) - 1)) / 2
            for node, (w, h) in zip(self.rows[i], sizes, strict=True):
                spots[node] = Spot(left, y + (heights[i] - h) / 2, w, h)
                left += w + SIDE
            y += heights[i] + gap

    def column(
        self, nodes: Sequence[BoxPlace], x: float, wanted: Sequence[float], spots: dict[BoxPlace, Spot]
    ) -> float:
        """Puts nodes below each other near the wanted heights, right-aligned; returns the column's width."""
        sizes = self.sizes(nodes)
        width = max((w for w, _ in sizes), default=0.0)
        for n, y, (w, h) in zip(nodes, spread(wanted, [h for _, h in sizes], 12), sizes, strict=True):
            spots[n] = Spot(x + width - w, y, w, h)
        return width


def place(graph: nx.DiGraph) -> Arrangement:
    """The layout of a drawing."""
    names = lanes_of(graph)
    lanes = [_Lane(name, graph, last=name == names[-1] and len(names) > 1) for name in names]
    spots: dict[BoxPlace, Spot] = {}
    height = max((lane.inner_height for lane in lanes), default=0.0)
    tops = TOP + PAD
    # Heights first: the channels look at where the boxes of all lanes are. The x of a lane is set afterwards.
    for lane in lanes:
        lane.fill(0, tops, height, spots)
    for lane in lanes:
        if lane.apart and lane.pills:
            _centre(lane, graph, spots)
    x, grounds = 0.0, []
    for i, lane in enumerate(lanes):
        x += _channel(lane, graph, x, i == 0, spots)
        grounds.append((lane, x, lane.inner_width + 2 * PAD))
        for n in lane.inside:
            spots[n] = replace(spots[n], x=spots[n].x + x + PAD)
        x += lane.inner_width + 2 * PAD
        if lane.right:
            wanted = [
                _near(graph, n, spots) + (-40 if graph.nodes[n]["kind"] == "argument" else 40)
                for n in lane.right
            ]
            x += 40 + lane.column(lane.right, x + 40, wanted, spots)
    low = min((s.y for s in spots.values()), default=0.0)
    shift = max(0.0, tops - low)
    spots = {n: replace(s, y=s.y + shift) for n, s in spots.items()}
    bottom = max((s.y + s.height for s in spots.values()), default=0.0) + PAD
    lanes_at = tuple((lane.name, _ground(lane, left, width, bottom, spots)) for lane, left, width in grounds)
    return Arrangement(x, bottom, lanes_at, spots, _curves(graph, lanes, spots))


def _ground(lane: _Lane, x: float, width: float, bottom: float, spots: Mapping[BoxPlace, Spot]) -> Spot:
    """What is drawn under a lane: from top to bottom, or only around the update."""
    if not lane.apart or not lane.inside:
        return Spot(x, 0, width, bottom)
    top = min(spots[n].y for n in lane.inside) - TOP
    low = max(spots[n].y + spots[n].height for n in lane.inside) + PAD
    return Spot(x, top, width, low - top)


def _near(graph: nx.DiGraph, n: BoxPlace, spots: Mapping[BoxPlace, Spot]) -> float:
    """The height of what a node hangs on."""
    ys = [spots[m].middle[1] for m in (*graph.predecessors(n), *graph.successors(n)) if m in spots]
    return fmean(ys) if ys else 0.0


def _centre(lane: _Lane, graph: nx.DiGraph, spots: dict[BoxPlace, Spot]) -> None:
    """Moves the update to the middle of the gradients that it takes."""
    sources = [spots[p].middle[1] for n in lane.pills for p in graph.predecessors(n) if p in spots]
    here = [spots[n].middle[1] for n in lane.inside]
    if sources and here:
        for n in lane.inside:
            spots[n] = replace(spots[n], y=spots[n].y + fmean(sources) - fmean(here))


def _channel(lane: _Lane, graph: nx.DiGraph, x: float, first: bool, spots: dict[BoxPlace, Spot]) -> float:
    """Places what stands left of a lane: arguments, then collectives; returns the width that it takes."""
    targets: dict[BoxPlace, float] = {}
    for n in lane.pills if lane.apart else reversed(lane.pills):
        near = graph.predecessors(n) if lane.apart else graph.successors(n)
        ys = [
            targets.get(m, spots[m].middle[1] if m in spots else 0.0)
            for m in near
            if m in spots or m in targets
        ]
        targets[n] = fmean(ys) if ys else 0.0
    margin = 0.0 if first else 46.0
    pills = lane.pills
    chip_y = [
        fmean([targets[m] if m in targets else spots[m].middle[1] for m in graph.successors(n)])
        for n in lane.chips
    ]
    width = margin
    if lane.chips:
        width += lane.column(lane.chips, x + width, chip_y, spots) + 34
    if pills:
        width += lane.column(pills, x + width, [targets[n] for n in pills], spots) + 46
    return width if width > margin else (0.0 if first else EMPTY_CHANNEL)


def _curves(
    graph: nx.DiGraph, lanes: Sequence[_Lane], spots: Mapping[BoxPlace, Spot]
) -> dict[tuple[BoxPlace, BoxPlace], Curve]:
    """A curve for every edge: first which sides it joins, then where on them, so that curves do not meet."""
    home = {n: lane for lane in lanes for n in lane.inside}
    sides = {(a, b): _sides(a, b, home, spots) for a, b in graph.edges}
    used: dict[tuple[BoxPlace, str], list[tuple[float, tuple[BoxPlace, BoxPlace], int]]] = {}
    for edge, pair in sides.items():
        for end, side in enumerate(pair):
            other = spots[edge[1 - end]].middle
            used.setdefault((edge[end], side), []).append((other[0 if side in "tb" else 1], edge, end))
    ports: dict[tuple[tuple[BoxPlace, BoxPlace], int], Point] = {}
    for (n, side), ends in used.items():
        s = spots[n]
        length = (s.width if side in "tb" else s.height) * 0.7
        step = min(16.0, length / len(ends))
        for i, (_, edge, end) in enumerate(sorted(ends, key=lambda e: (e[0], str(e[1])))):
            off = (i - (len(ends) - 1) / 2) * step
            x, y = s.middle
            ports[edge, end] = {
                "t": (x + off, s.y),
                "b": (x + off, s.y + s.height),
                "l": (s.x, y + off),
                "r": (s.x + s.width, y + off),
            }[side]
    return {e: _curve(e, sides[e], ports[e, 0], ports[e, 1], graph, home) for e in sides}


def _sides(a: BoxPlace, b: BoxPlace, home: Mapping[BoxPlace, _Lane], spots: Mapping[BoxPlace, Spot]) -> str:
    """The sides that an edge leaves and enters: top, bottom, left or right."""
    s, t = spots[a], spots[b]
    lane = home.get(a)
    if lane is not None and lane is home.get(b):
        if _blocked(s, t, [spots[n] for n in lane.inside if n not in (a, b)]):
            return "ll" if lane.rises else "rr"
        return "bt" if t.y > s.y else "tb"
    if t.x >= s.x + s.width:
        return "rl"
    if t.x + t.width <= s.x:
        return "lr"
    return "bt" if t.y > s.y else "tb"


def _blocked(s: Spot, t: Spot, others: Sequence[Spot]) -> bool:
    """Whether something stands on the straight line between two nodes."""
    (x0, y0), (x1, y1) = s.middle, t.middle
    for i in range(1, 24):
        x, y = x0 + (x1 - x0) * i / 24, y0 + (y1 - y0) * i / 24
        if any(o.x - 4 < x < o.x + o.width + 4 and o.y - 2 < y < o.y + o.height + 2 for o in others):
            return True
    return False


_OUT = {"t": (0, -1), "b": (0, 1), "l": (-1, 0), "r": (1, 0)}


def _curve(
    edge: tuple[BoxPlace, BoxPlace],
    sides: str,
    start: Point,
    end: Point,
    graph: nx.DiGraph,
    home: Mapping[BoxPlace, _Lane],
) -> Curve:
    (x0, y0), (x1, y1) = start, end
    if sides in ("ll", "rr"):
        bulge = min(64.0, 18 + abs(y1 - y0) / 9)
    elif sides in ("rl", "lr"):
        bulge = max(16.0, abs(x1 - x0) * 0.45)
    else:
        bulge = max(8.0, abs(y1 - y0) * 0.45)
    (dx0, dy0), (dx1, dy1) = _OUT[sides[0]], _OUT[sides[1]]
    points = (start, (x0 + dx0 * bulge, y0 + dy0 * bulge), (x1 + dx1 * bulge, y1 + dy1 * bulge), end)
    a, b = edge
    straight = sides in ("bt", "tb") and abs(y1 - y0) >= 18 and abs(x1 - x0) < 60
    faint = graph.nodes[a]["kind"] == graph.nodes[b]["kind"] == "ops" and home.get(a) is not home.get(b)
    return Curve(points, ((x0 + x1) / 2, (y0 + y1) / 2 + 3) if straight else None, faint)
