"""What XLA's scheduler takes products of matrices to be, whatever they take.

Its tables and its formulas are in `sbp.rates.beliefs`; here is what an op of a program is to them.
"""

from __future__ import annotations

from sbp import compat
from sbp.passes.boxing.links import Network
from sbp.passes.plan.candidates import Strategy
from sbp.passes.plan.cost import node_work
from sbp.passes.program.graph import Graph, Node
from sbp.rates.beliefs import Product, believed_product_seconds


def believed_product(graph: Graph, node: Node, strategy: Strategy, network: Network) -> float:
    """The seconds that the scheduler takes a product to be; on a device of which nothing is known, what its
    arithmetic takes."""
    work = node_work(graph, node, strategy, network.placement.shape)
    product, chip = work.product, network.hardware.chip
    if product is None or not chip:
        return work.arithmetic_seconds(network.hardware)
    result = graph.values[node.outputs[0]].dtype
    wide = max(product.dtypes, key=compat.itemsize)
    b, m, n, k = (max(1, x) for x in (product.batch, product.m, product.n, product.k))
    sizes = int(compat.itemsize(wide)), int(compat.itemsize(result))
    return believed_product_seconds(chip, Product(b, m, n, k, str(wide), str(result), *sizes))
