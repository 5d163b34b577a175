"""A graph for each placement: its ops, the loop over its part of the body, and what is sent and received.

The key idea: each is an ordinary program of one placement. What another placement sends for every
micro-batch is an operand that its loop scans, one slice per trip; what it sends itself is a stacked result of
the loop. So the planner sees forward, backward and optimizer of a stage at once, and how often each runs.
Values keep their ids: a value of one placement has the same id where it is received.

Words: docs/glossary.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sbp.compat import core
from sbp.passes.pipeline.op_placement import OpPlacements, loop_of, reads_of
from sbp.passes.pipeline.order import Order
from sbp.passes.program.control import loop_params
from sbp.passes.program.graph import Body, Const, Graph, Node, Operand, Value, number_nodes


@dataclass(frozen=True)
class Subgraph:
    """What one placement computes.

    Arguments:
      place: its position.
      graph: inputs are `arguments`, `received`, stacks of `fed`, then arrays that the program closes over;
        outputs are `results`, `sent`, stacks of `passed`.
      arguments: positions among the program's inputs.
      closure: likewise, of the arrays.
      results: positions among the program's results.
      receives, sends: values from and for other placements, once.
      micro_receives, micro_sends: likewise, for every micro-batch: values inside the loop.
      stacks: of those, the values outside of the loop that stand for them.
    """

    place: int
    graph: Graph
    arguments: tuple[int, ...]
    closure: tuple[int, ...]
    results: tuple[int, ...]
    receives: tuple[int, ...]
    sends: tuple[int, ...]
    micro_receives: tuple[int, ...]
    micro_sends: tuple[int, ...]
    stacks: Mapping[int, int]


@dataclass(frozen=True)
class Splitter:
    """Makes the graphs of a program that has been placed and ordered.

    Arguments:
      inputs: how many of the graph's inputs are arguments.
    """

    graph: Graph
    where: OpPlacements
    order: Order
    inputs: int

    @property
    def loop(self) -> Node | None:
        """The loop over micro-batches."""
        return loop_of(self.graph)

    def ops_of_place(self, nodes: Iterable[Node], place: int) -> list[Node]:
        """The ops that a placement computes, marked with their parts."""
        return [
            replace(n, role=n.role.of(self.order.parts[n.id, place]))
            for n in nodes
            if place in self.where.nodes[n.id] and (n.id, place) in self.order.parts
        ]

    def loop_inputs(self, place: int) -> list[int]:
        """Values inside the loop that others send to a placement for every micro-batch."""
        if self.loop is None:
            return []
        (body,) = self.loop.bodies
        nodes = self.ops_of_place(body.nodes, place)
        made = {v for n in nodes for v in n.outputs}
        n_const, n_carry = core.scan_counts(self.loop.params, len(self.loop.inputs))
        carried = body.inputs[n_const : n_const + n_carry]
        free = {v for v in body.inputs if v not in carried}
        free |= {v for v in carried if place in self.where.values.get(v, ())}
        reads = dict.fromkeys(x for n in nodes for x in reads_of(n))
        return [x for x in reads if x not in made and x not in free]

    def stacks(self) -> tuple[Graph, dict[int, int]]:
        """The graph with a value for the stack of every value that is sent in the loop, and those values."""
        values, stacks = list(self.graph.values), dict[int, int]()
        for place in range(len(self.where.placements)):
            for v in self.loop_inputs(place):
                if v not in stacks and self.loop is not None:
                    value, length = values[v], int(self.loop.params["length"])
                    stacks[v] = len(values)
                    values.append(Value(len(values), (length, *value.shape), value.dtype, value.name))
        return replace(self.graph, values=tuple(values)), stacks

    def subgraphs(self) -> list[Subgraph]:
        """What every placement computes."""
        graph, stacks = self.stacks()
        places = range(len(self.where.placements))
        fed = {p: self.loop_inputs(p) for p in places}
        read = {p: self.read(p, fed[p]) for p in places}
        return [_Share(self, graph, stacks, fed, read, p).subgraph() for p in places]

    def read(self, place: int, fed: Sequence[int]) -> list[int]:
        """Values outside of the loop that a placement reads, and does not make."""
        nodes = self.ops_of_place(self.graph.nodes, place)
        made = {v for n in nodes for v in n.outputs}
        reads = [x for n in nodes for x in reads_of(n)]
        loop = self.loop
        if loop is not None and place in self.where.nodes[loop.id]:
            wiring = self.wiring_of(place, fed)
            made |= set(wiring.results(loop))
            reads += [x for x in wiring.operands(loop) if not isinstance(x, Const)]
        reads += [
            x for i, x in enumerate(self.graph.outputs) if not isinstance(x, Const) and self.at(i) == place
        ]
        return [x for x in dict.fromkeys(reads) if x not in made]

    def at(self, i: int) -> int:
        """Which placement gives a result."""
        x = self.graph.outputs[i]
        return 0 if isinstance(x, Const) else min(self.where.values.get(x, {0}))

    def wiring_of(self, place: int, fed: Sequence[int]) -> _Wiring:
        """Which operands and results of the loop a placement has."""
        assert self.loop is not None
        loop, (body,) = self.loop, self.loop.bodies
        n_const, n_carry = core.scan_counts(loop.params, len(loop.inputs))
        reads = {x for n in self.ops_of_place(body.nodes, place) for x in reads_of(n)}
        carries = [k for k in range(n_carry) if place in self.where.values.get(body.inputs[n_const + k], ())]
        outs = range(n_carry, len(body.outputs))
        stacked = [t for t in outs if place == min(self.where.values[loop.outputs[t]])]
        ends = {x for t in (*carries, *stacked) if not isinstance(x := body.outputs[t], Const)}
        reads |= ends
        consts = [i for i in range(n_const) if body.inputs[i] in reads]
        scanned = [i for i in range(n_const + n_carry, len(body.inputs)) if body.inputs[i] in reads]
        return _Wiring(tuple(consts), tuple(carries), tuple(scanned), tuple(stacked), n_const)


@dataclass(frozen=True, slots=True)
class _Wiring:
    """Positions at the loop: constants, carried values, scanned operands, stacked results."""

    consts: tuple[int, ...]
    carries: tuple[int, ...]
    scanned: tuple[int, ...]
    stacked: tuple[int, ...]
    n_const: int

    def operand_positions(self) -> list[int]:
        """Positions among the loop's operands."""
        return [*self.consts, *(self.n_const + k for k in self.carries), *self.scanned]

    def operands(self, loop: Node) -> list[Operand]:
        """What enters."""
        return [loop.inputs[i] for i in self.operand_positions()]

    def results(self, loop: Node) -> list[int]:
        """What leaves."""
        return [loop.outputs[k] for k in (*self.carries, *self.stacked)]


