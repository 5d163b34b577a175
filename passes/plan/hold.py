"""Values of a graph that are held to a signature, or only watched, as `sbp.annotate` behind them does."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sbp.annotation import Pin, annotate_p
from sbp.passes.program.graph import Graph, Node, Value, make_node, numbered
from sbp.signature import NdSbp


def with_annotations(graph: Graph, held: Mapping[int, NdSbp | None]) -> Graph:
    """The graph with an annotation behind the ops that make some values.

    The op makes a new value, and the annotation makes the old one of it: whoever reads that, reads what is
    annotated, and ids of values keep their meaning.

    Arguments:
      held: by value, which an op must make; a signature, or None for any: then the annotation has a variable
        of its own in the search, which tells how the value lies.
    """
    values = list(graph.values)

    def inserted(nodes: Sequence[Node]) -> list[Node]:
        out: list[Node] = []
        for node in nodes:
            bodies = tuple(replace(b, nodes=tuple(inserted(b.nodes))) for b in node.bodies)
            fresh: dict[int, int] = {}
            for v in node.outputs:
                if v in held:
                    fresh[v] = len(values)
                    values.append(Value(len(values), values[v].shape, values[v].dtype, values[v].name))
            outputs = tuple(fresh.get(v, v) for v in node.outputs)
            out.append(replace(node, outputs=outputs, bodies=bodies))
            for v, made in fresh.items():
                pin = {"pin": Pin(held[v], None, None)}
                # Of the same stage as the op: in a pipeline the value stays where it is made.
                annotated = make_node(0, annotate_p, (made,), (v,), pin, node.source)
                out.append(replace(annotated, role=node.role))
        return out

    nodes = numbered(inserted(graph.nodes))
    return replace(graph, values=tuple(values), nodes=nodes)


def annotations_of(graph: Graph, held: Mapping[int, object]) -> dict[int, Node]:
    """The annotations that `with_annotations` has put behind some values."""
    producers = graph.producers()
    return {v: producers[v] for v in held}
