"""The logical graph: what the user's function computes, as frozen values.

Words: docs/glossary.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jax.typing import ArrayLike

from sbp.compat.core import Primitive, SourceInfo
from sbp.compat.untyped import DType
from sbp.passes.program.role import PLAIN, Role, role_of
from sbp.rules.entry import Rule
from sbp.rules.registry import lookup
from sbp.text.notebook import file_name

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, slots=True)
class Source:
    """Where in the user's program something comes from.

    Arguments:
      scope: the name stack, such as `jvp(layer0)/attention`.
      info: JAX's own record of the line, with the name stack as it is inside the innermost loop around the
        op: the instructions that the op becomes are marked with it. None for what passes have made.
    """

    file: str = ""
    line: int = 0
    scope: str = ""
    info: SourceInfo | None = field(default=None, hash=False, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{file_name(self.file)}:{self.line}" if self.file else "?"


@dataclass(frozen=True, slots=True)
class Value:
    """A logical tensor."""

    id: int
    shape: tuple[int, ...]
    dtype: DType
    name: str

    def __str__(self) -> str:
        return f"{self.name}:{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True, eq=False)
class Const:
    """A scalar that stands in an equation itself; equal to another one of the same bits.

    >>> f32 = np.dtype("float32")
    >>> Const(1.0, f32) == Const(np.float32(1.0), f32), Const(1.0, f32) == Const(2.0, f32)
    (True, False)
    """

    value: ArrayLike
    dtype: DType
    shape: tuple[int, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and self._bits() == other._bits()

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape))

    def __str__(self) -> str:
        return str(self.value)

    def _bits(self) -> tuple[bytes, DType, tuple[int, ...]]:
        return np.asarray(self.value).astype(self.dtype).tobytes(), self.dtype, self.shape


Operand: TypeAlias = int | Const


@dataclass(frozen=True, slots=True)
class Body:
    """What a loop runs each time, or one branch: a graph inside an op.

    Arguments:
      inputs: value ids.
      nodes: the ops, in order.
      outputs: value ids, or scalars.
    """

    inputs: tuple[int, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One op of the logical graph.

    Arguments:
      id: unique; its position, for an op that is not inside a body.
      primitive, params: the JAX primitive, with logical shapes.
      inputs: value ids, or scalars.
      outputs: value ids.
      barrier: ops with the same number are ONE optimisation barrier (what is left of `jax.checkpoint`).
      bodies: of a loop or a branch.
      target: which kernel or function a call is of, such as the name of a `pallas_call`.
      rule: what it does to signatures; None for an op that must run whole. `make_node` binds it.
      role: where it belongs, and what it is for.
    """

    id: int
    primitive: Primitive
    inputs: tuple[Operand, ...]
    outputs: tuple[int, ...]
    params: Mapping[str, Any] = field(hash=False, compare=False)
    source: Source
    barrier: int = -1
    bodies: tuple[Body, ...] = ()
    target: str = ""
    rule: Rule | None = field(default=None, compare=False, repr=False)
    role: Role = PLAIN

    @property
    def op(self) -> str:
        """The primitive's name, with what it calls."""
        # Asked for millions of times.
        name: str = self.primitive.name
        return f"{name}[{self.target}]" if self.target else name


def op_name(primitive: Primitive, target: str = "") -> str:
    """What an op is called: its primitive's name, with what it calls."""
    return f"{primitive.name}[{target}]" if target else str(primitive.name)


def make_node(
    id: int,
    primitive: Primitive,
    inputs: Iterable[Operand],
    outputs: Iterable[int],
    params: Mapping[str, Any],
    source: Source,
    *,
    barrier: int = -1,
    bodies: tuple[Body, ...] = (),
    target: str = "",
) -> Node:
    """An op with its rule, as the registry has it now, and its role; arguments as of `Node`."""
    # Once: a rule that is registered later holds for later builds, whose key has the registry's version.
    name = op_name(primitive, target)
    rule, role = lookup(name), role_of(name, source.scope)
    return Node(
        id, primitive, tuple(inputs), tuple(outputs), params, source, barrier, bodies, target, rule, role
    )


