"""Whether a function treats every row of its arguments, or every addend, by itself: asked of its ops' rules.

A function is row-wise along a dim if its arguments split there, and every op then runs on the shards without
a word between devices. What stands in a row may not depend on which row it is either: a value that is the
same in all rows may meet one that is split, a count of rows may not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sbp.passes.program.graph import Const, Graph, Node, Operand
from sbp.passes.program.views import communication_of, op_of, rows_of
from sbp.rules import Row
from sbp.rules.entry import all_broadcast
from sbp.signature import B, P, Partial, Signature, Split

GROUP = 2


@dataclass
class SplitWalk:
    """The signatures of all values, from the arguments on.

    Arguments:
      signatures: by value id.
      adds_up: whether a sum over what is split, the last dim, may be added up over the devices.
      rows: how each op lies, by its id.
      uniform: values that are the same all over.
      repeated_values: values that are the same along the last dim.
    """

    graph: Graph
    signatures: dict[int, Signature]
    adds_up: bool = False
    rows: dict[int, Row] = field(default_factory=dict)
    uniform: set[int] = field(default_factory=set)
    repeated_values: set[int] = field(default_factory=set)

    def of(self, x: Operand) -> Signature:
        """How an operand lies."""
        return B if isinstance(x, Const) else self.signatures[x]

    def even(self, x: Operand) -> bool:
        """Whether all elements of an operand are equal."""
        return not self.graph.operand(x).shape or (not isinstance(x, Const) and x in self.uniform)

    def fits(self, node: Node, row: Row) -> bool:
        """Whether the operands lie as a row wants them, or can be cut so without knowing where."""
        wanted = zip(node.inputs, row.operands, strict=True)
        return all(
            self.of(x) == s or (self.of(x) == B and isinstance(s, Split) and self.may_be_cut(x))
            for x, s in wanted
        )

    def may_be_cut(self, x: Operand) -> bool:
        """Whether each device can cut its part out of an operand without knowing which it is."""
        return self.even(x) or (not isinstance(x, Const) and x in self.repeated_values)

    def row(self, node: Node) -> Row | None:
        """How an op runs, or None if it would have to talk."""
        rule = node.rule
        operands = [self.graph.operand(x).shape for x in node.inputs]
        op = op_of(self.graph, node, operands, [self.graph.values[v].shape for v in node.outputs], GROUP)
        if all(self.of(x) == B for x in node.inputs):
            return all_broadcast(op)
        if rule is None or node.bodies:
            return None
        rows = [r for r in rows_of(node, op) if self.fits(node, r) and self.is_whole(r)]
        return next((r for r in rows if _splits(r.operands) and self.keeps_rows(node, r)), None)

    def is_whole(self, row: Row) -> bool:
        """Whether no result is a sum; one that may be added up counts as whole."""
        partial = [s for s in row.results if isinstance(s, Partial)]
        return not partial or (self.adds_up and all(s == P for s in partial) and P not in row.operands)

    def keeps_rows(self, node: Node, row: Row) -> bool:
        """Whether a row stays where it is: nothing is sent, and none is cut off or put in."""
        ends = [*zip(node.inputs, row.operands, strict=True), *zip(node.outputs, row.results, strict=True)]
        sizes = {self.graph.operand(x).shape[s.dim] for x, s in ends if isinstance(s, Split)}
        return (len(sizes) == 1 or node.op == "reshape") and not self.communication(node, row)

    def communication(self, node: Node, row: Row) -> bool:
        """Whether devices talk inside an op: rows then go to other devices."""
        ins, outs = (tuple((s,) for s in side) for side in (row.operands, row.results))
        return bool(communication_of(self.graph, node, (ins, outs), (GROUP,)))

    def visit(self, node: Node) -> bool:
        """Whether an op can run; notes how its results lie."""
        row = self.row(node)
        if row is None:
            return False
        self.rows[node.id] = row
        self.signatures.update(zip(node.outputs, [B if s == P else s for s in row.results], strict=True))
        rule = node.rule
        plain = node.op == "broadcast_in_dim" or (rule is not None and rule.pointwise)
        if plain and node.inputs and all(map(self.even, node.inputs)):
            self.uniform.update(node.outputs)
        elif self.adds_up and (self.repeats(node) or (plain and all(map(self.may_be_cut, node.inputs)))):
            self.repeated_values.update(node.outputs)
        return True

    def repeats(self, node: Node) -> bool:
        """Whether an op repeats what it is given along a new last dim, or along one of size 1."""
        if node.op != "broadcast_in_dim" or self.of(node.inputs[0]) != B:
            return False
        dims, shape = node.params["broadcast_dimensions"], self.graph.operand(node.inputs[0]).shape
        last = len(node.params["shape"]) - 1
        return last not in dims or shape[dims.index(last)] == 1


def _splits(signatures: Sequence[Signature]) -> bool:
    return any(isinstance(s, Split) for s in signatures)


def along(graph: Graph, arguments: Mapping[int, Signature]) -> list[Signature] | None:
    """How the results of a row-wise function lie, or None if it is not row-wise.

    Arguments:
      graph: the function.
      arguments: how its inputs lie, by value id; the others are whole.
    """
    walk = SplitWalk(graph, {v: arguments.get(v, B) for v in graph.inputs})
    if not all(map(walk.visit, graph.nodes)):
        return None
    return [walk.of(x) for x in graph.outputs]


def additive(graph: Graph) -> bool:
    """Whether the first result alone depends on the first argument, and adds up over its addends."""
    lying: dict[int, Signature] = {v: P if i == 0 else B for i, v in enumerate(graph.inputs)}

    def of(x: Operand) -> Signature:
        return B if isinstance(x, Const) else lying[x]

    for node in graph.nodes:
        given = tuple(map(of, node.inputs))
        results = _additive_results(graph, node, given) if P in given else (B,) * len(node.outputs)
        if results is None:
            return False
        lying.update(zip(node.outputs, results, strict=True))
    first, *others = map(of, graph.outputs)
    return first == P and P not in others


def _additive_results(graph: Graph, node: Node, given: Sequence[Signature]) -> Sequence[Signature] | None:
    """How the results of an op lie, some operands of which are sums; None if it wants the sums themselves."""
    rule = node.rule
    if rule is None or node.bodies:
        return None
    operands = [graph.operand(x).shape for x in node.inputs]
    op = op_of(graph, node, operands, [graph.values[v].shape for v in node.outputs], GROUP)
    return next((r.results for r in rows_of(node, op) if tuple(r.operands) == given), None)
