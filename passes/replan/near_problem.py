"""The planning problem of a program around some of its tensors: all that stands further off stays as planned.

One problem serves many questions. What is found is near the plan: a plan that is otherwise far away too may
be better, which only planning the whole again can tell.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from sbp.annotation import Pin, annotate_p
from sbp.passes.chain import Listed
from sbp.passes.explain.targets import Target
from sbp.passes.physical.program import Border, Box, Physical
from sbp.passes.plan.effort import Effort
from sbp.passes.plan.marginals import HeldStates, held_network
from sbp.passes.plan.model import Model
from sbp.passes.plan.network import (
    CostNetwork,
    IndexedNetwork,
    IndexedTable,
    Indices,
    Infeasible,
    Table,
    written_down,
)
from sbp.passes.plan.solve import solve
from sbp.passes.program.graph import Graph, Node, Value, make_node, number_nodes
from sbp.passes.program.views import communication_of
from sbp.signature import NdSbp

REACH = 12
"""Variables that are chosen anew, in edges of the network from what is asked about. An op and a share are one
each: what six ops before and behind a tensor do."""


@dataclass(frozen=True)
class Ban:
    """What a plan must do without.

    Arguments:
      moves: kinds of collectives, each with the value that it must not send.
      communication: kinds, each with the op that must not send so inside.
    """

    moves: frozenset[tuple[str, int]] = frozenset()
    communication: frozenset[tuple[str, int]] = frozenset()

    def __or__(self, other: Ban) -> Ban:
        return Ban(self.moves | other.moves, self.communication | other.communication)


@dataclass(frozen=True)
class NearNetwork:
    """The network of a program in which only some variables are free.

    Arguments:
      network: on the states that are kept; variables and states of those that are free have their numbers.
      states: per variable, its states: all, or the one that a plan has.
    """

    network: CostNetwork
    states: tuple[Indices, ...]

    def whole(self, states: Sequence[int]) -> list[int]:
        """The states of the program's network that some of this one are."""
        return [int(own[k]) for own, k in zip(self.states, states, strict=True)]

    def solve(self, held: HeldStates, effort: Effort) -> tuple[list[int], float] | None:
        """The cheapest states of all variables, and what they cost near; None if none were found in time.

        Arguments:
          held: states of variables that are free.
        """
        with suppress(Infeasible):
            found = solve(held_network(self.network, held), effort=effort)
            if math.isfinite(found.cost):
                return self.whole(found.states), found.cost
        return None