@dataclass(frozen=True, slots=True)
class Graph:
    """Values and the ops between them, in an order that can be executed.

    Arguments:
      values: by id.
      inputs: the arguments' leaves, then the arrays the function closes over.
      consts: those arrays, in the order of the last inputs.
      outputs: the results' leaves.
    """

    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    consts: tuple[jax.Array, ...] = field(hash=False, compare=False)
    nodes: tuple[Node, ...]
    outputs: tuple[Operand, ...]

    def operand(self, x: Operand) -> Value | Const:
        """What an operand refers to."""
        return x if isinstance(x, Const) else self.values[x]

    def keeps_elements(self, node: Node) -> bool:
        """Whether an op only moves or converts the elements of its first operand."""
        if node.rule is None or not node.rule.layout:
            return False
        given, made = self.operand(node.inputs[0]).shape, self.values[node.outputs[0]].shape
        return math.prod(given) == math.prod(made)

    def walk(self) -> Iterator[Node]:
        """Every op, those inside bodies after the op that holds them."""
        return walk(self.nodes)

    def producers(self) -> dict[int, Node]:
        """The node of each value that is not an input."""
        return {v: node for node in self.walk() for v in node.outputs}

    def consumers(self) -> dict[int, list[tuple[Node, int]]]:
        """The uses of each value by nodes: (node, operand position)."""
        out: dict[int, list[tuple[Node, int]]] = {}
        for node in self.walk():
            for i, x in enumerate(node.inputs):
                if not isinstance(x, Const):
                    out.setdefault(x, []).append((node, i))
        return out

    def uses(self, value: int) -> bool:
        """Whether an op or a result uses a value."""
        nodes = list(self.walk())
        read = [self.outputs, *(n.inputs for n in nodes), *(b.outputs for n in nodes for b in n.bodies)]
        return any(x == value for operands in read for x in operands if not isinstance(x, Const))

    def networkx(self) -> nx.MultiDiGraph:
        """A view for analyses: nodes `("in", i)`, node ids, `("out", i)`; an edge per use, with its value."""
        import networkx as nx  # takes long to load

        g: nx.MultiDiGraph = nx.MultiDiGraph()
        made: dict[int, Any] = {}
        for i, v in enumerate(self.inputs):
            g.add_node(("in", i), label=str(self.values[v]))
            made[v] = ("in", i)
        for node in self.nodes:
            g.add_node(node.id, label=node.op, source=str(node.source))
            made.update(dict.fromkeys(node.outputs, node.id))
        for node in self.nodes:
            for x in node.inputs:
                if not isinstance(x, Const):
                    g.add_edge(made[x], node.id, value=x)
        for i, x in enumerate(self.outputs):
            g.add_node(("out", i), label=f"output {i}")
            if not isinstance(x, Const):
                g.add_edge(made[x], ("out", i), value=x)
        return g

    def lines(self) -> Iterator[str]:
        """The graph as text, a line per op."""
        yield "inputs  " + ", ".join(str(self.values[v]) for v in self.inputs)
        for node in self.nodes:
            outs = ", ".join(str(self.values[v]) for v in node.outputs)
            ins = ", ".join(str(x) if isinstance(x, Const) else self.values[x].name for x in node.inputs)
            yield f"{outs} = {node.op}({ins})  # {node.source}"
        yield "outputs " + ", ".join(
            str(x) if isinstance(x, Const) else self.values[x].name for x in self.outputs
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())


def walk(nodes: Iterable[Node]) -> Iterator[Node]:
    """Every op of `nodes`, those inside bodies after the op that holds them."""
    for node in nodes:
        yield node
        for body in node.bodies:
            yield from walk(body.nodes)


def speaks(node: Node) -> bool:
    """Whether an op, or one in its bodies, tells the host something: it runs though nobody uses what it
    makes."""
    return node.op.endswith(("callback", "debug_print")) or any(
        speaks(inner) for body in node.bodies for inner in body.nodes
    )


def used_nodes(nodes: Sequence[Node], results: Iterable[Operand]) -> tuple[Node, ...]:
    """Those of some ops in order that speak, or whose results somebody uses.

    Arguments:
      results: what is needed of them at the end.
    """
    needed = {x for x in results if not isinstance(x, Const)}
    kept: list[Node] = []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.outputs) or speaks(node):
            kept.append(node)
            needed.update(x for x in node.inputs if not isinstance(x, Const))
    return tuple(reversed(kept))


def number_nodes(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """The same ops with ids: positions for the outermost, and unique ones inside bodies."""
    outer = list(nodes)
    fresh, others = itertools.count(len(outer)), attrgetter(*(f.name for f in fields(Node) if f.name != "id"))

    def inner(node: Node) -> Node:
        bodies = tuple(
            replace(b, nodes=tuple(inner(replace(n, id=next(fresh))) for n in b.nodes)) for b in node.bodies
        )
        return replace(node, bodies=bodies) if bodies else node

    # Each pass numbers all ops: `replace` would take twice as long.
    return tuple(inner(n if n.id == i else Node(i, *others(n))) for i, n in enumerate(outer))
