"""Collectives that XLA cannot send together with others, though they send hardly a byte.

The search adds up moves, each with a latency of its own, and XLA sends moves of one kind as one. So the
gather of a loss seems cheaper than its all-reduce, which would leave with those of the gradients.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

from sbp.passes.boxing.paths import Boxing
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.program import Box
from sbp.passes.plan.indexed import IndexedTable
from sbp.passes.plan.model import Model
from sbp.passes.plan.network import CostNetwork, Table
from sbp.signature import NdSbp

LATENCIES = 2.0
"""A collective that takes no more than so many of its latencies sends hardly a byte."""


def lone_moves(takes: Evaluator) -> list[Box]:
    """The moves that send hardly a byte, and leave with no other; those of loops' bodies are left alone."""
    together = {i for members in takes.whole.together for i in members}
    return [
        op.step
        for i, op in enumerate(takes.whole.k.ops)
        if isinstance(op.step, Box) and i not in together and _is_small(takes, op.step)
    ]


def _is_small(takes: Evaluator, box: Box) -> bool:
    if takes.box_bytes(box) <= 0 or takes.combines(box) is None:
        return False
    latency = takes.network.collective_seconds(box.move.kind, box.move.axes, 0.0)
    return takes.box_seconds(box) <= LATENCIES * latency


def exposed_moves(takes: Evaluator, least_seconds: float) -> list[list[Box]]:
    """The moves that kernels wait for, those of equal tensors together, the longest wait first.

    Arguments:
      least_seconds: what is waited for less is left out.
    """
    run, graph = takes.scheduled(), takes.physical.graph
    waits, moves = defaultdict[Hashable, float](float), defaultdict[Hashable, list[Box]](list)
    for step in takes.physical.steps:
        if isinstance(step, Box) and step.value < len(graph.values) and takes.box_bytes(step) > 0:
            value = graph.values[step.value]
            key = value.shape, str(value.dtype), step.move
            waits[key] += run.exposed_of(step)
            moves[key].append(step)
    order = sorted((key for key in waits if waits[key] > least_seconds), key=lambda key: -waits[key])
    return [moves[key] for key in order]


def network_without(model: Model, network: CostNetwork, moves: Sequence[Box]) -> CostNetwork:
    """The network in which values are not moved so.

    Arguments:
      model, network: as `Model.build` has made them.
    """
    values = defaultdict[int, list[tuple[NdSbp, NdSbp]]](list)
    for box in moves:
        values[box.value].append((box.move.before, box.move.after))
    known, edges = dict[Hashable, Table](), list[tuple[int, int, Table]]()
    for e, ((i, j, table), v) in enumerate(zip(network.edges, model.edge_values, strict=True)):
        if v in values:
            # Tables that are one stay one: what the solver finds of a layer serves all of them.
            key = id(table), id(model.edges[e][2]), tuple(values[v])
            if key not in known:
                known[key] = _forbidden(model.edges[e][2], model.boxing(v), table, values[v])
            table = known[key]
        edges.append((i, j, table))
    return CostNetwork(network.unary, tuple(edges))


def _forbidden(
    indexed: IndexedTable, boxing: Boxing, table: Table, moves: Sequence[tuple[NdSbp, NdSbp]]
) -> Table:
    """The table of an edge, infinite where it needs one of these moves."""
    needs = np.zeros(table.shape, dtype=bool)
    for before, after in moves:
        # Columns behind those of the signatures are of ops that take a sum as a sum.
        columns = indexed.columns % len(boxing.universe) == boxing.index[after]
        needs |= (indexed.rows == boxing.index[before])[:, None] & columns[None]
    return np.where(needs, np.inf, table)
