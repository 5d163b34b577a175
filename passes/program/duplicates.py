"""Ops that compute what one before them has computed: once, as XLA does, which also merges what they send."""

from collections.abc import Collection, Hashable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from sbp.passes.program.edit import Editor
from sbp.passes.program.graph import Const, Graph, Node, Operand, speaks

_Key = tuple[Hashable, ...]


def without_duplicates(graph: Graph) -> Graph:
    """The graph in which later equal ops are the first one, in the graph itself and in each body by itself.

    What is computed from scalars alone stays as often as it is used: it costs nothing, and each copy may lie
    its own way. So do results of the program, loops and branches, and ops that do something besides.
    """
    editor = Editor(graph)
    found = _Duplicates(editor).all(graph.nodes, frozenset(graph.inputs), graph.outputs)
    if not found:
        return graph
    return editor.finish([_without(n, found) for n in graph.nodes if n.id not in found])


def _without(node: Node, found: Collection[int]) -> Node:
    """A node without the nodes of some ids in its bodies."""
    bodies = (
        replace(b, nodes=tuple(_without(n, found) for n in b.nodes if n.id not in found)) for b in node.bodies
    )
    return replace(node, bodies=tuple(bodies)) if node.bodies else node


class _Duplicates:
    """Looks for duplicates, and tells the editor whose results stand for theirs."""

    def __init__(self, editor: Editor) -> None:
        self.editor = editor

    def all(self, nodes: Iterable[Node], varying: frozenset[int], results: Iterable[Operand]) -> set[int]:
        """The ids of the nodes that are duplicates, those in bodies too.

        Arguments:
          varying: values that are not computed from scalars alone.
          results: what leaves the graph or the body.
        """
        kept = {x for x in results if not isinstance(x, Const)}
        depends, known, found = set(varying), dict[_Key, Node](), set[int]()
        for node in nodes:
            if not depends.isdisjoint(x for x in node.inputs if not isinstance(x, Const)):
                depends.update(node.outputs)
            for body in node.bodies:
                found |= self.all(body.nodes, frozenset({*depends, *body.inputs}), body.outputs)
            key = self.key(node) if depends.issuperset(node.outputs) else None
            same = known.setdefault(key, node) if key is not None else node
            if same is not node and kept.isdisjoint(node.outputs):
                self.editor.substitute(node.outputs, same.outputs)
                found.add(node.id)
        return found

    def key(self, node: Node) -> _Key | None:
        """What equal ops have in common; None for an op that is no other's equal."""
        return op_key(node, [exact(self.editor.read(x)) for x in node.inputs])


def op_key(node: Node, operands: Iterable[Hashable]) -> _Key | None:
    """What equal ops have in common; None for an op that is no other's equal.

    Arguments:
      operands: equal for operands that are the same.
    """
    if node.bodies or node.barrier >= 0 or speaks(node):
        return None
    role = node.role.undirected
    try:
        params = tuple((name, exact(x)) for name, x in sorted(node.params.items()))
        key = (node.primitive, node.target, role, tuple(operands), params)
        hash(key)
    except TypeError:  # a parameter without a hash
        return None
    return key


def exact(x: Any) -> Hashable:
    """A parameter or an operand, such that True, 1 and 1.0 differ, and 0.0 and -0.0."""
    if isinstance(x, Const):
        return str(x.dtype), x.shape, np.asarray(x.value).tobytes()
    if isinstance(x, float):
        return float, x.hex()
    if isinstance(x, tuple):
        return type(x), tuple(map(exact, x))
    held: Hashable = (type(x), x)
    return held
