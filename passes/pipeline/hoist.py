"""Casts of weights, out of the loop over micro-batches: once per step, not once per micro-batch.

Inside one program XLA does that by itself; the pieces of a pipeline are programs of their own.
"""

from __future__ import annotations

from dataclasses import replace

from sbp import compat
from sbp.passes.pipeline.where import loop_of
from sbp.passes.program.control import loop_params
from sbp.passes.program.graph import Const, Graph, Node, Operand, Value, numbered

CASTS = ("convert_element_type",)


def hoist_casts(graph: Graph) -> Graph:
    """The graph with every cast of what the loop only reads before the loop."""
    loop = loop_of(graph)
    if loop is None:
        return graph
    (body,) = loop.bodies
    n_const, n_carry = compat.scan_counts(loop.params, len(loop.inputs))
    outer: dict[int, Operand] = dict(zip(body.inputs[:n_const], loop.inputs[:n_const], strict=True))
    values, casts, kept = list(graph.values), list[Node](), list[Node]()
    entering: list[tuple[int, int]] = []
    for node in body.nodes:
        x = node.inputs[0] if node.op in CASTS else None
        source = None if x is None or isinstance(x, Const) else outer.get(x)
        if source is None or isinstance(source, Const):
            kept.append(node)
            continue
        (v,) = node.outputs
        once = Value(len(values), values[v].shape, values[v].dtype, values[v].name)
        values.append(once)
        casts.append(replace(node, inputs=(source,), outputs=(once.id,)))
        outer[v] = once.id
        entering.append((v, once.id))
    if not casts:
        return graph
    inside = replace(
        body,
        inputs=(*body.inputs[:n_const], *(v for v, _ in entering), *body.inputs[n_const:]),
        nodes=tuple(kept),
    )
    whole = replace(
        loop,
        inputs=(*loop.inputs[:n_const], *(x for _, x in entering), *loop.inputs[n_const:]),
        params=loop_params(loop.params, n_const + len(entering), n_carry),
        bodies=(inside,),
    )
    nodes = [m for n in graph.nodes for m in ((*casts, whole) if n is loop else (n,))]
    return replace(graph, values=tuple(values), nodes=numbered(nodes))
