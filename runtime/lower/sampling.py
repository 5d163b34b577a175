"""The ids of a batch, from which the capacity of every sparse exchange is planned.

All processes of a program must plan the same capacities, or their collectives would not match: so the parts
of all processes are gathered first.

Words: docs/glossary.md.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.experimental import multihost_utils

from sbp.communication.key_samples import KeySample
from sbp.compat.untyped import Leaf
from sbp.passes.program.graph import Const, Graph, Node, Operand
from sbp.runtime.lower.reference_interpreter import Tensor, evaluate

# Ids are made of a batch by a handful of small ops; what is more than that is not worth running twice.
MOST_OPS, MOST_ELEMENTS = 200, 1 << 26


def ids_of(node: Node) -> tuple[Operand, ...]:
    """The operands of an op that are ids of rows of a table."""
    if node.rule is None or node.rule.ids is None:
        return ()
    return tuple(node.inputs[i] for i in node.rule.ids(node.params, len(node.inputs)))


def with_samples(graph: Graph, example: Sequence[Leaf], again: bool = False) -> Graph:
    """The graph whose lookups know the ids of one batch, if these follow from the arguments.

    Arguments:
      example: the leaves of the arguments; only arrays have known values.
      again: whether the batch replaces an earlier one that others were not like.
    """
    if not any(ids_of(node) for node in graph.nodes):
        return graph
    consts = zip(graph.inputs[len(graph.inputs) - len(graph.consts) :], graph.consts, strict=True)
    every = [*zip(graph.inputs, example, strict=False), *consts]
    given = {v: x for v, x in every if is_known(x)}
    known: dict[Operand, KeySample | None] = {}
    nodes = []
    for node in graph.nodes:
        samples = tuple(_sample(graph, x, given, known, again) for x in ids_of(node))
        if samples and None not in samples:
            node = replace(node, params={**node.params, "samples": samples})
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def is_known(x: object) -> bool:
    """Whether the values of an argument are known to all processes of the program, or can be gathered."""
    return isinstance(x, np.ndarray | jax.Array)


def whole(x: Tensor) -> Tensor:
    """An array as one process has it; an array on devices of several is gathered in each of them."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        gathered: Tensor = multihost_utils.process_allgather(x, tiled=True)
        return gathered
    return jax.numpy.asarray(x)


def lacks_samples(graph: Graph) -> bool:
    """Whether a lookup was planned without a batch."""
    return any(node.params.get("samples") == () for node in graph.nodes if ids_of(node))


def _sample(
    graph: Graph,
    ids: Operand,
    given: Mapping[int, Tensor],
    known: dict[Operand, KeySample | None],
    again: bool,
) -> KeySample | None:
    """The ids of the batch; `known` holds earlier ones, so that equal ids are one sample."""
    if ids not in known:
        value = ids.value if isinstance(ids, Const) else _computed(graph, ids, given)
        known[ids] = None if value is None else KeySample(np.asarray(value), again)
    return known[ids]


def _computed(graph: Graph, wanted: int, given: Mapping[int, Tensor]) -> Tensor | None:
    """A value, computed op by op from the arguments; None if that needs other values, loops or much work."""
    nodes = list(_needed(graph, wanted, given))
    results = [graph.values[v] for node in nodes for v in node.outputs]
    small = sum(int(np.prod(v.shape)) for v in results) <= MOST_ELEMENTS
    makes = {v for node in nodes for v in node.outputs} | set(given)
    reads = {x for node in nodes for x in node.inputs if not isinstance(x, Const)} | {wanted}
    if not small or len(nodes) > MOST_OPS or not reads <= makes or any(node.bodies for node in nodes):
        return None
    return evaluate(nodes, {v: whole(given[v]) for v in sorted(reads) if v in given}, [wanted])[0]


def _needed(graph: Graph, wanted: int, given: Mapping[int, Tensor]) -> Iterable[Node]:
    """The ops that a value needs, in order."""
    needed, found = {wanted}, list[Node]()
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            found.append(node)
            needed.update(x for x in node.inputs if not isinstance(x, Const))
    return reversed(found)
