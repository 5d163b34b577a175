"""Changes to a traced graph: ops put in the place of others, written as JAX functions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from sbp.compat import core
from sbp.passes.program.graph import Const, Graph, Node, Operand, Source, Value, number_nodes
from sbp.passes.program.trace import Builder, prune


class Editor:
    """Makes new values and ops for a graph, and then the changed graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.builder = Builder(graph.values)
        self.builder.barriers = max((node.barrier for node in graph.walk()), default=0)
        self.instead: dict[int, Operand] = {}

    def operand(self, x: Operand) -> Value | Const:
        """What an operand refers to, a new value too."""
        return x if isinstance(x, Const) else self.builder.values[x]

    def emit(
        self, fn: Callable[..., Any], operands: Sequence[Operand], source: Source
    ) -> tuple[list[Node], list[Operand]]:
        """The ops of a JAX function on operands of the graph, and its results.

        Arguments:
          fn: of arrays, to an array or a list of them.
          source: the user's line that the ops stand for.
        """
        closed = jax.make_jaxpr(fn)(*[core.struct(v.shape, v.dtype) for v in map(self.operand, operands)])
        outs = self.builder.inline(closed.jaxpr, closed.consts, operands, source)
        nodes, self.builder.nodes = self.builder.nodes, []
        return nodes, outs

    def substitute(self, old: Sequence[int], new: Sequence[Operand]) -> None:
        """Says that some values are others from now on.

        Of a placement with stages, what others are sent may be among them: it goes by its position then.
        """
        self.instead.update(zip(old, new, strict=True))

    def read(self, x: Operand) -> Operand:
        """What stands for an operand now; what stands for it may have been put in another's place itself."""
        while not isinstance(x, Const) and x in self.instead:
            x = self.instead[x]
        return x

    def with_new_operands(self, node: Node) -> Node:
        """An op that reads what stands for its operands now; most are left as they are."""
        if not node.bodies and self.instead.keys().isdisjoint(x for x in node.inputs if isinstance(x, int)):
            return node
        bodies = (
            replace(
                b, nodes=tuple(map(self.with_new_operands, b.nodes)), outputs=tuple(map(self.read, b.outputs))
            )
            for b in node.bodies
        )
        return replace(node, inputs=tuple(map(self.read, node.inputs)), bodies=tuple(bodies))

    def finish(self, nodes: Sequence[Node]) -> Graph:
        """The graph with other ops; those that nobody needs any more are dropped."""
        b, graph = self.builder, self.graph
        changed = replace(
            graph,
            values=tuple(b.values),
            inputs=(*graph.inputs, *b.const_ids),
            consts=(*graph.consts, *b.consts),
            nodes=tuple(map(self.with_new_operands, nodes)),
            outputs=tuple(map(self.read, graph.outputs)),
        )
        kept = prune(changed)
        return replace(kept, nodes=number_nodes(kept.nodes))
