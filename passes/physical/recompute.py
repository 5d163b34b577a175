"""A program in which some ops run again: what they make is not kept for its later uses.

Each copy of an op stands before the first op that needs it; copies that are needed by one op are a group.
What a group reads from before goes through one optimization barrier, together with a value that is made
right before it is needed: XLA would otherwise find that the copy computes what is there already, or run it
early and keep it. Copies are ops like any others from here on, and ops of the plain program keep their ids.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from sbp.compat import core
from sbp.passes.plan.candidates import Candidates, Strategy
from sbp.passes.plan.clusters import Cluster, op_count
from sbp.passes.plan.live_ranges import is_cut, is_plain
from sbp.passes.plan.model import ChosenSignatures
from sbp.passes.plan.traffic import OpTraffic
from sbp.passes.program.graph import Const, Node, Operand, Value, make_node
from sbp.passes.program.trace import prune
from sbp.rules import Row
from sbp.signature import NdSbp

_HELD = OpTraffic((0,), (False,))
"""A barrier moves nothing."""


@dataclass(frozen=True)
class WithCopies:
    """A program with the copies of its ops.

    Arguments:
      candidates, assignment: of the program with the copies; `assignment.recomputed` is as it was.
      anchors: per barrier of a group of copies, the value that it waits for.
    """

    candidates: Candidates
    assignment: ChosenSignatures
    anchors: dict[int, int]


def with_copies(candidates: Candidates, assignment: ChosenSignatures) -> WithCopies:
    """The program in which every value of `assignment.recomputed` is made again for its later uses."""
    if not assignment.recomputed:
        return WithCopies(candidates, assignment, {})
    return _Copying(candidates, assignment).run()


class _Copying:
    """Walks the ops in order and puts copies before the first op that needs them.

    `again` has what stands for each recomputed value, `strategies` and `traffic` those of the new ops,
    `through` the barriers that each copy reads through, `group` what went through the barrier at hand, `spot`
    what its copies compute where they read it, made by `light`.
    """

    def __init__(self, c: Candidates, a: ChosenSignatures) -> None:
        self.c, self.a, self.graph = c, a, c.graph
        self.first = op_count(c.graph)
        self.values = list(c.graph.values)
        self.origin = list(range(len(self.values)))
        self.nodes: list[Node] = []
        self.again: dict[int, int] = {}
        self.strategies: dict[int, Strategy] = {}
        self.traffic: dict[int, OpTraffic] = {}
        self.through: dict[int, set[int]] = {}
        self.group: dict[tuple[int, NdSbp, bool], Node] = {}
        self.spot: dict[int, int] = {}
        self.light: list[Node] = []
        self.written = {life.value for life in c.lives}
        self.inputs = dict(zip(c.graph.inputs, a.inputs, strict=True))
        self.anchors: dict[int, int] = {}
        self.ids = itertools.count(2 * self.first)
        self.barriers = itertools.count(1 + max((n.barrier for n in c.graph.walk()), default=0))
        self.makers = {v: n for n in c.graph.nodes for v in n.outputs}
        self.place = {n.id: i for i, n in enumerate(c.graph.nodes)}

    def run(self) -> WithCopies:
        a, c = self.a, self.c
        for node in self.graph.nodes:
            needed = [x for x in node.inputs if self.is_later(x, node.id)]
            self.copy([x for x in needed if x not in self.again], node)
            renamed = (self.again[x] if self.is_later(x, node.id) else x for x in node.inputs)
            self.nodes.append(replace(node, inputs=tuple(renamed)) if needed else node)
        graph = replace(self.graph, values=tuple(self.values), nodes=tuple(self.nodes))
        # What is used later only is made then only.
        waiting = (*graph.outputs, *(v for n in self.nodes if n.barrier in self.anchors for v in n.outputs))
        graph = replace(prune(replace(graph, outputs=waiting)), outputs=graph.outputs)
        added = range(len(self.graph.values), len(self.values))
        candidates = replace(
            c,
            graph=graph,
            partials={**c.partials, **{v: c.partials[self.origin[v]] for v in added}},
            dims={**c.dims, **{v: c.dims[self.origin[v]] for v in added}},
            strategies={**c.strategies, **{i: (s,) for i, s in self.strategies.items()}},
            traffic={**c.traffic, **self.traffic},
        )
        # What the search lets run again for nothing, and nobody needs, has no copy.
        copied = {self.again[v]: r for v, r in a.recomputed.items() if v in self.again}
        shares = {v: r.share for v, r in copied.items() if r.share is not None}
        clusters = {v: r.clusters for v, r in copied.items() if r.clusters}
        near = {v: tuple(map(self.behind_barrier, own)) for v, own in {**a.clusters, **clusters}.items()}
        chosen = replace(
            a,
            strategies={**a.strategies, **self.strategies},
            shares={**a.shares, **shares},
            clusters=near,
        )
        return WithCopies(candidates, chosen, self.anchors)

    def is_later(self, x: Operand, node: int) -> TypeGuard[int]:
        """Whether a node uses what is made the second time."""
        return not isinstance(x, Const) and x in self.a.recomputed and node in self.a.recomputed[x].users

    def behind_barrier(self, cluster: Cluster) -> Cluster:
        """A cluster whose copies read through barriers."""
        users = {u for user in cluster.users for u in (user, *self.through.get(user, ()))}
        return replace(cluster, users=frozenset(users))

    def copy(self, values: Sequence[int | Const], user: Node) -> None:
        """Makes values again, and all that they are made of and that is not there."""
        wanted = self.missing_values(values)
        if not wanted:
            return
        makers = sorted((self.makers[v] for v in wanted), key=lambda n: self.place[n.id])
        barrier, self.group, self.spot, self.light = next(self.barriers), {}, {}, []
        # The barrier stands before all copies of its group.
        made = [self.copy_of(node, barrier, user) for node in makers]
        anchor = self.anchor(user, makers)
        if anchor is not None and self.group:
            self.anchors[barrier] = anchor
            maker = self.makers[anchor]
            nd = self.a.strategies[maker.id].results[maker.outputs.index(anchor)]
            self.hold(anchor, nd, False, barrier, user)
        self.nodes.extend((*self.light, *made))

    def missing_values(self, values: Sequence[int | Const]) -> set[int]:
        """Recomputed values that are not there yet, those that others are made of too."""
        found = set[int]()
        left = [v for v in values if not isinstance(v, Const)]
        while left:
            v = left.pop()
            if v in found or v in self.again:
                continue
            found.add(v)
            left += [x for x in self.makers[v].inputs if not isinstance(x, Const) and x in self.a.recomputed]
        return found

    def copy_of(self, node: Node, barrier: int, user: Node) -> Node:
        """An op that runs again for another."""
        strategy, own = self.a.recomputed[node.outputs[0]].strategy, self.first + node.id
        self.through[own] = set()
        inputs = self.operands(node, strategy, own, barrier, user)
        self.again[node.outputs[0]] = self.value(node.outputs[0])
        self.strategies[own] = strategy
        if node.id in self.c.traffic:
            self.traffic[own] = self.c.traffic[node.id]
        outputs = (self.again[node.outputs[0]],)
        return replace(node, id=own, inputs=inputs, outputs=outputs, role=user.role.of_copy)

    def operands(
        self, node: Node, strategy: Strategy, own: int, barrier: int, user: Node
    ) -> tuple[Operand, ...]:
        """What an op that runs again reads: what is made again too, or what has gone through the barrier."""
        inputs = list[Operand]()
        for x, nd, strict in zip(node.inputs, strategy.operands, strategy.strict, strict=True):
            if isinstance(x, Const):
                inputs.append(x)
            elif x in self.a.recomputed:
                inputs.append(self.again[x])
            elif self.is_on_the_spot(x, nd):
                inputs.append(self.on_the_spot(x, barrier, user))
            else:
                held = self.hold(x, nd, strict, barrier, user)
                inputs.append(held.outputs[0])
                self.through.setdefault(own, set()).add(held.id)
        return tuple(inputs)

    def is_on_the_spot(self, x: int, wanted: NdSbp) -> bool:
        """Whether a value is computed where it is read: a mask, a row that is repeated, the last product of a
        norm. In the barrier it would be written, and kept until then, beside what it is made of."""
        node = self.makers.get(x)
        if node is None or x in self.written or x in self.a.recomputed or not is_plain(node):
            return False
        strategy = self.a.strategies[node.id]
        made = strategy.results[0]
        # What is sent to get to its share lies in memory.
        return (
            is_cut(made, self.a.shares.get(x, made))
            and is_cut(made, wanted)
            and all(map(self.is_there, node.inputs, strategy.operands))
        )

    def is_there(self, y: Operand, wanted: NdSbp) -> bool:
        """Whether what is computed on the spot may read an operand: it lies so, or comes by the barrier."""
        if isinstance(y, Const):
            return True
        return self.inputs.get(y, wanted) == wanted and y not in self.a.recomputed

    def on_the_spot(self, x: int, barrier: int, user: Node) -> int:
        """The same, computed for a group."""
        if x not in self.spot:
            node, own, made = self.makers[x], next(self.ids), self.value(x)
            self.spot[x], self.strategies[own] = made, self.a.strategies[node.id]
            if node.id in self.c.traffic:
                self.traffic[own] = self.c.traffic[node.id]
            inputs = self.operands(node, self.strategies[own], own, barrier, user)
            self.light.append(replace(node, id=own, inputs=inputs, outputs=(made,), role=user.role.of_copy))
        return self.spot[x]

    def hold(self, x: int, nd: NdSbp, strict: bool, barrier: int, user: Node) -> Node:
        """What takes a value through the barrier of a group."""
        key = x, nd, strict
        if key not in self.group:
            primitive, made, own = core.barrier_primitive(), (self.value(x),), next(self.ids)
            node = make_node(own, primitive, (x,), made, {}, user.source, barrier=barrier)
            self.group[key] = replace(node, role=user.role.of_copy)
            self.nodes.append(self.group[key])
            rows = tuple(Row((s,), (s,)) for s in nd)
            self.strategies[own], self.traffic[own] = Strategy((nd,), (nd,), (strict,), rows), _HELD
        return self.group[key]

    def anchor(self, user: Node, copied: Sequence[Node]) -> int | None:
        """What is made right before a group is needed: an operand of who needs it, or the last result."""
        late = (max(self.place[n.id] for n in copied) + self.place[user.id]) / 2
        own = (x for x in user.inputs if not isinstance(x, Const) and x in self.makers)
        before = (v for n in reversed(self.nodes) if n.id < self.first for v in n.outputs[:1])
        near = (x for x in own if x not in self.again and self.place[self.makers[x].id] > late)
        at = max(near, key=lambda x: self.place[self.makers[x].id], default=next(before, None))
        return None if at is None or self.makers[at].bodies else at

    def value(self, v: int) -> int:
        """A new value like another."""
        like = self.values[v]
        self.values.append(Value(len(self.values), like.shape, like.dtype, like.name))
        self.origin.append(self.origin[v])
        return len(self.values) - 1
