"""Collectives that XLA cannot send together with others, though they send hardly a byte.

The search adds up moves, each with a latency of its own, and XLA sends moves of one kind as one. So the
gather of a loss seems cheaper than its all-reduce, which would leave with those of the gradients.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from sbp.passes.physical.evaluate import Evaluator, executed
from sbp.passes.physical.program import Box
from sbp.passes.plan.model import Model
from sbp.passes.plan.network import CostNetwork, Table

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


def sent_bytes(takes: Evaluator) -> float:
    """What one device sends in the moves of a program."""
    return sum(
        e.times * takes.box_bytes(e.step) for e in executed(takes.physical.steps) if isinstance(e.step, Box)
    )


def network_without(model: Model, network: CostNetwork, moves: Sequence[Box]) -> CostNetwork:
    """The network in which values are not moved so.

    Arguments:
      model, network: as `Model.build` has made them.
    """
    values = defaultdict[int, list[Box]](list)
    for box in moves:
        values[box.value].append(box)
    edges = [
        (i, j, _forbidden(model, e, table, values[v])) if v in values else (i, j, table)
        for e, ((i, j, table), v) in enumerate(zip(network.edges, model.edge_values, strict=True))
    ]
    return CostNetwork(network.unary, tuple(edges))


def _forbidden(model: Model, edge: int, table: Table, moves: Sequence[Box]) -> Table:
    """The table of an edge, infinite where it needs one of these moves."""
    indexed, boxing = model.edges[edge][2], model.boxing(moves[0].value)
    needs = np.zeros(table.shape, dtype=bool)
    for box in moves:
        before, after = boxing.index[box.move.before], boxing.index[box.move.after]
        # Columns behind those of the signatures are of ops that take a sum as a sum.
        needs |= (indexed.rows == before)[:, None] & (indexed.columns % len(boxing.universe) == after)[None]
    return np.where(needs, np.inf, table)
