"""Which tensors of a program are stacks of its layers: what a scan over layers slices, and all that lies so.

Weights of all layers lie in one tensor, layer by layer along dim 0, and a `lax.scan` inside the loop over
micro-batches runs through them. What comes of such a stack element by element (sums of gradients, the
optimizer's state, the next weights) is one as well. The rules say so: an op takes stacks to a stack if it may
be split along dim 0 of all of them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from sbp.compat import core
from sbp.passes.pipeline.op_placement import loop_of
from sbp.passes.program.control import ports
from sbp.passes.program.graph import Const, Graph, Node, Operand
from sbp.passes.program.views import op_of, rows_of
from sbp.rules.entry import Row
from sbp.signature import B, P, Split

SHAPED = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}
"""Parameters that have the shape of the result."""
MASKED = ("dot_general", "reduce_sum", "reduce_max", "reduce_min")
"""Ops whose body on a shard is the op itself, but for padding, which parts of a stack do not have."""
SUMMED = (P,)
"""What a result may be, of which every part of the layers gives a summand."""


@dataclass(frozen=True)
class LayerStacks:
    """The stacks of a program.

    Arguments:
      layers: how long they are.
      values: their ids, in the program and in the body of its loop over micro-batches.
      rows: per op that takes stacks and is no loop, what it does to them.
      scans: the ids of the scans that slice them.
    """

    layers: int
    values: frozenset[int]
    rows: Mapping[int, Row]
    scans: frozenset[int]


def stacks_of(graph: Graph) -> LayerStacks | None:
    """The stacks of a program with a loop over micro-batches; None if it has no scan over layers."""
    loop = loop_of(graph)
    seeds = [] if loop is None else list(_weights(graph, loop))
    if loop is None or not seeds:
        return None
    sizes: dict[int, float] = {}
    for layers, v in seeds:
        value = graph.values[v]
        sizes[layers] = sizes.get(layers, 0.0) + math.prod(value.shape) * core.itemsize(value.dtype)
    layers = max(sizes, key=lambda n: sizes[n])
    return _Search(graph, loop, layers, {v for n, v in seeds if n == layers}).run()


def _weights(graph: Graph, loop: Node) -> Iterator[tuple[int, int]]:
    """What the scans in a loop slice that is the same for all micro-batches, with their lengths."""
    (body,) = loop.bodies
    n_const, _ = core.scan_counts(loop.params, len(loop.inputs))
    fixed = set(body.inputs[:n_const])
    for node in body.nodes:
        if node.op == "scan":
            consts, carry = core.scan_counts(node.params, len(node.inputs))
            for x in node.inputs[consts + carry :]:
                if not isinstance(x, Const) and x in fixed:
                    yield int(node.params["length"]), x


def layer_params(node: Node, layers: int) -> Mapping[str, Any]:
    """The parameters of an op that gives so many layers of a stack."""
    name = SHAPED.get(node.op)
    return node.params if name is None else {**node.params, name: (layers, *node.params[name][1:])}


@dataclass
class _Search:
    """Adds to the stacks until nothing changes: what an op makes of them, and what it wants beside them."""

    graph: Graph
    loop: Node
    layers: int
    found: set[int]

    def run(self) -> LayerStacks:
        (body,) = self.loop.bodies
        nodes = [*self.graph.nodes, *body.nodes]
        self.offers = {n.id: list(self.rows_of(n)) for n in nodes if not n.bodies}
        before = -1
        while before != (before := len(self.found)):
            for node in nodes:
                self.visit(node)
        rows = {n.id: row for n in nodes if not n.bodies and (row := self.row(n)) is not None}
        return LayerStacks(
            self.layers, frozenset(self.found), rows, frozenset(n.id for n in nodes if self.cut(n))
        )

    def visit(self, node: Node) -> None:
        """Adds what is a stack since something else of an op is."""
        if node is self.loop:
            for group in self.tied_values():
                if not self.found.isdisjoint(group):
                    self.found.update(group)
        elif self.cut(node):
            self.found.update(self.sliced_values(node))
        elif not node.bodies and (row := self.row(node)) is not None:
            self.found.update(_split(node.inputs, row.operands), _split(node.outputs, row.results))

    def tied_values(self) -> Iterator[set[int]]:
        """Values outside and inside of the loop over micro-batches that are one."""
        for port in ports(self.loop):
            if not port.stacked:
                outer = [self.loop.inputs[port.operand]] if port.operand is not None else []
                outer += [self.loop.outputs[port.result]] if port.result is not None else []
                yield {x for x in (*outer, *port.enters, *port.leaves) if not isinstance(x, Const)}

    def sliced_values(self, scan: Node) -> list[int]:
        """What a scan slices, and what it stacks."""
        consts, carry = core.scan_counts(scan.params, len(scan.inputs))
        ins = [x for x in scan.inputs[consts + carry :] if not isinstance(x, Const)]
        return [*ins, *scan.outputs[carry:]]

    def cut(self, node: Node) -> bool:
        """Whether an op is a scan through stacks."""
        if node.op != "scan" or node is self.loop or node.params["length"] != self.layers:
            return False
        return not self.found.isdisjoint(self.sliced_values(node))

    def row(self, node: Node) -> Row | None:
        """What an op does to the stacks that it takes or gives; None if it takes them whole."""
        ins = {i for i, x in enumerate(node.inputs) if not isinstance(x, Const) and x in self.found}
        outs = {i for i, v in enumerate(node.outputs) if v in self.found}
        if not ins and not outs:
            return None
        for row in self.offers[node.id]:
            taken = all(row.operands[i] == Split(0) for i in ins)
            if taken and all(row.results[i] == Split(0) for i in outs):
                return row
        return None

    def rows_of(self, node: Node) -> Iterator[Row]:
        """What an op can do to stacks of so many layers: those that give stacks first."""
        if node.rule is None or node.rule.communication is not None:
            return
        ins = [self.graph.operand(x).shape for x in node.inputs]
        outs = [self.graph.values[v].shape for v in node.outputs]
        if not any(s[:1] == (self.layers,) for s in (*ins, *outs)):
            return
        rows = [r for r in rows_of(node, op_of(self.graph, node, ins, outs, 2)) if self.legal(r, ins, outs)]
        rows.sort(key=lambda r: sum(s != Split(0) for s in r.results))
        yield from (r for r in rows if self.possible(node, r))

    def legal(self, row: Row, ins: Sequence[tuple[int, ...]], outs: Sequence[tuple[int, ...]]) -> bool:
        """Whether a row splits layers and nothing else."""
        pairs = [*zip(row.operands, ins, strict=True), *zip(row.results, outs, strict=True)]
        layers = all(shape[:1] == (self.layers,) for s, shape in pairs if s == Split(0))
        plain = all(s in (Split(0), B) for s in row.operands)
        return layers and plain and all(s in (Split(0), *SUMMED) for s in row.results)

    def possible(self, node: Node, row: Row) -> bool:
        """Whether the op can be had of one layer alone: its parameters may say more of shapes."""
        assert node.rule is not None
        if node.rule.body is not None and node.op not in (*SHAPED, *MASKED):
            return False
        if node.rule.pointwise:
            return True
        ins = [self.graph.operand(x) for x in node.inputs]
        given = [core.struct(_shape(x.shape, s, 1), x.dtype) for x, s in zip(ins, row.operands, strict=True)]
        try:
            made = jax.eval_shape(
                lambda *xs: core.bind(node.primitive, xs, dict(layer_params(node, 1))), *given
            )
        except (TypeError, ValueError):
            return False
        outs = [self.graph.values[v].shape for v in node.outputs]
        wanted = [_shape(shape, s, 1) for shape, s in zip(outs, row.results, strict=True)]
        return [x.shape for x in made] == wanted


def _shape(shape: tuple[int, ...], s: object, layers: int) -> tuple[int, ...]:
    return (layers, *shape[1:]) if s == Split(0) else shape


def _split(operands: Sequence[Operand], signatures: Sequence[object]) -> set[int]:
    return {
        x for x, s in zip(operands, signatures, strict=True) if s == Split(0) and not isinstance(x, Const)
    }
