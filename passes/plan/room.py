"""What the signatures of a model keep in memory, as loads beside its cost network.

Counted are values that are written (arguments all the time), as they are made, and what they are boxed to
where several use it. Left out: what one op alone has boxed, and what collectives and bodies hold inside. So
it is less than a plan needs, and the evaluator has the last word (passes/physical/fit.py).
"""

from __future__ import annotations

import numpy as np

from sbp.passes.plan.budget import Load
from sbp.passes.plan.cost import local_bytes
from sbp.passes.plan.model import Model
from sbp.passes.plan.network import CostNetwork, Table
from sbp.signature import NdSbp

SMALL = 1e-4
"""Copies of tensors below this part of the limit are not counted: each takes a variable."""


def loads_of(model: Model, limit_bytes: float) -> tuple[CostNetwork, tuple[Load, ...]]:
    """The network of a built model with variables for copies, and what its variables keep in memory."""
    network = model.network().dense()
    updated = {x for x, tie in zip(model.graph.outputs, model.boundary.ties, strict=True) if tie is not None}
    loads: list[Load] = []
    unary, edges = list(network.unary), list(network.edges)
    for life in model.c.lives:
        v, value = life.value, model.graph.values[life.value]
        supply = model.supply.get(v)
        if supply is None:
            continue
        if v not in updated:  # new state takes the place of the old
            loads.append(Load(supply.variable, life.start, life.end, _bytes(model, v, supply.needs)))
        if v not in model.shares or local_bytes(value.shape, value.dtype, (), ()) < SMALL * limit_bytes:
            continue
        share = model.shares[v]
        shared: tuple[NdSbp, ...] = tuple(model.states[share])
        sizes = _bytes(model, v, shared)
        # Two states for each signature of the share: it is a copy, or the value is made so.
        n = len(shared)
        unary.append(np.zeros(2 * n))
        match = np.where(np.eye(n, dtype=bool), 0.0, np.inf)
        same = np.array([[a == b for b in shared] for a in supply.needs])
        made = np.where(same, 0.0, np.inf)
        edges.append((share, len(unary) - 1, np.hstack([match, match])))
        edges.append((supply.variable, len(unary) - 1, np.hstack([np.zeros(made.shape), made])))
        loads.append(Load(len(unary) - 1, life.first, life.last, np.concatenate([sizes, np.zeros(n)])))
    return CostNetwork(tuple(unary), tuple(edges)), tuple(loads)


def _bytes(model: Model, v: int, signatures: tuple[NdSbp, ...]) -> Table:
    """Of a device's part of a value under each signature."""
    value, hierarchy = model.graph.values[v], model.c.placement.shape
    key = "bytes", value.shape, str(value.dtype), id(signatures)
    if key not in model.columns:
        # The signatures stay beside their sizes, so that no others come to have their id.
        sizes = np.array([local_bytes(value.shape, value.dtype, nd, hierarchy) for nd in signatures])
        model.columns[key] = sizes, signatures
    found: Table = model.columns[key][0]
    return found
