"""Whether two traces are of one program: then what was built of one serves the other."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from sbp.compat.exact_keys import key_of
from sbp.passes.program.control import CONTROL
from sbp.passes.program.graph import Const, Graph, Node, Operand
from sbp.passes.program.trace import Traced


def is_same_program(a: Traced, b: Traced) -> bool:
    """Whether two traces say the same, to the last bit of what stands in them.

    A function that is held as a parameter of an op is compared by identity, and so is a closed-over array.

    >>> import numpy as np
    >>> from sbp.passes.program.trace import trace
    >>> def times(k): return trace(lambda x: x * k, [np.ones(3)], {})
    >>> is_same_program(times(2.0), times(2.0)), is_same_program(times(2.0), times(3.0))
    (True, False)
    """
    return (
        (a.in_paths, a.out_paths, a.out_tree) == (b.in_paths, b.out_paths, b.out_tree)
        and a.graph == b.graph
        and list(map(id, a.graph.consts)) == list(map(id, b.graph.consts))
        and all(_said(x) == _said(y) for x, y in zip(a.graph.walk(), b.graph.walk(), strict=True))
        and _scalars(a.graph) == _scalars(b.graph)
    )


def _said(node: Node) -> Hashable:
    """What the equality of ops leaves out: parameters. Bodies say what the jaxprs of loops do."""
    bodies = CONTROL[node.op].bodies if node.op in CONTROL else ()
    return key_of({k: v for k, v in node.params.items() if k not in bodies})


def _scalars(graph: Graph) -> list[Hashable]:
    """The scalars that stand in a graph."""

    def read() -> Iterable[Operand]:
        for node in graph.walk():
            yield from node.inputs
            yield from (x for body in node.bodies for x in body.outputs)
        yield from graph.outputs

    return [key_of(x.value) for x in read() if isinstance(x, Const)]
