"""The planning problem of a program around some of its tensors: all that stands further off stays as planned.

One problem serves many questions. What is found is near the plan: a plan that is otherwise far away too may
be better, which only planning the whole again can tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from sbp.annotation import Pin, annotate_p
from sbp.passes.chain import Listed
from sbp.passes.explain.targets import Target
from sbp.passes.physical.program import Border, Flow, Physical
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.marginals import HeldStates
from sbp.passes.plan.model import Boundary, Model
from sbp.passes.plan.network import CostNetwork, IndexedNetwork, IndexedTable, Infeasible, Table
from sbp.passes.plan.solve import solve
from sbp.passes.program.control import ports
from sbp.passes.program.graph import Graph, Node, Value, make_node, numbered
from sbp.passes.program.views import communication_of
from sbp.signature import NdSbp

REACH = 12
"""Variables that are chosen anew, in edges of the network from what is asked about. An op and a share are one
each: what six ops before and behind a tensor do."""


@dataclass(frozen=True)
class Banned:
    """What a plan must do without.

    Arguments:
      moves: kinds of collectives, each with the value that it must not send.
      communication: kinds, each with the op that must not send so inside.
    """

    moves: frozenset[tuple[str, int]] = frozenset()
    communication: frozenset[tuple[str, int]] = frozenset()

    def __or__(self, other: Banned) -> Banned:
        return Banned(self.moves | other.moves, self.communication | other.communication)


@dataclass(frozen=True)
class Around:
    """A part of a network whose other variables have their states.

    Arguments:
      variables: of the whole network, those that are free.
      network: of these.
      states: of the whole network, by variable; of those that are free anything.
    """

    variables: tuple[int, ...]
    network: CostNetwork
    states: tuple[int, ...]

    def held(self, states: HeldStates) -> HeldStates:
        """States of variables of the whole network as those of this one."""
        position = {x: k for k, x in enumerate(self.variables)}
        return {position[x]: state for x, state in states.items()}

    def whole(self, own: Sequence[int]) -> list[int]:
        """All states, of those of the free variables."""
        found = list(self.states)
        for x, state in zip(self.variables, own, strict=True):
            found[x] = state
        return found

    def solved(self, held: HeldStates, effort: Effort) -> tuple[list[int], float]:
        """The cheapest states of all variables, and what those that are free cost.

        Arguments:
          held: states of variables of the whole network.

        Raises:
          Infeasible: if there are none, or none was found in time.
        """
        unary = list(self.network.unary)
        for x, state in self.held(held).items():
            unary[x] = np.where(np.arange(unary[x].size) == state, unary[x], np.inf)
        found = solve(CostNetwork(tuple(unary), self.network.edges), effort=effort)
        if not math.isfinite(found.cost):
            raise Infeasible
        return self.whole(found.states), found.cost


@dataclass
class NearProblem:
    """The planning problem of a program, and the states of its variables that a plan has.

    Arguments:
      s: what is planned, with an annotation that says nothing behind each of the values that are asked about.
      physical: of the plan.
      boundary: what is asked of arguments and results.
      watched: these values.
    """

    s: Listed
    physical: Physical
    boundary: Boundary
    watched: Sequence[int]
    model: Model = field(init=False)
    indexed: IndexedNetwork = field(init=False)

    def __post_init__(self) -> None:
        self.model = Model(self.s.candidates, self.boundary, self.s.boxings)
        self.indexed = self.model.build_indexed()

    @cached_property
    def annotations(self) -> Mapping[int, Node]:
        """The annotation behind each value that is asked about."""
        return annotations_of(self.s.graph, dict.fromkeys(self.watched))

    @cached_property
    def _now(self) -> list[int]:
        """The state that the plan has of every variable; -1 where it does not say."""
        now = [-1] * len(self.model.states)
        places: dict[int, dict[object, int]] = {}

        def put(x: int | None, what: object) -> None:
            if x is not None:
                states = self.model.states[x]
                # Many variables share one list, which takes long to hash.
                at = places.setdefault(id(states), {s: k for k, s in enumerate(states)})
                now[x] = at.get(what, -1)

        p = self.physical
        for x, nd in zip(self.model.inputs, p.inputs, strict=True):
            put(x, nd)
        for out, nd in zip(self.model.outputs, p.outputs, strict=True):
            put(out, nd)
        flow, made = Flow(p), self._makers
        for node, strategy in flow.computed.values():
            own = made.get(node.outputs[0]) if node.outputs else None
            if own is not None and own.primitive is node.primitive:
                put(self.model.nodes.get(own.id), strategy)
        for step, _ in p.walk():
            if isinstance(step, Border) and step.node.outputs:
                own = made.get(step.node.outputs[0])
                listed = self.model.ports.get(-1 if own is None else own.id, ())
                for x, nd in zip(listed, step.inside, strict=False):
                    put(x, nd)
        return now

    @cached_property
    def _makers(self) -> Mapping[int, Node]:
        """The op that makes each value of the plan's graph; what is asked about has an annotation between."""
        found = dict(self.s.graph.producers())
        for node in self.s.graph.walk():
            for port in ports(node) if node.bodies else ():
                if port.result is not None:
                    found.setdefault(node.outputs[port.result], node)
        for v, node in self.annotations.items():
            (x,) = node.inputs
            if isinstance(x, int) and x in found:
                found[v] = found[x]
        return found

    @cached_property
    def _beside(self) -> Mapping[int, Sequence[int]]:
        """Per variable, those that it has an edge with."""
        found: dict[int, list[int]] = {}
        for i, j, _ in self.indexed.edges:
            found.setdefault(i, []).append(j)
            found.setdefault(j, []).append(i)
        return found

    def of_values(self, values: Iterable[int]) -> set[int]:
        """The variables that make some values, bring them somewhere, or read them."""
        wanted = set(values)
        for v in list(wanted):
            if v in self.annotations:
                wanted |= {x for x in self.annotations[v].inputs if isinstance(x, int)}
        edges = zip(self.indexed.edges, self.model.edge_values, strict=True)
        return {x for (i, j, _), v in edges if v in wanted for x in (i, j)}

    def near(self, variables: Iterable[int], reach: int = REACH) -> set[int]:
        """Variables at most so many edges from some."""
        found = set(variables)
        edge = set(found)
        for _ in range(reach):
            edge = {y for x in edge for y in self._beside.get(x, ())} - found
            found |= edge
        return found

    def now(self, variable: int) -> int:
        """The state that the plan has of a variable; -1 where it does not say."""
        return self._now[variable]

    def around(self, near: set[int], banned: Banned) -> Around:
        """The problem of some variables, and of those of which the plan says nothing."""
        now = self._now
        free = [x for x in range(len(now)) if now[x] < 0 or x in near]
        position = {x: k for k, x in enumerate(free)}
        unary = {x: self._unary(x, banned) for x in free}
        edges = list[tuple[int, int, Table]]()
        for (i, j, table), v in zip(self.indexed.edges, self.model.edge_values, strict=True):
            if i not in position and j not in position:
                continue
            dense = self._table(table, v, banned)
            if i in position and j in position:
                edges.append((position[i], position[j], dense))
            elif i in position:
                unary[i] = unary[i] + dense[:, now[j]]
            else:
                unary[j] = unary[j] + dense[now[i], :]
        network = CostNetwork(tuple(unary[x] for x in free), tuple(edges))
        return Around(tuple(free), network, tuple(now))

    @cached_property
    def _dense(self) -> dict[int, Table]:
        """Tables written down, by the id of what they are written of."""
        return {}

    def _table(self, table: IndexedTable, v: int, banned: Banned) -> Table:
        """An edge's table; what brings a value by a move that is banned is infinite."""
        known = self._dense
        if id(table) not in known:
            known[id(table)] = table.dense()
        kinds = {kind for kind, x in banned.moves if x == v or self._same(x, v)}
        if not kinds:
            return known[id(table)]
        boxing = self.model.boxing(v)
        universe, n = boxing.universe, len(boxing.universe)
        out = known[id(table)].copy()
        for a, row in enumerate(table.rows.tolist()):
            for b, column in enumerate(table.columns.tolist()):
                if math.isfinite(out[a, b]) and row != column % n:
                    path = boxing.path(universe[row], universe[column % n], strict=column >= n)
                    if any(m.kind in kinds for m in path):
                        out[a, b] = np.inf
        return out

    def _same(self, v: int, x: int) -> bool:
        """Whether a value is another before its annotation."""
        return v in self.annotations and x in self.annotations[v].inputs

    @cached_property
    def _ops(self) -> Mapping[int, Node]:
        """The op of a variable."""
        nodes = {node.id: node for node in self.s.graph.walk()}
        return {x: nodes[i] for i, x in self.model.nodes.items()}

    def _unary(self, x: int, banned: Banned) -> Table:
        costs, node = self.indexed.unary[x], self._ops.get(x)
        kinds = set() if node is None else {k for k, v in banned.communication if v in node.outputs}
        if node is None or not kinds:
            return costs
        graph, hierarchy = self.s.graph, self.physical.placement.shape
        sends = [
            any(t.kind in kinds for t in communication_of(graph, node, strategy.lying, hierarchy))
            for strategy in self.model.states[x]
        ]
        return np.where(sends, np.inf, costs)

    # What is asked about.

    def variables(self, target: Target) -> list[int]:
        """Those that tell how a target lies."""
        m = self.model
        found = [m.inputs[i] for i in target.arguments]
        found += [x for j in target.results if (x := m.outputs[j]) is not None]
        return found + [m.nodes[self.annotations[v].id] for v in target.values]

    def lying(self, variable: int) -> Sequence[NdSbp]:
        """Per state of a variable, how its tensor lies: of an op, what its annotation gives."""
        states = self.model.states[variable]
        return [s if isinstance(s, tuple) else s.results[0] for s in states]

    def signatures(self, target: Target) -> list[NdSbp]:
        """Those that all tensors of a target can have."""
        first, *others = (dict.fromkeys(self.lying(x)) for x in self.variables(target))
        return [nd for nd in first if all(nd in other for other in others)]

    def others(self, target: Target) -> list[NdSbp]:
        """The same without those that they have."""
        now = {target.signatures[0]} if target.values else set(target.signatures)
        return [nd for nd in self.signatures(target) if nd not in now]

    def held(self, target: Target, nd: NdSbp) -> HeldStates:
        """The variables of a target, and the states in which it has a signature that all of them can have."""
        return {x: self.lying(x).index(nd) for x in self.variables(target)}


