"""Adds up sums over micro-batches inside the scans that make them, a slice at a time.

JAX gives the gradients of all layers as a stack, which is then added to the sum of earlier micro-batches. For
that the stack is written and read, and takes memory beside the sum. If the scan takes slices of the sum, adds
its results to them, and stacks these, there is no such stack, and the sum is changed in place
(program/control.py).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sbp.compat import core
from sbp.passes.pipeline.op_placement import loop_of
from sbp.passes.program.control import ADDS, loop_params
from sbp.passes.program.graph import Body, Const, Graph, Node, Operand, Value, numbered, walk


@dataclass(frozen=True, slots=True)
class _Found:
    """A sum that a scan can add to.

    Arguments:
      carried: the sum as it enters the body of the loop over micro-batches.
      add: the op that adds to it.
      scan: the id of the scan.
      result: which of its results is added.
    """

    carried: int
    add: Node
    scan: int
    result: int


def add_inside(graph: Graph) -> Graph:
    """The graph whose scans add their stacks to the sums over micro-batches."""
    loop = loop_of(graph)
    if loop is None:
        return graph
    (body,) = loop.bodies
    n_const, n_carry = core.scan_counts(loop.params, len(loop.inputs))
    found = _sums(graph, body, body.inputs[n_const : n_const + n_carry])
    if not found:
        return graph
    values, gone = list(graph.values), {f.add.id for f in found}
    nodes = [n for n in body.nodes if n.id not in gone]
    for i, n in enumerate(nodes):
        for f in (f for f in found if f.scan == n.id):
            nodes[i] = _adding(nodes[i], f, values)
    whole = replace(loop, bodies=(replace(body, nodes=tuple(nodes)),))
    outer = numbered(whole if n is loop else n for n in graph.nodes)
    return replace(graph, values=tuple(values), nodes=outer)


def _sums(graph: Graph, body: Body, carried: tuple[int, ...]) -> list[_Found]:
    """The carried values to which a stack of a scan is added and nothing else."""
    makers = {v: n for n in body.nodes for v in n.outputs}
    uses = _uses(body)
    found = list[_Found]()
    for v, out in zip(carried, body.outputs, strict=False):
        add = None if isinstance(out, Const) else makers.get(out)
        if add is None or add.op not in ADDS or v not in add.inputs or uses[v] != 1:
            continue
        x = add.inputs[1 - add.inputs.index(v)]
        scan = None if isinstance(x, Const) else makers.get(x)
        if scan is None or isinstance(x, Const) or scan.op != "scan" or uses[x] != 1:
            continue
        _, carry = core.scan_counts(scan.params, len(scan.inputs))
        result, mine = scan.outputs.index(x), scan.bodies[0]
        made = mine.outputs[result]
        same = (graph.values[x].shape, graph.values[x].dtype) == (
            graph.values[v].shape,
            graph.values[v].dtype,
        )
        if result >= carry and same and not isinstance(made, Const):
            found.append(_Found(v, add, scan.id, result))
    return found


def _uses(body: Body) -> Mapping[int, int]:
    """How often a body and those inside it use each value."""
    every = [body, *(b for n in walk(body.nodes) for b in n.bodies)]
    read: list[Operand] = [x for n in walk(body.nodes) for x in n.inputs]
    read += [x for b in every for x in b.outputs]
    return Counter(x for x in read if not isinstance(x, Const))


def _adding(scan: Node, f: _Found, values: list[Value]) -> Node:
    """A scan that adds a slice of a sum to one of its results."""
    (body,) = scan.bodies
    consts, carry = core.scan_counts(scan.params, len(scan.inputs))
    made = body.outputs[f.result]
    assert not isinstance(made, Const)
    before, after = len(values), len(values) + 1
    values += [replace(values[made], id=i) for i in (before, after)]
    first = f.add.inputs.index(f.carried) == 0
    add = replace(f.add, inputs=(before, made) if first else (made, before), outputs=(after,))
    outs = tuple(after if k == f.result else x for k, x in enumerate(body.outputs))
    return replace(
        scan,
        inputs=(*scan.inputs, f.carried),
        outputs=tuple(f.add.outputs[0] if k == f.result else v for k, v in enumerate(scan.outputs)),
        params=loop_params(scan.params, consts, carry),
        bodies=(Body((*body.inputs, before), (*body.nodes, add), outs),),
    )
