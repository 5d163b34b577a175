"""Casts of weights, out of the loop over micro-batches: once per step, not once per micro-batch.

The pieces of a pipeline are programs of their own, so that nobody else does it. Inside one program XLA moves
what a loop computes of what it only reads, but nothing out of a scan over layers in it, which casts the slice
of each layer. Cast before the loop, weights can be brought near there too, in fewer bytes, and kept so.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sbp.compat import core
from sbp.compat.untyped import DType
from sbp.passes.program.control import loop_params
from sbp.passes.program.graph import Const, Graph, Node, Operand, Value, number_nodes
from sbp.passes.program.narrow_values import holds

CASTS = ("convert_element_type",)
Leaves = Callable[[Node, int], bool]
"""Whether a cast leaves a loop, by how many other loops it is in there."""


def hoist_casts(graph: Graph) -> Graph:
    """The graph with every cast of what the loop over micro-batches only reads before the loop; those in
    other loops inside stay."""
    return _hoisted(graph, lambda _, depth: depth == 0)


def hoist_narrowing(graph: Graph, room_bytes: float) -> Graph:
    """The graph with all casts to fewer bytes, of what loops over micro-batches only read and of its slices,
    before these loops.

    Arguments:
      room_bytes: for what they make, all devices together; where that is not enough, none leaves.
    """

    def narrows(cast: Node, depth: int) -> bool:
        (x,), (v,) = cast.inputs, cast.outputs
        return holds(graph.values[v].dtype, graph.operand(x).dtype)

    found = _hoisted(graph, narrows)
    made = [v for n in found.nodes if n.op in CASTS for v in n.outputs if v >= len(graph.values)]
    values = [found.values[v] for v in made]
    needed = sum(math.prod(v.shape) * core.itemsize(v.dtype) for v in values)
    return found if needed <= room_bytes else graph


def _hoisted(graph: Graph, leaves: Leaves) -> Graph:
    values, nodes = list(graph.values), list[Node]()
    for node in graph.nodes:
        if not node.role.microbatches:
            nodes.append(node)
            continue
        casts = _Casts(values, leaves)
        consts, _ = core.scan_counts(node.params, len(node.inputs))
        # Not the parts of the batch: each is cast once anyway.
        outer = {x: x for x in node.inputs[:consts] if not isinstance(x, Const)}
        loop, made = casts.out_of(node, outer)
        nodes += [*casts.nodes, _handing(loop, made, [cast.once for cast in made])]
    if len(values) == len(graph.values):
        return graph
    return replace(graph, values=tuple(values), nodes=number_nodes(nodes))


@dataclass(frozen=True, slots=True)
class _Entering:
    """What a loop only reads; a cast that a loop is handed instead of making it.

    Arguments:
      around: what it is, or is cast of, around the loop.
      once: what it is, or is a slice of, before the outermost loop.
      inside: the value in the loop.
      scanned: whether that is a slice of the one around.
    """

    around: int
    once: int
    inside: int
    scanned: bool


@dataclass
class _Casts:
    """The casts that leave a loop.

    Arguments:
      values: of the graph, which grow.
      nodes: the casts.
      known: per cast, by what is cast to what, its result.
    """

    values: list[Value]
    leaves: Leaves
    nodes: list[Node] = field(default_factory=list)
    known: dict[tuple[int, DType], int] = field(default_factory=dict)

    def out_of(self, loop: Node, outer: Mapping[int, int], depth: int = 0) -> tuple[Node, list[_Entering]]:
        """A loop without the casts that leave it, and these; it is not handed them yet.

        Arguments:
          outer: per value around it that no loop changes, what that is, or is a slice of, before all of them.
          depth: how many loops that casts leave are around it.
        """
        (body,) = loop.bodies
        fixed = _fixed(loop, outer)
        made, nodes = dict[int, _Entering](), list[Node]()
        for node in body.nodes:
            x = node.inputs[0] if node.op in CASTS else None
            if isinstance(x, int) and x in fixed and self.leaves(node, depth):
                (v,) = node.outputs
                once = self.hoisted_cast(node, fixed[x].once)
                made[v] = fixed[v] = replace(fixed[x], once=once, inside=v)
            elif node.op == "scan":
                inner, wanted = self.out_of(node, {v: at.once for v, at in fixed.items()}, depth + 1)
                handed = [self.hand_on(cast, fixed[cast.around], made) for cast in wanted]
                nodes.append(_handing(inner, wanted, handed))
            else:
                nodes.append(node)
        return replace(loop, bodies=(replace(body, nodes=tuple(nodes)),)), list(made.values())

    def hoisted_cast(self, node: Node, x: int) -> int:
        """The result of a cast before the outermost loop; the same one of the same cast."""
        like = self.values[node.outputs[0]]
        if (x, like.dtype) not in self.known:
            self.known[x, like.dtype] = v = self.add(self.values[x].shape, like)
            self.nodes.append(replace(node, inputs=(x,), outputs=(v,)))
        return self.known[x, like.dtype]

    def hand_on(self, cast: _Entering, at: _Entering, made: dict[int, _Entering]) -> int:
        """What hands a cast on to a loop inside."""
        for v, known in made.items():
            if (known.once, known.scanned) == (cast.once, at.scanned):
                return v
        v = self.add(self.values[cast.around].shape, self.values[cast.inside])
        made[v] = replace(at, once=cast.once, inside=v)
        return v

    def add(self, shape: tuple[int, ...], like: Value) -> int:
        """A value."""
        self.values.append(replace(like, id=len(self.values), shape=shape))
        return len(self.values) - 1


def _fixed(loop: Node, outer: Mapping[int, int]) -> dict[int, _Entering]:
    """What no loop changes of what a loop reads, by its value inside."""
    (body,) = loop.bodies
    consts, carry = core.scan_counts(loop.params, len(loop.inputs))
    found = dict[int, _Entering]()
    for i, (x, v) in enumerate(zip(loop.inputs, body.inputs, strict=True)):
        if not isinstance(x, Const) and x in outer and not consts <= i < consts + carry:
            found[v] = _Entering(x, outer[x], v, i >= consts)
    return found


def _handing(loop: Node, casts: Sequence[_Entering], operands: Sequence[Operand]) -> Node:
    """A loop that is handed casts, and no longer what only they were made of.

    Arguments:
      operands: one for each.
    """
    if not casts:
        return loop
    (body,) = loop.bodies
    consts, carry = core.scan_counts(loop.params, len(loop.inputs))
    pairs = list(zip(loop.inputs, body.inputs, strict=True))
    new = [(x, cast.inside) for x, cast in zip(operands, casts, strict=True)]
    read = {x for n in body.nodes for x in n.inputs if not isinstance(x, Const)} | {*body.outputs}

    def kept(scanned: bool) -> list[tuple[Operand, int]]:
        own = pairs[consts + carry :] if scanned else pairs[:consts]
        more = [pair for pair, cast in zip(new, casts, strict=True) if cast.scanned is scanned]
        return [(x, v) for x, v in (*own, *more) if v in read]

    fixed, scanned = kept(False), kept(True)
    every = [*fixed, *pairs[consts : consts + carry], *scanned]
    return replace(
        loop,
        inputs=tuple(x for x, _ in every),
        params=loop_params(loop.params, len(fixed), carry),
        bodies=(replace(body, inputs=tuple(v for _, v in every)),),
    )
