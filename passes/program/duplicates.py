"""Ops that compute what one before them has computed: once, as XLA does, which also merges what they send.

Reshapes, transposes and slices that undo each other are taken out too: who reads the last reads what the
first has read. A planner that splits rows sees them move where `x.reshape(n, d).reshape(k, n // k, d)` only
names them anew: the first reshape merges a split dim into another one, and the second takes it out again.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping
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
    role = node.role.without_direction
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
    return (type(x), x)


NAMES_ANEW = ("reshape", "squeeze", "expand_dims")
"""Ops that keep all elements in their order."""


def without_inverse_views(graph: Graph) -> Graph:
    """The graph in which no chain of reshapes, or of transposes, and no row of pieces is its source again.

    Results of the program and of bodies stay what they are.
    """
    editor = Editor(graph)
    _Views(editor).all(graph.nodes, graph.outputs)
    return editor.finish(graph.nodes) if editor.instead else graph


class _Views:
    """Looks for views that are undone, and tells the editor what stands for them."""

    def __init__(self, editor: Editor) -> None:
        self.editor = editor

    def all(self, nodes: Iterable[Node], results: Iterable[Operand]) -> None:
        """Those of the graph, or of a body."""
        kept = {x for x in results if not isinstance(x, Const)}
        makers: dict[int, Node] = {}
        for node in nodes:
            for body in node.bodies:
                self.all(body.nodes, body.outputs)
            makers.update(dict.fromkeys(node.outputs, node))
            source = self.whole(node, makers) if node.op == "concatenate" else self.same(node, makers)
            if source is not None and kept.isdisjoint(node.outputs):
                self.editor.substitute(node.outputs, (source,))

    def same(self, node: Node, makers: Mapping[int, Node]) -> int | None:
        """The nearest source of a view that is the same tensor; None if there is none."""
        kinds = next((k for k in (NAMES_ANEW, ("transpose",)) if node.op in k), None)
        if kinds is None:
            return None
        shape = self.shape(node.outputs[0])
        straight = order = tuple(range(len(shape)))
        at: Node | None = node
        while at is not None and at.op in kinds and at.role.place == node.role.place:
            x = self.editor.read(at.inputs[0])
            if isinstance(x, Const):
                return None
            if at.op == "transpose":
                order = tuple(at.params["permutation"][d] for d in order)
            if self.shape(x) == shape and order == straight:
                return x
            at = makers.get(x)
        return None

    def whole(self, node: Node, makers: Mapping[int, Node]) -> int | None:
        """What all operands are pieces of, if they are all of it, one after the other; None if not."""
        dim, end, source = node.params["dimension"], 0, None
        for x in node.inputs:
            made = None if isinstance(x, Const) else makers.get(x)
            if made is None or isinstance(x, Const) or made.role.place != node.role.place:
                return None
            of, begin, limit = self.piece(made, x, dim)
            if of is None or source not in (None, of) or begin != end:
                return None
            end, source = limit, of
        return source if source is not None and end == self.shape(source)[dim] else None

    def piece(self, made: Node, x: int, dim: int) -> tuple[int | None, int, int]:
        """What a slice along a dim, or a part of a split, is of, and where it begins and ends."""
        if made.op not in ("slice", "split"):
            return None, 0, 0
        of, params = self.editor.read(made.inputs[0]), made.params
        if isinstance(of, Const):
            return None, 0, 0
        if made.op == "split":
            begin = sum(params["sizes"][: made.outputs.index(x)])
            end = begin + params["sizes"][made.outputs.index(x)]
            return of if params["axis"] == dim else None, begin, end
        starts, limits, shape = params["start_indices"], params["limit_indices"], self.shape(of)
        whole = all(not starts[d] and limits[d] == n for d, n in enumerate(shape) if d != dim)
        alone = whole and set(params["strides"] or (1,)) == {1}
        return of if alone else None, starts[dim], limits[dim]

    def shape(self, x: int) -> tuple[int, ...]:
        """Of a value."""
        return self.editor.builder.values[x].shape
