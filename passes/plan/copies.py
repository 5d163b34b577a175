"""What an op that runs again is called."""

from __future__ import annotations

from sbp.passes.program.graph import Graph


def op_count(graph: Graph) -> int:
    """One more than the largest id of an op."""
    return 1 + max((node.id for node in graph.walk()), default=-1)


def copy_id(graph: Graph, node: int) -> int:
    """The id of the op that runs in place of a node, when what that makes is recomputed."""
    return op_count(graph) + node
