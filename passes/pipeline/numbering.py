"""Stages: what one placement does of the forward pass without a word from another one in between.

Hops between placements number the stages; a placement that comes by twice (interleaved, or a V) has two. An
op that no hop binds goes where its placement has a stage anyway: there are no more stages than must be.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import TypeAlias

from sbp.compat import core
from sbp.passes.program.control import assumed_trips
from sbp.passes.program.graph import Graph, Node
from sbp.passes.program.views import op_of
from sbp.rules.entry import element_flops

Item: TypeAlias = tuple[int, int]
"""An op on a placement: its id, and the position of the placement."""

BALANCE = 0.1
"""How much worse than the best balance a cut of a stage may be, of the whole, to send less."""


@dataclass(frozen=True)
class StageFlow:
    """Ops on placements, in an order that can be executed.

    Arguments:
      before, after: what each waits for, and what waits for it.
    """

    items: Sequence[Item]
    before: Mapping[Item, Sequence[Item]]
    after: Mapping[Item, Sequence[Item]]

    def earliest(self) -> dict[Item, int]:
        """How many hops between placements come first, at the least."""
        level: dict[Item, int] = {}
        for item in self.items:
            sources = [s for s in self.before[item] if s in level]
            level[item] = max((level[s] + (s[1] != item[1]) for s in sources), default=0)
        return level

    def latest(self, level: Mapping[Item, int], top: int | None = None) -> dict[Item, int]:
        """The latest that these levels allow; `top` for what nobody waits for, or its own level."""
        late: dict[Item, int] = {}
        for item in reversed(self.items):
            users = [u for u in self.after[item] if u in late]
            free = level[item] if top is None else top
            late[item] = min((late[u] - (u[1] != item[1]) for u in users), default=free)
        return late

    def levels(self) -> dict[Item, int]:
        """Levels such that each placement has as few of them as possible.

        What waits for something in here comes as early as it can, anything else (masks, say) where it is
        used.
        """
        early = self.earliest()
        late = self.latest(early, max(early.values(), default=0))
        points = self.points(early, late)
        level: dict[Item, int] = {}
        for item in self.items:
            sources = [s for s in self.before[item] if s in level]
            mine = points[item[1]]
            if sources:
                least = max(level[s] + (s[1] != item[1]) for s in sources)
                level[item] = min((p for p in mine if p >= least), default=least)
            else:
                level[item] = max((p for p in mine if p <= late[item]), default=late[item])
            mine.add(level[item])
        return level

    def points(self, early: Mapping[Item, int], late: Mapping[Item, int]) -> dict[int, set[int]]:
        """Per placement, the fewest levels such that each op can have one of them."""
        out: dict[int, set[int]] = {place: set() for _, place in self.items}
        last: dict[int, int] = {}
        for item in sorted(self.items, key=lambda i: late[i]):
            if last.get(item[1], -1) < early[item]:
                last[item[1]] = late[item]
                out[item[1]].add(late[item])
        return out


def runs_of_ranks(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Ranks without repetitions, each with how often it comes in a row.

    >>> runs_of_ranks((0, 1, 1, 0))
    [(0, 1), (1, 2), (0, 1)]
    """
    return [(rank, len(list(same))) for rank, same in groupby(ranks)]


def halves(
    graph: Graph,
    nodes: Mapping[int, Node],
    items: Sequence[Item],
    after: Mapping[Item, Sequence[Item]],
    n: int,
) -> list[list[Item]]:
    """The ops of one stage as `n` of as much work each; of about equal cuts, the one that sends least."""
    done = list(accumulate((_flops(graph, nodes[i]) for i, _ in items), initial=0.0))
    position = {item: k for k, item in enumerate(items)}
    sent = [0.0] * (len(items) + 1)
    for k, item in enumerate(items):
        last = max((position[u] for u in after[item] if u in position), default=k)
        size = sum(_bytes(graph, v) for v in nodes[item[0]].outputs)
        for cut in range(k + 1, last + 1):
            sent[cut] += size
    cuts = [0]
    for k in range(1, n):
        allowed = range(min(cuts[-1] + 1, len(items)), len(items) + 1)
        off = {c: abs(done[c] - k * done[-1] / n) for c in allowed}
        near = min(off.values()) + BALANCE * done[-1] / n
        cuts.append(min((c for c in allowed if off[c] <= near), key=lambda c: (sent[c], off[c])))
    return [list(items[a:b]) for a, b in pairwise([*cuts, len(items)])]


def _flops(graph: Graph, node: Node) -> float:
    """What an op computes on one device, those inside it included."""
    inner = sum(_flops(graph, n) for b in node.bodies for n in b.nodes)
    if node.bodies:
        return assumed_trips(node) * inner
    shapes = [graph.operand(x).shape for x in node.inputs]
    op = op_of(graph, node, shapes, [graph.values[v].shape for v in node.outputs], 1)
    rule = node.rule
    return element_flops(op) if rule is None else rule.flops(op)


def _bytes(graph: Graph, v: int) -> float:
    return float(math.prod(graph.values[v].shape) * core.itemsize(graph.values[v].dtype))
