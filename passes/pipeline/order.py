"""Stages and phases: what of the loop's body is whose forward, what its backward, and what nobody waits for.

A stage is what one placement does without a word from another one in between. Hops between placements number
the stages; a placement that comes by twice (interleaved, or a V) has two. Backward ops belong to the stage
whose forward they undo.

Words: docs/glossary.md.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sbp.passes.pipeline.numbering import Item, StageFlow, halves, runs_of_ranks
from sbp.passes.pipeline.op_placement import OpPlacements, loop_of, reads_of
from sbp.passes.program.graph import Const, Graph, Node
from sbp.passes.program.role import Part, Phase


@dataclass(frozen=True)
class Order:
    """The parts of a program.

    Arguments:
      parts: of every op on every placement that computes it.
      stages: per stage, the position of its placement.
      loop: the part that the loop waits for, per placement.
    """

    parts: Mapping[Item, Part]
    stages: tuple[int, ...]
    loop: Mapping[int, Part]


def find_order(graph: Graph, where: OpPlacements, rank_of: Sequence[int] | None = None) -> Order:
    """The parts of a program whose ops have been placed.

    Arguments:
      rank_of: stage -> rank, as a schedule wants it: where it has several stages of a rank in a row, what is
        one stage otherwise is cut.
    """
    loop = loop_of(graph)
    parts: dict[Item, Part] = {}
    stages: tuple[int, ...] = ()
    if loop is not None:
        inner = _Inner(graph, _Items(loop.bodies[0].nodes, where), rank_of)
        stages = inner.stages
        parts.update(inner.parts())
    outer, waits = _outer(graph, where, loop)
    return Order({**parts, **outer}, stages, waits)


class _Items:
    """Ops on placements, and which of them they wait for."""

    def __init__(self, nodes: Sequence[Node], where: OpPlacements) -> None:
        self.where = where
        self.nodes = {n.id: n for n in nodes}
        self.maker = {v: n.id for n in nodes for v in n.outputs}
        self.items: list[Item] = [(n.id, p) for n in nodes for p in sorted(where.nodes[n.id])]
        self.before = {item: list(self.sources(item)) for item in self.items}
        self.after: dict[Item, list[Item]] = {item: [] for item in self.items}
        for item, sources in self.before.items():
            for s in sources:
                self.after[s].append(item)

    def sources(self, item: Item) -> Iterable[Item]:
        node, place = self.nodes[item[0]], item[1]
        for x in reads_of(node):
            if x in self.maker:
                at = self.where.values[x]
                yield self.maker[x], place if place in at else min(at)

    def flow(self, items: Sequence[Item]) -> StageFlow:
        """Some of them."""
        return StageFlow(items, self.before, self.after)


class _Inner:
    """The parts of the loop's body."""

    def __init__(self, graph: Graph, items: _Items, rank_of: Sequence[int] | None) -> None:
        self.graph = items
        self.backward: set[Item] = set()
        for item in items.items:
            undone = items.nodes[item[0]].role.undoes
            if undone or any(s in self.backward for s in items.before[item]):
                self.backward.add(item)
        forward = [i for i in items.items if i not in self.backward]
        level = items.flow(forward).levels()
        keys = sorted({(level[i], i[1]) for i in forward} | self.without(forward, level))
        members = [[i for i in forward if (level[i], i[1]) == key] for key in keys]
        wanted = runs_of_ranks(rank_of or ())
        if [place for _, place in keys] == [rank for rank, _ in wanted]:
            cut = [
                halves(graph, items.nodes, m, items.after, n)
                for m, (_, n) in zip(members, wanted, strict=True)
            ]
            keys = [key for key, some in zip(keys, cut, strict=True) for _ in some]
            members = [m for some in cut for m in some]
        self.stages = tuple(place for _, place in keys)
        self.stage = {i: s for s, some in enumerate(members) for i in some}

    def without(self, forward: Sequence[Item], level: Mapping[Item, int]) -> set[tuple[int, int]]:
        """Placements that have backward ops only: a stage behind all others."""
        have = {place for _, place in forward}
        last = max(level.values(), default=-1) + 1
        return {(last, place) for _, place in self.backward if place not in have}

    def parts(self) -> dict[Item, Part]:
        """The part of every op."""
        for item in (i for i in self.graph.items if i in self.backward):
            self.stage[item] = self.undoes(item)
        waited = self.awaited_items()
        phase = {
            i: (Phase.INPUT if i in waited else Phase.WEIGHT) if i in self.backward else Phase.FORWARD
            for i in self.graph.items
        }
        return {i: Part(phase[i], self.stage[i]) for i in self.graph.items}

    def undoes(self, item: Item) -> int:
        """The stage of a backward op: the last one of its placement that nothing before it has left."""
        mine = [s for s, place in enumerate(self.stages) if place == item[1]]
        sources = self.graph.before[item]
        limit = min((self.stage[s] for s in sources if s in self.backward), default=len(self.stages))
        below = [s for s in mine if s <= limit] or mine[:1]
        kept = [self.stages_with_forward(s) for s in sources if s not in self.backward and s[1] == item[1]]
        known = [max(some) for stages in kept if (some := stages.intersection(below))]
        return min(known, default=max(below))

    def stages_with_forward(self, item: Item) -> set[int]:
        """The stages of its placement whose forward makes or reads what an op makes."""
        users = (u for u in self.graph.after[item] if u not in self.backward and u[1] == item[1])
        return {self.stage[item], *(self.stage[u] for u in users)}

    def awaited_items(self) -> set[Item]:
        """Backward ops that a backward op of another stage waits for."""
        out: set[Item] = set()
        for item in reversed([i for i in self.graph.items if i in self.backward]):
            users = [u for u in self.graph.after[item] if u in self.backward]
            if any(u in out or self.stage[u] != self.stage[item] for u in users):
                out.add(item)
        return out