@dataclass(frozen=True)
class _Share:
    """Makes the graph of one placement."""

    splitter: Splitter
    graph: Graph
    stacks: Mapping[int, int]
    fed: Mapping[int, Sequence[int]]
    read: Mapping[int, Sequence[int]]
    place: int

    def subgraph(self) -> Subgraph:
        """The subgraph."""
        s, g = self.splitter, self.splitter.graph
        known = {v: i for i, v in enumerate(g.inputs)}
        mine = [known[v] for v in self.read[self.place] if v in known]
        arguments = sorted(i for i in mine if i < s.inputs)
        closed = sorted(i for i in mine if i >= s.inputs)
        received = [v for v in self.read[self.place] if v not in known]
        passed, sent = self.values_for_others(self.fed), self.values_for_others(self.read)
        results = [i for i in range(len(g.outputs)) if s.at(i) == self.place]
        fed = self.fed[self.place]
        nodes = self.nodes(fed, passed)
        inputs = [g.inputs[i] for i in arguments] + received + [self.stacks[v] for v in fed]
        outputs = [g.outputs[i] for i in results] + sent + [self.stacks[v] for v in passed]
        made = Graph(
            self.graph.values,
            (*inputs, *(g.inputs[i] for i in closed)),
            tuple(g.consts[i - s.inputs] for i in closed),
            number_nodes(nodes),
            tuple(outputs),
        )
        both = {v: self.stacks[v] for v in (*fed, *passed)}
        return Subgraph(
            self.place,
            made,
            tuple(arguments),
            tuple(closed),
            tuple(results),
            tuple(received),
            tuple(sent),
            tuple(fed),
            tuple(passed),
            both,
        )

    def values_for_others(self, wanted: Mapping[int, Sequence[int]]) -> list[int]:
        """Values that other placements want of this one."""
        s = self.splitter
        inputs = set(s.graph.inputs)
        asked = dict.fromkeys(v for p, vs in wanted.items() if p != self.place for v in vs)
        return [v for v in asked if v not in inputs and s.where.home(v) == self.place]

    def nodes(self, fed: Sequence[int], passed: Sequence[int]) -> list[Node]:
        """The ops, with the loop where it was."""
        s, out = self.splitter, list[Node]()
        for node in s.graph.nodes:
            if node is s.loop and self.place in s.where.nodes[node.id]:
                out.append(self.loop_over(node, fed, passed))
            elif node is not s.loop:
                out += s.ops_of_place([node], self.place)
        return out

    def loop_over(self, loop: Node, fed: Sequence[int], passed: Sequence[int]) -> Node:
        """The loop over this placement's part of the body."""
        s, (body,) = self.splitter, loop.bodies
        w = s.wiring_of(self.place, fed)
        nodes = s.ops_of_place(body.nodes, self.place)
        inside = Body(
            (*(body.inputs[i] for i in w.operand_positions()), *fed),
            tuple(nodes),
            (*(body.outputs[k] for k in (*w.carries, *w.stacked)), *passed),
        )
        node = replace(
            loop,
            inputs=(*w.operands(loop), *(self.stacks[v] for v in fed)),
            outputs=(*w.results(loop), *(self.stacks[v] for v in passed)),
            bodies=(inside,),
            params=loop_params(loop.params, len(w.consts), len(w.carries)),
        )
        return replace(node, role=node.role.of(s.order.loop[self.place]))
