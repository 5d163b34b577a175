"""Assigns every op to a placement: that of its scope, of its operands, or of its users.

An op outside of any `sbp.on` belongs to the placement of one of its operands. In the loop over micro-batches
that is the operand that is made last; elsewhere it is the largest one. An op without such an operand (masks,
random bits, casts of weights) is *free*: every placement that needs it computes it.

Words: docs/glossary.md.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sbp.compat import core
from sbp.errors import AnnotationError, Problem
from sbp.passes.program.graph import Body, Const, Graph, Node, Operand, walk
from sbp.passes.program.role import SUMS
from sbp.placement import Placement


@dataclass(frozen=True)
class OpPlacements:
    """The placements of the ops and values of a program.

    Arguments:
      placements: in the order of the forward pass.
      nodes: per op, outer ones and those of the loop's body, the positions of the placements that compute it.
      values: per value, of the placements that have it without receiving it; arguments of the program are
        everywhere.
    """

    placements: tuple[Placement, ...]
    nodes: Mapping[int, frozenset[int]]
    values: Mapping[int, frozenset[int]]

    def home(self, v: int) -> int:
        """The placement that sends a value to others."""
        return min(self.values[v])


def loop_of(graph: Graph) -> Node | None:
    """The loop over micro-batches.

    Raises:
      AnnotationError: if there are several.
    """
    found = [n for n in graph.nodes if n.role.microbatches]
    if len(found) > 1:
        raise AnnotationError(
            Problem(
                "annotation",
                " and ".join(str(n.source) for n in found[:2]),
                f"{len(found)} calls of what sbp.microbatch made",
                "one in a program with stages",
                "the micro-batches of one loop are what a schedule orders",
                "combine both functions into one, or compile two programs",
            )
        )
    return found[0] if found else None


def placements_of(graph: Graph) -> tuple[Placement, ...]:
    """The placements that ops belong to, in the order of the forward pass."""
    found = dict.fromkeys(n.role.place for n in graph.walk() if not n.role.undoes)
    found.update(dict.fromkeys(n.role.place for n in graph.walk()))
    return tuple(p for p in found if p is not None)


def find_places(graph: Graph, placements: tuple[Placement, ...]) -> OpPlacements:
    """The placements of all ops and values.

    Arguments:
      placements: those that ops belong to.

    Raises:
      AnnotationError: for a loop or a branch, other than the loop over micro-batches, whose ops belong to
        several placements.
    """
    search = _Search(graph, placements, loop_of(graph))
    search.ask(list(graph.walk()))
    search.place(graph.nodes)
    search.assign_needed()
    return OpPlacements(
        search.placements,
        {i: frozenset(at) for i, at in search.needed.items()},
        {v: frozenset(at) for v, at in search.having.items()},
    )


class _Search:
    """Forward, ops get the placement of their operands; backward, free ops get those of their users."""

    def __init__(self, graph: Graph, placements: tuple[Placement, ...], loop: Node | None) -> None:
        self.graph, self.placements, self.loop = graph, placements, loop
        self.number = {p: i for i, p in enumerate(placements)}
        self.fixed: dict[int, int] = {}  # value -> the one place that computes it
        self.asked: dict[int, int] = {}  # value -> where the first op is that wants it, if its scope says so
        self.depth: dict[int, int] = {}  # value -> how late it is made: hops between placements
        self.needed: dict[int, set[int]] = {}  # op -> places
        self.having: dict[int, set[int]] = {}  # value -> places

    def ask(self, nodes: Sequence[Node]) -> None:
        """Finds where values are wanted; a sum is wanted where its user is."""
        for node in reversed(nodes):
            there = node.role.place
            at = (
                self.asked.get(node.outputs[0])
                if node.op in SUMS
                else self.number.get(there)
                if there
                else None
            )
            if at is not None:
                self.asked.update((x, at) for x in node.inputs if not isinstance(x, Const))

    def place(self, nodes: Sequence[Node], inside: bool = False) -> None:
        """Finds the placement of every op that has one."""
        for node in nodes:
            if node is self.loop:
                self.place_loop(node)
                continue
            at = self.of_scope(node)
            if at is None:
                at = self.of_operands(node, inside)
            if at is not None:
                depth = max((self.hops(x, at) for x in reads_of(node)), default=0)
                for v in node.outputs:
                    self.fixed[v], self.depth[v] = at, depth

    def hops(self, x: int, at: int) -> int:
        return self.depth.get(x, 0) + (x in self.fixed and self.fixed[x] != at)

    def of_scope(self, node: Node) -> int | None:
        """The placement that a scope names, of an op or of those inside it."""
        scopes = {p: n for n in walk([node]) if (p := n.role.place) is not None}
        if len(scopes) > 1:
            raise AnnotationError(_torn(node, scopes))
        return self.number[next(iter(scopes))] if scopes else None

    def of_operands(self, node: Node, inside: bool) -> int | None:
        """The placement of the operand that is made last, or of the largest."""
        at = [x for x in reads_of(node) if x in self.fixed]
        if not at:
            return None
        size = {x: _bytes(self.graph, x) for x in at}
        if node.op in SUMS and node.outputs[0] in self.asked and len({self.fixed[x] for x in at}) > 1:
            return self.asked[node.outputs[0]]
        if inside:
            return self.fixed[max(at, key=lambda x: (self.depth[x], size[x]))]
        return self.fixed[max(at, key=lambda x: (size[x], -self.fixed[x]))]

    def place_loop(self, node: Node) -> None:
        """The body, then the loop's results, which are where the body makes them."""
        (body,) = node.bodies
        for x, v in zip(node.inputs, body.inputs, strict=True):
            if not isinstance(x, Const) and x in self.fixed:
                self.fixed[v], self.depth[v] = self.fixed[x], 0
        self.place(body.nodes, inside=True)
        for v, x in zip(node.outputs, body.outputs, strict=True):
            if not isinstance(x, Const) and x in self.fixed:
                self.fixed[v], self.depth[v] = self.fixed[x], 0

    def assign_needed(self) -> None:
        """Gives every op the placements that need it, from the results back."""
        for x in self.graph.outputs:
            self.want(x, {0})
        for node in reversed(self.graph.nodes):
            if node is self.loop:
                self.spread_loop(node)
            else:
                self.visit(node)

    def want(self, x: Operand, places: Iterable[int]) -> None:
        """Notes that placements need a value: those that have it, or the one that makes it."""
        if not isinstance(x, Const):
            self.having.setdefault(x, set()).update({self.fixed[x]} if x in self.fixed else places)

    def visit(self, node: Node) -> set[int]:
        """Gives one op its placements, and asks for its operands."""
        at = {p for v in node.outputs for p in self.having.get(v, ())}
        at |= {self.fixed[v] for v in node.outputs if v in self.fixed}
        at = at or {0}  # an effect
        self.needed[node.id] = at
        for v in node.outputs:
            self.having[v] = set(at)
        for x in reads_of(node):
            self.want(x, at)
        return at

    def spread_loop(self, node: Node) -> None:
        """The body's ops, repeatedly while carried values reach new placements; then the loop's inputs."""
        (body,) = node.bodies
        n_const, n_carry = core.scan_counts(node.params, len(node.inputs))
        carries = list(zip(body.inputs[n_const : n_const + n_carry], body.outputs, strict=False))
        for v, x in zip(node.outputs, body.outputs, strict=True):
            self.want(x, self.having.get(v, {0}))
        before = None
        while before != (before := {c: frozenset(self.having.get(c, ())) for c, _ in carries}):
            for inner in reversed(body.nodes):
                self.visit(inner)
            for c, x in carries:
                if not isinstance(x, Const) and x in self.fixed:
                    self.having[c] = {self.fixed[x]}
                self.want(x, self.having.get(c, set()))
        self.needed[node.id] = {p for n in body.nodes for p in self.needed[n.id]}
        for v, x in zip(node.outputs, body.outputs, strict=True):
            self.having[v] = set(self.having.get(x, {0})) if not isinstance(x, Const) else {0}
        for x, v in zip(node.inputs, body.inputs, strict=True):
            self.want(x, self.having.get(v, ()))


def reads_of(node: Node) -> Iterator[int]:
    """The values that an op reads from outside, those of its bodies too."""
    inner = {v for n in walk([node]) for v in n.outputs} | {v for b in _bodies(node) for v in b.inputs}
    reads = dict.fromkeys(x for n in walk([node]) for x in n.inputs if not isinstance(x, Const))
    yield from (x for x in reads if x not in inner)


def _bodies(node: Node) -> Iterator[Body]:
    for n in walk([node]):
        yield from n.bodies


def _bytes(graph: Graph, v: int) -> float:
    value = graph.values[v]
    return math.prod(value.shape) * core.itemsize(value.dtype)


def _torn(node: Node, scopes: Mapping[Placement, Node]) -> Problem:
    places = " and ".join(f"{p} ({n.source})" for p, n in list(scopes.items())[:2])
    return Problem(
        "annotation",
        f"{node.op} at {node.source}",
        f"ops on {places}",
        "ops of one placement",
        "a loop or a branch runs as a whole, on one placement",
        "write the layers of different stages one after the other; loop over those of one stage",
    )
