"""An op as its rule sees it along one axis, and as its body sees it on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from sbp.layout import Layout
from sbp.passes.program.graph import Graph, Node
from sbp.rules.entry import Op
from sbp.signature import NdSbp
from sbp.talk.local import Local, Talk

Lying: TypeAlias = tuple[Sequence[NdSbp], Sequence[NdSbp]]
"""How the operands and the results of an op lie."""


def op_of(graph: Graph, node: Node, shapes: Sequence[Any], results: Sequence[Any], group: int) -> Op:
    """The rule's view of a node, given what the outer axes left of its shapes."""
    return Op(
        node.op,
        tuple(shapes),
        tuple(results),
        tuple(graph.operand(x).dtype for x in node.inputs),
        tuple(graph.values[v].dtype for v in node.outputs),
        node.params,
        group,
        tuple(graph.operand(x).shape for x in node.inputs),
    )


def local_of(
    graph: Graph,
    node: Node,
    lying: Lying,
    hierarchy: tuple[int, ...],
    coords: Sequence[Any] = (),
    names: Sequence[str] = (),
    reports: list[Any] | None = None,
) -> Local:
    """What the body of an op knows about its shards.

    Arguments:
      lying: how its operands and its results lie.
      coords, names, reports: as of `Local`; without them the body can be asked what it sends, and not be run.
    """
    values = [graph.operand(x) for x in node.inputs]
    ins = [Layout(x.shape, nd, hierarchy) for x, nd in zip(values, lying[0], strict=True)]
    outs = [
        Layout(graph.values[v].shape, nd, hierarchy) for v, nd in zip(node.outputs, lying[1], strict=True)
    ]
    dtypes = [x.dtype for x in values]
    return Local(node.primitive, node.params, tuple(ins), tuple(outs), coords, names, dtypes, reports)


def talks_of(graph: Graph, node: Node, lying: Lying, hierarchy: tuple[int, ...]) -> tuple[Talk, ...]:
    """The collectives inside an op's body; those that send nothing are left out."""
    if node.rule is None or node.rule.talks is None:
        return ()
    talks = node.rule.talks(local_of(graph, node, lying, hierarchy))
    return tuple(t for t in talks if t.wire_bytes > 0)