def _outer(graph: Graph, where: OpPlacements, loop: Node | None) -> tuple[dict[Item, Part], dict[int, Part]]:
    """The parts of what stands outside of the loop, and what the loop waits for on each placement."""
    items = _Items(graph.nodes, where)
    first = _ancestors(items, loop)
    early = [i for i in items.items if i in first]
    late = [i for i in items.items if i not in first]  # the loop too: what it gives is there at once
    parts: dict[Item, Part] = {}
    for phase, some in ((Phase.BEFORE, early), (Phase.AFTER, late)):
        flow = items.flow(some)
        # As many hops between placements come first as must, and as late as that allows.
        parts.update({i: Part(phase, n) for i, n in flow.latest(flow.earliest()).items()})
    parts = {i: part for i, part in parts.items() if loop is None or i[0] != loop.id}
    waits: dict[int, Part] = {}
    for place in where.nodes[loop.id] if loop is not None else ():
        levels = [parts[s].at + (s[1] != place) for s in _entering(items, loop, place)]
        waits[place] = Part(Phase.BEFORE, max(levels, default=0))
    return parts, waits


def _entering(items: _Items, loop: Node | None, place: int) -> Iterable[Item]:
    """What a placement's part of the loop waits for."""
    assert loop is not None
    for x, v in zip(loop.inputs, loop.bodies[0].inputs, strict=True):
        if not isinstance(x, Const) and x in items.maker and place in items.where.values.get(v, ()):
            at = items.where.nodes[items.maker[x]]
            yield items.maker[x], place if place in at else min(at)


def _ancestors(items: _Items, loop: Node | None) -> set[Item]:
    """What a loop waits for."""
    found: set[Item] = set()
    todo = [i for i in items.items if loop is not None and i[0] == loop.id]
    while todo:
        for s in items.before[todo.pop()]:
            if s not in found:
                found.add(s)
                todo.append(s)
    return found
