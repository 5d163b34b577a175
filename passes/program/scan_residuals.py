"""Keeps results that `jax.checkpoint` in a scan over layers drops, so that fewer ops run twice.

A scan over checkpointed layers keeps the input of each; its transpose computes the layer again. Where memory
allows, the forward scan stacks results of products and the other one reads them, and computes neither them
nor the ops that only they needed. The recomputed values are found by value numbering: the same ops of the
same operands, layer by layer. Results stay the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from sbp.compat import core
from sbp.passes.program.control import loop_params
from sbp.passes.program.duplicates import exact, op_key
from sbp.passes.program.graph import Body, Const, Graph, Node, Operand, Value, number_nodes, used_nodes
from sbp.passes.program.views import op_of


@dataclass(frozen=True, slots=True)
class RecomputedScan:
    """A result that a scan over layers makes, and its transpose again.

    Arguments:
      first, again: the values in both bodies.
      held_bytes: of all layers together.
      maker, flops: the op that makes it again, and its arithmetic in one layer.
    """

    first: int
    again: int
    held_bytes: float
    maker: int
    flops: float


@dataclass(frozen=True)
class ScanPair:
    """A scan over layers, and the scan that computes its layers again.

    Arguments:
      forward, backward: both, in the same graph or body.
      twice: results of products and the like, in the order in which they are made.
    """

    forward: Node
    backward: Node
    twice: tuple[RecomputedScan, ...]

    def choose_residuals(self, share: float) -> tuple[RecomputedScan, ...]:
        """The results that save most arithmetic within a share of the bytes; of equal ones the first.

        All results of an op are kept, or none: else it runs again.
        """
        most = share * sum(t.held_bytes for t in self.twice) * (1 + 1e-9)
        best = [_Choice()]
        for _, results in itertools.groupby(self.twice, lambda t: t.maker):
            one = tuple(results)
            best = _undominated([*best, *(x for c in best if (x := c.with_op(one)).held_bytes <= most)])
        return best[-1].kept


MOST_CHOICES = 1024
"""That are carried on from op to op."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """A choice of results to keep, its bytes, and the arithmetic that it saves."""

    held_bytes: float = 0.0
    flops: float = 0.0
    kept: tuple[RecomputedScan, ...] = ()

    def with_op(self, results: tuple[RecomputedScan, ...]) -> _Choice:
        """The same with the results of one more op."""
        held = self.held_bytes + sum(t.held_bytes for t in results)
        return _Choice(held, self.flops + results[0].flops, (*self.kept, *results))


def _undominated(choices: Iterable[_Choice]) -> list[_Choice]:
    """Choices by their bytes, without those that save no more than one with no more bytes."""
    found = list[_Choice]()
    for choice in sorted(choices, key=lambda x: (x.held_bytes, -x.flops)):
        if not found or choice.flops > found[-1].flops:
            found.append(choice)
    step = -(-len(found) // MOST_CHOICES)
    return found[::-step][::-1]


def keep_in_scans(graph: Graph, share: float) -> Graph:
    """The graph in which scans keep a share of what their transposes compute again.

    Arguments:
      share: 0 for what the model says, 1 for the results of all products.
    """
    if share <= 0:
        return graph
    values = list(graph.values)
    nodes = _kept(graph, graph.nodes, values, share)
    return replace(graph, values=tuple(values), nodes=number_nodes(nodes))


def computes_twice(graph: Graph) -> bool:
    """Whether a scan computes something again that could be kept."""
    return any(pair.twice for nodes in _levels(graph.nodes) for pair in scan_pairs(graph, nodes))


def _levels(nodes: Sequence[Node]) -> Iterator[Sequence[Node]]:
    yield nodes
    for n in nodes:
        for body in n.bodies:
            yield from _levels(body.nodes)


def _kept(graph: Graph, nodes: Sequence[Node], values: list[Value], share: float) -> list[Node]:
    """The ops of a graph or a body, and of the bodies inside, with more kept."""
    new: dict[int, Node] = {}
    for pair in scan_pairs(graph, nodes):
        if chosen := pair.choose_residuals(share):
            one, other = (new.get(n.id, n) for n in (pair.forward, pair.backward))
            new[one.id], new[other.id] = _keeping(one, other, chosen, values)
    out = []
    for n in nodes:
        bodies = n.bodies if n.id in new else tuple(_inside(graph, b, values, share) for b in n.bodies)
        out.append(new.get(n.id) or replace(n, bodies=bodies))
    return out


def _inside(graph: Graph, body: Body, values: list[Value], share: float) -> Body:
    return replace(body, nodes=tuple(_kept(graph, body.nodes, values, share)))


def _keeping(
    forward: Node, backward: Node, chosen: Sequence[RecomputedScan], values: list[Value]
) -> tuple[Node, Node]:
    """Both scans: one stacks the chosen results, the other reads them."""
    length = int(forward.params["length"])
    counts = [core.scan_counts(n.params, len(n.inputs)) for n in (forward, backward)]

    def value(like: Value, shape: tuple[int, ...]) -> int:
        values.append(Value(len(values), shape, like.dtype, like.name))
        return len(values) - 1

    stacks = [value(values[t.first], (length, *values[t.first].shape)) for t in chosen]
    (ahead,), (back,) = forward.bodies, backward.bodies
    ahead = replace(ahead, outputs=(*ahead.outputs, *(t.first for t in chosen)))
    read = {t.again: value(values[t.again], values[t.again].shape) for t in chosen}
    nodes = tuple(_renamed(n, read) for n in back.nodes)
    back = Body((*back.inputs, *read.values()), nodes, tuple(_read(x, read) for x in back.outputs))
    return (
        replace(
            forward,
            outputs=(*forward.outputs, *stacks),
            bodies=(ahead,),
            params=loop_params(forward.params, *counts[0]),
        ),
        replace(
            backward,
            inputs=(*backward.inputs, *stacks),
            bodies=(replace(back, nodes=used_nodes(back.nodes, back.outputs)),),
            params=loop_params(backward.params, *counts[1]),
        ),
    )


def _read(x: Operand, new: Mapping[int, int]) -> Operand:
    return x if isinstance(x, Const) else new.get(x, x)


def _renamed(node: Node, new: Mapping[int, int]) -> Node:
    """An op that reads other values, also where its own bodies pass them on."""
    return replace(node, inputs=tuple(_read(x, new) for x in node.inputs))


# -- what is computed again


def scan_pairs(graph: Graph, nodes: Sequence[Node]) -> Iterator[ScanPair]:
    """The scans of a graph or a body whose layers another scan computes again."""
    scans = [n for n in nodes if n.op == "scan"]
    numbering = _Numbering()
    for n in nodes if len(scans) > 1 else ():
        numbering.add(n)
    for forward in scans:
        for backward in scans:
            if _undoes(backward, forward):
                yield _pair(graph, forward, backward, numbering)


def _undoes(backward: Node, forward: Node) -> bool:
    """Whether a scan runs in the other direction over what another one stacks."""
    _, carry = core.scan_counts(forward.params, len(forward.inputs))
    same = backward.params["length"] == forward.params["length"]
    other = backward.params["reverse"] != forward.params["reverse"]
    return same and other and not set(forward.outputs[carry:]).isdisjoint(backward.inputs)


def _pair(graph: Graph, forward: Node, backward: Node, outer: _Numbering) -> ScanPair:
    """The values that a scan computes again of another one."""
    (body,), (again,) = forward.bodies, backward.bodies
    consts, carry = core.scan_counts(forward.params, len(forward.inputs))
    ahead = outer.of_body(forward)
    stacked = zip(forward.outputs[carry:], body.outputs[carry:], strict=True)
    back = outer.of_body(backward, {v: ahead.of(x) for v, x in stacked})
    made = {ahead.numbers[v]: v for n in body.nodes for v in n.outputs}
    carried = _depending(body, body.inputs[consts : consts + carry])
    found = []
    for node in again.nodes:
        if node.bodies or (node.rule is not None and node.rule.matmul is None):
            continue
        for v in node.outputs:
            first = made.get(back.numbers[v])
            if first is not None and first in carried:
                value = graph.values[v]
                size = float(math.prod(value.shape) * core.itemsize(value.dtype))
                found.append(
                    RecomputedScan(first, v, size * forward.params["length"], node.id, _flops(graph, node))
                )
    return ScanPair(forward, backward, tuple(found))


def _flops(graph: Graph, node: Node) -> float:
    """The arithmetic of the products of an op; of an op without a rule it is not known."""
    if node.rule is None or node.rule.matmul is None:
        return 1.0
    shapes = [graph.operand(x).shape for x in node.inputs], [graph.values[v].shape for v in node.outputs]
    return node.rule.matmul(op_of(graph, node, *shapes, 1)).flops


def _depending(body: Body, on: Sequence[int]) -> set[int]:
    """The values that are computed from given ones, and not from weights alone."""
    found = set(on)
    for n in body.nodes:
        if not found.isdisjoint(x for x in n.inputs if not isinstance(x, Const)):
            found.update(n.outputs)
    return found


@dataclass
class _Numbering:
    """Value numbers: equal for equal ops of equal operands.

    Arguments:
      known: the number of every key so far.
    """

    known: dict[Hashable, int] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)

    def number(self, key: Hashable) -> int:
        """The number of a key."""
        return self.known.setdefault(key, len(self.known))

    def of(self, x: Operand) -> int:
        """The number of an operand."""
        if isinstance(x, Const):
            return self.number(("scalar", exact(x)))
        return self.numbers[x] if x in self.numbers else self.number(("value", x))

    def add(self, node: Node) -> None:
        """Numbers the results of an op."""
        key = op_key(node, map(self.of, node.inputs))
        for i, v in enumerate(node.outputs):
            self.numbers[v] = self.number(("value", v) if key is None else (key, i))

    def of_body(self, scan: Node, made: Mapping[int, int] = MappingProxyType({})) -> _Numbering:
        """The numbers in the body of a scan.

        Arguments:
          made: per stack that is known layer by layer, the number of its layers.
        """
        (body,) = scan.bodies
        consts, carry = core.scan_counts(scan.params, len(scan.inputs))
        own = _Numbering(self.known)
        for i, (x, v) in enumerate(zip(scan.inputs, body.inputs, strict=True)):
            if i < consts:
                own.numbers[v] = self.of(x)
            elif i >= consts + carry:
                layers = None if isinstance(x, Const) else made.get(x)
                own.numbers[v] = self.number(("layer of", self.of(x))) if layers is None else layers
        for n in body.nodes:
            own.add(n)
        return own