def with_annotations(graph: Graph, held: Mapping[int, NdSbp | None]) -> Graph:
    """The graph with an annotation behind the ops that make some values.

    The op makes a new value, and the annotation makes the old one of it: whoever reads that, reads what is
    annotated, and ids of values keep their meaning.

    Arguments:
      held: by value, which an op must make; a signature, or None for any: then the annotation has a variable
        of its own in the search, which tells how the value lies.
    """
    values = list(graph.values)

    def inserted(nodes: Sequence[Node]) -> list[Node]:
        out: list[Node] = []
        for node in nodes:
            bodies = tuple(replace(b, nodes=tuple(inserted(b.nodes))) for b in node.bodies)
            fresh: dict[int, int] = {}
            for v in node.outputs:
                if v in held:
                    fresh[v] = len(values)
                    values.append(Value(len(values), values[v].shape, values[v].dtype, values[v].name))
            outputs = tuple(fresh.get(v, v) for v in node.outputs)
            out.append(replace(node, outputs=outputs, bodies=bodies))
            for v, made in fresh.items():
                pin = {"pin": Pin(held[v], None, None)}
                # Of the same stage as the op: in a pipeline the value stays where it is made.
                annotated = make_node(0, annotate_p, (made,), (v,), pin, node.source)
                out.append(replace(annotated, role=node.role))
        return out

    nodes = numbered(inserted(graph.nodes))
    return replace(graph, values=tuple(values), nodes=nodes)


def annotations_of(graph: Graph, held: Mapping[int, object]) -> dict[int, Node]:
    """The annotations that `with_annotations` has put behind some values."""
    producers = graph.producers()
    return {v: producers[v] for v in held}
