"""Sums that a program keeps from step to step, as `optax.MultiSteps` does: rows are added to a table of them.

Such a sum is a table that is scaled, and a gradient by rows. What is done to the table is done to all of it,
in one pass over its memory; the rows are sent to their owners and added there.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from sbp import lazy
from sbp.compat.exact_keys import memo
from sbp.compat.untyped import PyTree
from sbp.passes.program.edit import Editor
from sbp.passes.program.graph import Const, Graph, Node, Operand
from sbp.passes.rows.gradients import Gradients, NotByRows, is_same


def add_rows_to_sums(graph: Graph) -> Graph:
    """The graph in which sums that lazy optimizers take are tables that rows are added to."""
    editor = Editor(graph)
    nodes = _with_sums(editor, graph.nodes)
    return editor.finish(nodes) if editor.instead else graph


def is_sum(node: Node) -> bool:
    """Whether a lazy step is the addition of rows to a sum, and no optimizer's."""
    return node.op == lazy.NAME and node.params["update"] == _ADDITION


def _as_given(grad: jax.Array, state: PyTree, param: None) -> tuple[jax.Array, PyTree]:
    """A step that adds what it is given."""
    return grad, state


_ADDITION = lazy.Update(_as_given, jax.tree.structure(()), has_param=False)


def _with_sums(editor: Editor, nodes: Sequence[Node]) -> list[Node]:
    """The ops of one body; what a sum is made of stands in front of the op that made it."""
    gradients = Gradients(editor, {v: node for node in nodes for v in node.outputs})
    uses = Counter(x for node in nodes for x in node.inputs)
    made: dict[int, list[Node]] = {}
    for step in nodes:
        if step.op == lazy.NAME:
            total = _summed(gradients, step.inputs[0])
            node = None if isinstance(total, Const) else gradients.maker.get(total)
            # A sum that is kept is used by the step, and for what is kept.
            if node is not None and node.id not in made and uses[total] > 1:
                made[node.id] = _Terms(gradients).replacement(node)
    out: list[Node] = []
    for node in nodes:
        bodies = tuple(replace(b, nodes=tuple(_with_sums(editor, b.nodes))) for b in node.bodies)
        out += [*made.get(node.id, ()), replace(node, bodies=bodies) if bodies else node]
    return out


def _summed(gradients: Gradients, x: Operand) -> Operand:
    """What a gradient is behind changes of its type."""
    node = gradients.source(x)
    if node is not None and node.op == "convert_element_type":
        return _summed(gradients, node.inputs[0])
    return gradients.origin(x)


@dataclass
class _Terms:
    """The terms of a sum: what it has of a table, and what it has of gradients by rows.

    Arguments:
      made: the ops that make both.
    """

    gradients: Gradients
    made: list[Node] = field(default_factory=list)

    def replacement(self, node: Node) -> list[Node]:
        """The ops in place of one that makes a sum; none where it is not made of both."""
        (total,) = node.outputs[:1]
        table, rows = self.of(total)
        if table is None or rows is None:
            return []

        def added(table: jax.Array, rows: jax.Array) -> jax.Array:
            step: list[jax.Array] = lazy.rows_p.bind(rows, update=_ADDITION)
            return table + step[0]

        result = self.emit(added, [table, rows], node)
        self.gradients.editor.substitute([total], [result])
        return self.made

    @memo
    def of(self, x: Operand) -> tuple[Operand | None, Operand | None]:
        """The terms of an operand; None where it has nothing of a kind."""
        node = None if isinstance(x, Const) else self.gradients.maker.get(x)
        if node is None:
            return x, None
        if self.by_rows(x):
            return None, x
        if is_same(node):
            return self.of(node.inputs[0])
        if node.op in ("add", "add_any", "sub"):
            first, second = map(self.of, node.inputs)
            if first[1] is None and second[1] is None:
                return x, None
            other = second if node.op != "sub" else self.each(second, lambda y: -y, [], node)
            return self.sum(first[0], other[0], node), self.sum(first[1], other[1], node)
        scaled = _scaled(self.gradients, node)
        if scaled is None:
            return x, None
        run, of, by = scaled
        terms = self.of(of)
        return (x, None) if terms[1] is None else self.each(terms, run, by, node)

    def by_rows(self, x: Operand) -> bool:
        """Whether an operand is a gradient by rows."""
        try:
            return bool(self.gradients.parts(x))
        except NotByRows:
            return False

    def each(
        self,
        terms: tuple[Operand | None, Operand | None],
        run: Callable[..., jax.Array],
        by: Sequence[Operand],
        node: Node,
    ) -> tuple[Operand | None, Operand | None]:
        """Both terms after a linear op."""
        table, rows = (None if x is None else self.emit(run, [x, *by], node) for x in terms)
        return table, rows

    def sum(self, first: Operand | None, second: Operand | None, node: Node) -> Operand | None:
        """The sum of what there is."""
        if first is None or second is None:
            return first if second is None else second
        return self.emit(lambda a, b: a + b, [first, second], node)

    def emit(self, run: Callable[..., jax.Array], operands: Sequence[Operand], node: Node) -> Operand:
        """The result of a function; it stands for an op."""
        made, (result,) = self.gradients.editor.emit(run, operands, node.source)
        self.made += made
        maker = {v: n for n in made for v in n.outputs}
        self.gradients = replace(self.gradients, maker={**self.gradients.maker, **maker})
        return result


def _scaled(
    gradients: Gradients, node: Node
) -> tuple[Callable[..., jax.Array], Operand, list[Operand]] | None:
    """A linear op of one operand: as a function, of what, and the numbers that it takes; None for others."""
    if node.op == "neg":
        return jnp.negative, node.inputs[0], []
    if node.op == "convert_element_type":
        dtype = gradients.editor.operand(node.outputs[0]).dtype
        return lambda x: x.astype(dtype), node.inputs[0], []
    if node.op not in ("mul", "div"):
        return None
    first, second = map(gradients.scalar, node.inputs)
    if second is not None:
        return (jnp.multiply if node.op == "mul" else jnp.divide), node.inputs[0], [second]
    return (jnp.multiply, node.inputs[1], [first]) if node.op == "mul" and first is not None else None
