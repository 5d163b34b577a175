"""Costs: the roofline time of a local op."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sbp import compat
from sbp.layout import local_shape
from sbp.passes.boxing.links import Network
from sbp.passes.plan.candidates import Strategy
from sbp.passes.program.graph import Graph, Node
from sbp.passes.program.views import op_of, talks_of
from sbp.rules.entry import element_flops, element_traffic
from sbp.signature import NdSbp
from sbp.talk.local import Talk
from sbp.untyped import DType

# The share of an element-wise op's memory traffic that is left once it is fused with its neighbours.
FUSED_TRAFFIC = 0.25


def local_bytes(shape: Sequence[int], dtype: DType, nd: NdSbp, hierarchy: Sequence[int]) -> float:
    """Bytes of one device's shard, padding included."""
    return math.prod(local_shape(shape, nd, hierarchy)) * compat.itemsize(dtype)


def talk_seconds(talk: Talk, network: Network) -> float:
    """The time of a collective inside an op."""
    latency, rate = network.link(talk.axes)
    return latency + talk.wire_bytes / rate


def node_seconds(graph: Graph, node: Node, strategy: Strategy, network: Network) -> float:
    """The larger of arithmetic and memory time of one op on one device (roofline, Williams et al., 2009).

    What the op says to other devices is added.
    """
    hierarchy, hardware = network.placement.shape, network.hardware
    rule = node.rule
    operands = [graph.operand(x) for x in node.inputs]
    results = [graph.values[v] for v in node.outputs]
    ins = [local_shape(v.shape, nd, hierarchy) for v, nd in zip(operands, strategy.operands, strict=True)]
    outs = [local_shape(v.shape, nd, hierarchy) for v, nd in zip(results, strategy.results, strict=True)]
    op = op_of(graph, node, ins, outs, 1)
    flops = rule.flops(op) if rule is not None else element_flops(op)
    traffic = rule.traffic(op) if rule is not None else element_traffic(op)
    if rule is not None and rule.fused:
        traffic *= FUSED_TRAFFIC
    rate = hardware.vector_flops_per_second
    if rule is not None and rule.matmul is not None:
        rate = hardware.flops(max(1, int(max(map(compat.itemsize, rule.matmul(op).dtypes)))))
    talking = sum(talk_seconds(t, network) for t in talks_of(graph, node, strategy.lying, hierarchy))
    return max(flops / rate, traffic / hardware.memory_bytes_per_second) + talking
