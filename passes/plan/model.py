"""The planning problem of a program as a cost network: variables, costs, and how to read a solution back.

Variables: one per argument (how it arrives), per op (its N-D signature), per output (how it leaves), and one
*share* variable per value with several uses: what the value is boxed to once, before each use takes it from
there. An output that is the next step's argument shares that argument's variable, so that state comes back
as it came.

Words: docs/glossary.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sbp.compat.untyped import DType
from sbp.layout import allowed_at_rest
from sbp.passes.boxing.paths import Boxing, Boxings
from sbp.passes.plan.candidates import Candidates, Strategy
from sbp.passes.plan.clusters import Cluster, RecomputedValue
from sbp.passes.plan.cost import Shards, local_bytes, seconds_of
from sbp.passes.plan.network import CostNetwork, IndexedNetwork, IndexedTable, Indices, Table, written_down
from sbp.passes.program.control import assumed_trips, ports
from sbp.passes.program.graph import Const, Graph, Node, Operand, Value
from sbp.signature import AUTO_SPLIT, B, NdSbp, Partial, Split


@dataclass(frozen=True, slots=True)
class BoundaryCost:
    """What an argument or a result takes beyond the program: it comes from elsewhere, or goes there.

    Arguments:
      seconds_per_byte: of a device's part.
      whole: dims that must not be split at rest.
      as_it_lies: whether the program takes it under its signature at rest, without boxing: what comes piece
        by piece cannot be boxed as a whole.
    """

    seconds_per_byte: float
    whole: tuple[int, ...] = ()
    as_it_lies: bool = False


@dataclass(frozen=True, slots=True)
class Boundary:
    """What is asked of arguments and results.

    Arguments:
      inputs: per graph input, its signature at rest, or None for AUTO.
      outputs: per output, likewise.
      ties: per output, the position of the input that it comes back as, or None.
      in_costs, out_costs: per input and output, what it takes beyond the program; None, as behind the last
        one, for nothing.
    """

    inputs: tuple[NdSbp | None, ...]
    outputs: tuple[NdSbp | None, ...]
    ties: tuple[int | None, ...]
    in_costs: tuple[BoundaryCost | None, ...] = ()
    out_costs: tuple[BoundaryCost | None, ...] = ()


@dataclass(frozen=True)
class ChosenSignatures:
    """A signature for everything.

    Arguments:
      inputs, outputs: at rest, per graph input and output.
      strategies: per node id.
      ports: per id of a control-flow op, the signature inside of each of its ports.
      shares: per value with several uses, what it is boxed to first.
      clusters: per value that may be boxed anew for later uses, what its uses near each other have. The op
        that runs again in place of node `i` is called `op_count(graph) + i` there.
      recomputed: per value that is made a second time, how.
      seconds, bound: the estimated time, and a proven lower bound on every plan's. Neither has
        the boundary costs: sending to another placement is counted between the placements.
      cheapest_seconds: what the cheapest that was found takes, if it is not this one.
      beyond_seconds: the boundary costs.
    """

    inputs: tuple[NdSbp, ...]
    outputs: tuple[NdSbp, ...]
    strategies: Mapping[int, Strategy]
    ports: Mapping[int, tuple[NdSbp, ...]]
    shares: Mapping[int, NdSbp]
    seconds: float
    bound: float
    clusters: Mapping[int, tuple[Cluster, ...]] = field(default_factory=dict)
    cheapest_seconds: float | None = None
    recomputed: Mapping[int, RecomputedValue] = field(default_factory=dict)
    beyond_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ValueUse:
    """How one variable uses or makes a value: one signature for each of its states.

    An op with three strategies has three states, and wants its first operand under three signatures.

    Arguments:
      variable: which.
      needs, strict: per state, the signature, and whether a sum must come as a sum.
      times: how often per step the place is executed where the demand stands.
      user: the node, or the position of the output (-1 - i).
    """

    variable: int
    needs: tuple[NdSbp, ...]
    strict: tuple[bool, ...]
    times: int
    user: int = 0


class Model:
    """Builds the cost network of a program, and remembers which variable stands for what."""

    def __init__(
        self, candidates: Candidates, boundary: Boundary, boxings: Boxings, *, relaxed: bool = False
    ) -> None:
        self.c, self.boundary, self.boxings, self.relaxed = candidates, boundary, boxings, relaxed
        self.graph: Graph = candidates.graph
        self.unary: list[Table] = []
        self.edges: list[tuple[int, int, IndexedTable]] = []
        self.edge_values: list[int] = []
        self.supply: dict[int, ValueUse] = {}
        self.demand: dict[int, list[ValueUse]] = {}
        self.states: list[Sequence[Any]] = []
        self.tables: dict[Any, IndexedTable] = {}
        self.costs: dict[Any, Table] = {}
        self.shards: Shards = {}
        self.columns: dict[Any, tuple[Any, ...]] = {}
        self.merged: dict[Any, tuple[NdSbp, ...]] = {}

    def variable(self, states: Sequence[Any], cost: Table | None = None) -> int:
        self.states.append(states)
        self.unary.append(np.zeros(len(states)) if cost is None else cost)
        return len(self.states) - 1

    def rest(
        self, wanted: NdSbp | None, value: Value | Const, cost: BoundaryCost | None
    ) -> tuple[NdSbp, ...]:
        """The states of an argument or result."""
        whole = {Split(d) for d in cost.whole} if cost is not None else frozenset[Split]()
        is_open = wanted is None or AUTO_SPLIT in wanted
        key = "rest", wanted, *((value.shape, value.dtype, frozenset(whole)) if is_open else ())
        if key not in self.columns:
            free = allowed_at_rest(wanted, value.shape, value.dtype, self.c.placement)
            self.columns[key] = tuple(nd for nd in free if whole.isdisjoint(nd)) or free
        return self.columns[key]

    def build(self) -> CostNetwork:
        """The network with all of its tables written down."""
        return self.build_indexed().dense()

    def build_indexed(self) -> IndexedNetwork:
        """The network with its tables in terms of those of boxing."""
        values, b = self.graph.values, self.boundary
        costs = (
            *zip(self.graph.inputs, b.in_costs, strict=False),
            *zip(self.graph.outputs, b.out_costs, strict=False),
        )
        self.lying = {v for v, cost in costs if cost is not None and cost.as_it_lies}
        self.inputs: list[int] = []
        for i, (v, wanted) in enumerate(zip(self.graph.inputs, self.boundary.inputs, strict=True)):
            cost = _at(self.boundary.in_costs, i)
            states = self.rest(wanted, values[v], cost)
            self.inputs.append(self.variable(states, self.boundary_costs(cost, v, states)))
            self.supply[v] = ValueUse(self.inputs[-1], states, (), 1)
        self.nodes: dict[int, int] = {}
        self.ports: dict[int, list[int]] = {}
        self.add_nodes(self.graph.nodes, 1)
        self.outputs = [self.add_output(i) for i in range(len(self.graph.outputs))]
        self.shares: dict[int, int] = {}
        self.complete_demand()
        for v, uses in self.demand.items():
            self.connect(v, uses)
        return self.network()

    def complete_demand(self) -> None:
        """Adds to the demand of the program what else there may be."""

    def network(self) -> IndexedNetwork:
        """What is built so far."""
        return IndexedNetwork(tuple(self.unary), tuple(self.edges), self.order())

    def order(self) -> Indices:
        """The variables as the program runs: an argument before its first use, a share after its supplier."""
        place = np.arange(len(self.states), dtype=np.float64)
        arguments = set(self.inputs)
        for v, uses in self.demand.items():
            supply = self.supply[v].variable
            readers = [u.variable for u in uses if u.variable not in arguments]
            if supply in arguments and readers:
                place[supply] = min(readers) - 0.5
        for v, share in self.shares.items():
            place[share] = place[self.supply[v].variable] + 0.25
        return np.argsort(place, kind="stable")

    def add_nodes(self, nodes: Sequence[Node], times: int) -> None:
        for node in nodes:
            if node.bodies:
                self.add_border(node, times)
            else:
                self.add_node(node, times)

    def add_node(self, node: Node, times: int) -> None:
        strategies = self.c.strategies[node.id]
        traffic = self.c.traffic.get(node.id)
        key = id(strategies), times, traffic
        if key not in self.costs:
            seconds = seconds_of(self.graph, node, strategies, self.boxings.network, traffic, self.shards)
            self.costs[key] = times * np.array(seconds)
        variable = self.variable(strategies, self.costs[key])
        self.nodes[node.id] = variable
        for k, v in enumerate(node.outputs):
            self.supply[v] = ValueUse(variable, self.column(strategies, "results", k), (), times)
        for k, x in enumerate(node.inputs):
            needs, strict = self.column(strategies, "operands", k), self.column(strategies, "strict", k)
            self.want(x, ValueUse(variable, needs, strict, times, node.id))

    def column(self, strategies: tuple[Strategy, ...], field: str, k: int) -> tuple[Any, ...]:
        """Entry `k` of a field of every strategy; the same object each time, which `edge` relies on."""
        key = id(strategies), field, k
        if key not in self.columns:
            self.columns[key] = tuple(getattr(s, field)[k] for s in strategies)
        return self.columns[key]

    def want(self, x: Operand, use: ValueUse) -> None:
        """Records a demand; scalars in place need no boxing."""
        if not isinstance(x, Const):
            self.demand.setdefault(x, []).append(use)

    def add_border(self, node: Node, times: int) -> None:
        """A loop or a branch: a variable per port, and its bodies' ops, which run `inside` times."""
        inside = times * assumed_trips(node)
        self.ports[node.id] = []
        for port, states in zip(ports(node), self.c.ports[node.id], strict=True):
            variable = self.variable(states)
            self.ports[node.id].append(variable)
            strict = self.alike(True, len(states))
            outside = tuple(port.outer(nd) for nd in states)
            if port.operand is not None:
                self.want(node.inputs[port.operand], ValueUse(variable, outside, strict, times, node.id))
            if port.result is not None:
                self.supply[node.outputs[port.result]] = ValueUse(variable, outside, (), times)
            for v in port.enters:
                self.supply[v] = ValueUse(variable, states, (), inside)
            for x in port.leaves:
                self.want(x, ValueUse(variable, states, strict, inside, node.id))
        for body in node.bodies:
            self.add_nodes(body.nodes, inside)

    def add_output(self, i: int) -> int | None:
        x, tie = self.graph.outputs[i], self.boundary.ties[i]
        if isinstance(x, Const):
            return None
        if tie is not None:
            variable = self.inputs[tie]
        else:
            cost = _at(self.boundary.out_costs, i)
            rest = self.rest(self.boundary.outputs[i], self.graph.values[x], cost)
            variable = self.variable(rest, self.boundary_costs(cost, x, rest))
        states = tuple(self.states[variable])
        self.want(x, ValueUse(variable, states, self.alike(False, len(states)), 1, -1 - i))
        return variable

    def boundary_costs(self, cost: BoundaryCost | None, v: int, states: Sequence[NdSbp]) -> Table | None:
        """What a value takes beyond the program, however it lies."""
        if cost is None:
            return None
        value, hierarchy = self.graph.values[v], self.c.placement.shape
        parts = [local_bytes(value.shape, value.dtype, nd, hierarchy) for nd in states]
        return cost.seconds_per_byte * np.array(parts)

    def boxing(self, v: int) -> Boxing:
        value = self.graph.values[v]
        return boxing_of(self.boxings, self.c, value.shape, value.dtype, v)

    def connect(self, v: int, uses: list[ValueUse]) -> None:
        """Edges from a value's supplier to its uses, through a share variable if there are several."""
        supply = self.supply[v]
        if len(uses) > 1:
            supply = self.share(v, supply, uses)
            self.shares[v] = supply.variable
        self.serve(v, supply, uses)

    def share(self, v: int, supply: ValueUse, uses: Sequence[ValueUse]) -> ValueUse:
        """A new share variable between a supplier and some uses."""
        states = self.share_signatures(supply, uses, self.c.partials[v])
        share = ValueUse(self.variable(states), states, self.alike(True, len(states)), supply.times)
        self.edge(v, supply, share)
        return share

    def serve(self, v: int, supply: ValueUse, uses: list[ValueUse]) -> None:
        """Edges from a supplier or a share to the uses."""
        for use in uses:
            if self.relaxed and len(uses) > 2:
                self.relaxed_edge(v, supply, use, len(uses) - 1)
            else:
                self.edge(v, supply, use)

    def relaxed_edge(self, v: int, share: ValueUse, use: ValueUse, others: int) -> None:
        """At most what any way of boxing takes: the last move into what is wanted, or its part of that.

        However a value gets to where its uses want it, each version but one (call that the share) is made by
        a move of its own, for at most all of the other uses.
        """
        boxing = self.boxing(v)
        columns = [boxing.index[nd] for nd in use.needs]
        each = np.where(np.eye(len(boxing.universe), dtype=bool), np.inf, boxing.seconds).min(axis=0)
        same = np.array([boxing.index[nd] for nd in share.needs])[:, None] == np.array(columns)[None, :]
        table = np.where(same, 0.0, each[columns][None, :]) * (use.times / others)
        self.add_edge(v, share.variable, use.variable, written_down(table))

    def add_edge(self, v: int, i: int, j: int, table: IndexedTable) -> None:
        """What it takes to bring a value from one variable to another."""
        self.edges.append((i, j, table))
        self.edge_values.append(v)

    def share_signatures(
        self, supply: ValueUse, uses: Sequence[ValueUse], natural: frozenset[str]
    ) -> tuple[NdSbp, ...]:
        """What a value with several uses may be boxed to first: what any of them wants."""
        key = id(supply.needs), natural, *dict.fromkeys(id(u.needs) for u in uses)
        if key not in self.merged:
            every = dict.fromkeys((*supply.needs, *(nd for u in uses for nd in u.needs)))
            self.merged[key] = tuple(
                nd for nd in every if all(s.op in natural for s in nd if isinstance(s, Partial))
            )
        return self.merged[key]

    def alike(self, strict: bool, n: int) -> tuple[bool, ...]:
        """`n` times the same, and the same object for the same `n`."""
        return self.columns.setdefault(("alike", strict, n), (strict,) * n)

    def edge(self, v: int, supply: ValueUse, use: ValueUse) -> None:
        boxing = self.boxing(v)
        # By identity: hashing hundreds of signatures for each edge would take longer than all else here.
        # What `column`, `share_signatures`, `rest` and `alike` did not make is a use's, and lives as long.
        stays = v in self.lying
        key = id(boxing), id(supply.needs), id(use.needs), id(use.strict), use.times, stays
        if key not in self.tables:
            rows = np.array([boxing.index[nd] for nd in supply.needs])
            columns = np.array([boxing.index[nd] for nd in use.needs])
            if stays:
                n = len(boxing.universe)
                self.tables[key] = IndexedTable(np.where(np.eye(n, dtype=bool), 0.0, np.inf), rows, columns)
            else:
                strict = np.array(use.strict, dtype=bool)
                columns = np.where(strict, columns + len(boxing.universe), columns)
                self.tables[key] = IndexedTable(boxing.both, rows, columns, float(use.times))
        self.add_edge(v, supply.variable, use.variable, self.tables[key])

    def chosen_signatures(self, states: Sequence[int], cost: float, bound: float) -> ChosenSignatures:
        """What states of the variables mean."""

        def state(variable: int) -> Any:
            return self.states[variable][states[variable]]

        ends = {x for x in (*self.inputs, *self.outputs) if x is not None}
        sent = float(sum(self.unary[x][states[x]] for x in ends))
        return ChosenSignatures(
            tuple(state(x) for x in self.inputs),
            tuple((B,) * self.c.placement.ndim if x is None else state(x) for x in self.outputs),
            {i: state(x) for i, x in self.nodes.items()},
            {i: tuple(state(x) for x in xs) for i, xs in self.ports.items()},
            {v: state(x) for v, x in self.shares.items()},
            cost - sent,
            max(0.0, bound - sent),
            beyond_seconds=sent,
        )


def _at(costs: Sequence[BoundaryCost | None], i: int) -> BoundaryCost | None:
    return costs[i] if i < len(costs) else None


def boxing_of(boxings: Boxings, c: Candidates, shape: tuple[int, ...], dtype: DType, v: int) -> Boxing:
    """The transitions of a value. Any op may want it as a sum (filled), so the sum is always among them."""
    return boxings.of(shape, dtype, c.partials[v] | {"sum"}, c.dims[v], c.narrower.get(v))
