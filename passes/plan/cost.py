"""Costs: the roofline time of a local op."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sbp.communication.protocol import Communication
from sbp.compat import core
from sbp.compat.untyped import DType
from sbp.hardware.catalogue import Hardware
from sbp.layout import local_shape
from sbp.passes.boxing.links import Network
from sbp.passes.plan.candidates import Strategy
from sbp.passes.plan.traffic import OpTraffic
from sbp.passes.program.graph import Graph, Node
from sbp.passes.program.views import communication_of, op_of
from sbp.rules.entry import Matmul, Op, Rule, element_flops, element_traffic
from sbp.signature import NdSbp

_Shape = tuple[int, ...]
_Shapes = tuple[_Shape, ...]
_Tensor = tuple[_Shape, dict[NdSbp, _Shape]]
Shards = dict[_Shape, dict[NdSbp, _Shape]]
"""By the shape of a tensor and how it lies: the shape of one device's shard."""


def local_bytes(shape: Sequence[int], dtype: DType, nd: NdSbp, hierarchy: Sequence[int]) -> float:
    """Bytes of one device's shard, padding included."""
    return math.prod(local_shape(shape, nd, hierarchy)) * core.itemsize(dtype)


def communication_seconds(communication: Communication, network: Network) -> float:
    """The time of a collective inside an op."""
    return network.collective_seconds(communication.kind, communication.axes, communication.wire_bytes)


@dataclass(frozen=True, slots=True)
class OpWork:
    """What one device does for an op, once.

    Arguments:
      product: the matrix products that it computes; None for element-wise work.
      flops: of element-wise work.
      traffic_bytes: to and from memory.
      launches: whether it writes to memory, and so is, or ends, a kernel.
      communication: what it sends itself.
    """

    product: Matmul | None
    flops: float
    traffic_bytes: float
    launches: bool
    communication: tuple[Communication, ...] = ()

    def arithmetic_seconds(self, hardware: Hardware) -> float:
        """Of its arithmetic alone."""
        p = self.product
        if p is None:
            return self.flops / hardware.vector_flops_per_second
        itemsize = max(map(core.itemsize, p.dtypes))
        sizes = p.batch, p.m, p.n, p.k, itemsize
        return hardware.fused_seconds(*sizes) if p.fused else hardware.product_seconds(*sizes, exact=p.exact)

    def seconds(self, hardware: Hardware) -> float:
        """The larger of arithmetic and memory time, and the launch of a kernel; without what is sent."""
        memory = self.traffic_bytes / hardware.memory_bytes_per_second
        launch = hardware.launch_seconds if self.launches else 0.0
        return max(self.arithmetic_seconds(hardware), memory) + launch


def node_work(
    graph: Graph, node: Node, strategy: Strategy, hierarchy: tuple[int, ...], traffic: OpTraffic | None = None
) -> OpWork:
    """What one device does for an op; arguments as of `node_seconds`."""
    operands = [graph.operand(x).shape for x in node.inputs]
    results = [graph.values[v].shape for v in node.outputs]
    ins = tuple(local_shape(x, nd, hierarchy) for x, nd in zip(operands, strategy.operands, strict=True))
    outs = tuple(local_shape(x, nd, hierarchy) for x, nd in zip(results, strategy.results, strict=True))
    communication = tuple(communication_of(graph, node, strategy.signatures, hierarchy))
    return _local_work(graph, node, ins, outs, traffic, communication)


def node_seconds(
    graph: Graph, node: Node, strategy: Strategy, network: Network, traffic: OpTraffic | None = None
) -> float:
    """The larger of arithmetic and memory time of one op on one device (roofline, Williams et al., 2009).

    What the op says to other devices is added, and the launch of a kernel if it writes to memory.

    Arguments:
      traffic: what goes through memory; None if nothing is merged.
    """
    return seconds_of(graph, node, (strategy,), network, traffic, {})[0]


def seconds_of(
    graph: Graph,
    node: Node,
    strategies: Sequence[Strategy],
    network: Network,
    traffic: OpTraffic | None,
    shards: Shards,
) -> list[float]:
    """`node_seconds` of many strategies; work is found once for all that leave shards of equal shapes.

    Arguments:
      shards: the shapes of shards that are known already, which grow.
    """
    computed = kernel_seconds_of(graph, node, strategies, network, traffic, shards)
    return [
        seconds + sent_seconds(graph, node, s, network)
        for s, seconds in zip(strategies, computed, strict=True)
    ]


def sent_seconds(graph: Graph, node: Node, strategy: Strategy, network: Network) -> float:
    """The time of what an op sends itself."""
    sent = communication_of(graph, node, strategy.signatures, network.placement.shape)
    return sum(communication_seconds(t, network) for t in sent)


def kernel_seconds_of(
    graph: Graph,
    node: Node,
    strategies: Sequence[Strategy],
    network: Network,
    traffic: OpTraffic | None,
    shards: Shards,
) -> list[float]:
    """The same without what the op sends itself."""
    hierarchy = network.placement.shape
    operands = [(x.shape, shards.setdefault(x.shape, {})) for x in map(graph.operand, node.inputs)]
    results = [(x.shape, shards.setdefault(x.shape, {})) for x in map(graph.values.__getitem__, node.outputs)]
    known: dict[tuple[_Shapes, _Shapes], float] = {}

    def lying(tensors: list[_Tensor], nds: Sequence[NdSbp]) -> _Shapes:
        found = []
        for (shape, made), nd in zip(tensors, nds, strict=True):
            local = made.get(nd)
            if local is None:
                local = made[nd] = local_shape(shape, nd, hierarchy)
            found.append(local)
        return tuple(found)

    found = []
    for s in strategies:
        key = lying(operands, s.operands), lying(results, s.results)
        if key not in known:
            known[key] = _local_work(graph, node, *key, traffic).seconds(network.hardware)
        found.append(known[key])
    return found


def _local_work(
    graph: Graph,
    node: Node,
    ins: _Shapes,
    outs: _Shapes,
    traffic: OpTraffic | None,
    communication: tuple[Communication, ...] = (),
) -> OpWork:
    """The work of an op on shards of these shapes."""
    rule, op = node.rule, op_of(graph, node, ins, outs, 1)
    product = rule.matmul(op) if rule is not None and rule.matmul is not None else None
    flops = 0.0
    if product is None:
        flops = rule.flops(op) if rule is not None else element_flops(op)
    written = traffic is None or any(traffic.writes)
    return OpWork(product, flops, _traffic_bytes(op, rule, traffic), written, communication)


def _traffic_bytes(op: Op, rule: Rule | None, traffic: OpTraffic | None) -> float:
    """Bytes that an op moves to and from memory, with local shapes."""
    if traffic is None:
        return rule.traffic(op) if rule is not None else element_traffic(op)
    reads, writes = (
        [math.prod(s) * core.itemsize(d) for s, d in zip(shapes, dtypes, strict=True)]
        for shapes, dtypes in ((op.shapes, op.dtypes), (op.results, op.result_dtypes))
    )
    if rule is not None and rule.traffic is not element_traffic:
        # What a rule says of rows that are read, or changed in place, holds merged or not.
        return rule.traffic(op) + (traffic.written_bytes(writes) if traffic.in_place else 0.0)
    return traffic.bytes(reads, writes)