@dataclass
class NearProblem:
    """The planning problem of a program, and the states of its variables that a plan has.

    Arguments:
      s: what is planned, with an annotation that says nothing behind each of the values that are asked about.
      physical: of the plan.
      values: these values.
    """

    s: Listed
    physical: Physical
    values: Sequence[int]
    model: Model = field(init=False)
    network: IndexedNetwork = field(init=False)

    def __post_init__(self) -> None:
        self.model = Model(self.s.candidates, self.s.boundary, self.s.boxings)
        self.network = self.model.build_indexed()

    @cached_property
    def annotations(self) -> Mapping[int, Node]:
        """The annotation behind each value that is asked about."""
        return annotations_of(self.s.graph, dict.fromkeys(self.values))

    @cached_property
    def plan_states(self) -> list[int]:
        """The state that the plan has of every variable; -1 where it does not say."""
        m, p, made = self.model, self.physical, self._makers
        says: list[tuple[int | None, object]] = [
            *zip(m.inputs, p.inputs, strict=True),
            *zip(m.outputs, p.outputs, strict=True),
        ]
        for step, _ in p.walk():
            own = None if isinstance(step, Box) else made.get(next(iter(step.node.outputs), -1))
            if own is None or isinstance(step, Box) or own.primitive is not step.node.primitive:
                continue
            if isinstance(step, Border):
                says += zip(m.ports[own.id], step.inner_signatures, strict=True)
            else:
                says.append((m.nodes.get(own.id), step.strategy))
        # Many variables share one list, which takes long to hash.
        lists = {id(states): states for states in m.states}
        places = {key: {s: k for k, s in enumerate(states)} for key, states in lists.items()}
        now = [-1] * len(m.states)
        for x, what in says:
            if x is not None:
                now[x] = places[id(m.states[x])].get(what, -1)
        return now

    @cached_property
    def _makers(self) -> Mapping[int, Node]:
        """The op that makes each value of the plan's graph; what is asked about has an annotation between."""
        found = self.s.graph.producers()
        return found | {v: found[x] for v, x in self.annotated_values.items()}

    @cached_property
    def annotated_values(self) -> Mapping[int, int]:
        """Per value that is asked about, the one that its annotation reads."""
        return {v: x for v, node in self.annotations.items() for x in node.inputs if isinstance(x, int)}

    def of_values(self, values: Iterable[int]) -> set[int]:
        """The variables that make some values, bring them somewhere, or read them."""
        wanted = {x for v in values for x in (v, self.annotated_values.get(v, v))}
        edges = zip(self.network.edges, self.model.edge_values, strict=True)
        return {x for (i, j, _), v in edges if v in wanted for x in (i, j)}

    def variables_near(self, variables: Iterable[int], reach: int = REACH) -> set[int]:
        """Variables at most so many edges from some."""
        import networkx as nx  # takes long to load

        edges, found = nx.Graph((i, j) for i, j, _ in self.network.edges), set(variables)
        layers = nx.bfs_layers(edges, found.intersection(edges))
        return found.union(*itertools.islice(layers, reach + 1))

    def network_around(self, near: set[int], banned: Ban) -> NearNetwork:
        """The problem of some variables, and of those of which the plan says nothing."""
        free = [now < 0 or x in near for x, now in enumerate(self.plan_states)]
        kept = tuple(
            np.arange(len(states)) if is_free else np.array([now])
            for is_free, states, now in zip(free, self.model.states, self.plan_states, strict=True)
        )
        # What is far off costs what it does, whatever this problem says of it.
        unary = (
            self._unary(x, banned) if is_free else np.zeros(len(self.model.states[x]))
            for x, is_free in enumerate(free)
        )
        edges = (
            (i, j, self._table(table, v, banned))
            for (i, j, table), v in zip(self.network.edges, self.model.edge_values, strict=True)
            if free[i] or free[j]
        )
        return NearNetwork(replace(self.network, unary=tuple(unary), edges=tuple(edges)).dense(kept), kept)

    def _table(self, table: IndexedTable, v: int, banned: Ban) -> IndexedTable:
        """An edge's table; what brings a value by a move that is banned is infinite."""
        kinds = {kind for kind, x in banned.moves if v in (x, self.annotated_values.get(x))}
        if not kinds:
            return table
        boxing = self.model.boxing(v)
        universe, n = boxing.universe, len(boxing.universe)
        out = table.dense()
        for a, row in enumerate(table.rows.tolist()):
            for b, column in enumerate(table.columns.tolist()):
                if math.isfinite(out[a, b]) and row != column % n:
                    path = boxing.path(universe[row], universe[column % n], strict=column >= n)
                    if any(m.kind in kinds for m in path):
                        out[a, b] = np.inf
        return written_down(out)

    @cached_property
    def _ops(self) -> Mapping[int, Node]:
        """The op of a variable."""
        nodes = {node.id: node for node in self.s.graph.walk()}
        return {x: nodes[i] for i, x in self.model.nodes.items()}

    def _unary(self, x: int, banned: Ban) -> Table:
        costs, node = self.network.unary[x], self._ops.get(x)
        kinds = set() if node is None else {k for k, v in banned.communication if v in node.outputs}
        if node is None or not kinds:
            return costs
        graph, hierarchy = self.s.graph, self.physical.placement.shape
        sends = [
            any(t.kind in kinds for t in communication_of(graph, node, strategy.signatures, hierarchy))
            for strategy in self.model.states[x]
        ]
        return np.where(sends, np.inf, costs)

    # What is asked about.

    def variables(self, target: Target) -> list[int]:
        """Those that tell how a target lies."""
        m = self.model
        found = [
            *(m.inputs[i] for i in target.arguments),
            *(x for j in target.results if (x := m.outputs[j]) is not None),
        ]
        return found + [m.nodes[self.annotations[v].id] for v in target.values]

    def state_signatures(self, variable: int) -> Sequence[NdSbp]:
        """Per state of a variable, how its tensor lies: of an op, what its annotation gives."""
        return [s if isinstance(s, tuple) else s.results[0] for s in self.model.states[variable]]

    def signatures(self, target: Target) -> list[NdSbp]:
        """Those that all tensors of a target can have."""
        first, *others = (dict.fromkeys(self.state_signatures(x)) for x in self.variables(target))
        return [nd for nd in first if all(nd in other for other in others)]

    def others(self, target: Target) -> list[NdSbp]:
        """The same without those that they have."""
        now = {target.signatures[0]} if target.values else set(target.signatures)
        return [nd for nd in self.signatures(target) if nd not in now]

    def held_states(self, target: Target, nd: NdSbp) -> HeldStates:
        """The variables of a target, and the states in which it has a signature that all of them can have."""
        return {x: self.state_signatures(x).index(nd) for x in self.variables(target)}


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
            out.append(replace(node, outputs=tuple(fresh.get(v, v) for v in node.outputs), bodies=bodies))
            for v, made in fresh.items():
                pin = {"pin": Pin(held[v], None, None)}
                # Of the same stage as the op: in a pipeline the value stays where it is made.
                annotated = make_node(0, annotate_p, (made,), (v,), pin, node.source)
                out.append(replace(annotated, role=node.role))
        return out

    nodes = number_nodes(inserted(graph.nodes))
    return replace(graph, values=tuple(values), nodes=nodes)


def annotations_of(graph: Graph, held: Mapping[int, object]) -> dict[int, Node]:
    """The annotations that `with_annotations` has put behind some values."""
    producers = graph.producers()
    return {v: producers[v] for v in held}
