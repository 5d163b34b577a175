"""What XLA's scheduler takes products of matrices to be, whatever they take.

Its tables and its formulas are in `sbp.rates.beliefs`; here is what an op of a program is to them.
"""

from sbp.compat import core
from sbp.hardware.catalogue import hardware_for
from sbp.passes.boxing.links import Network
from sbp.passes.plan.candidates import Strategy
from sbp.passes.plan.cost import OpWork, node_work
from sbp.passes.program.graph import Graph, Node
from sbp.placement import Placement
from sbp.rates.beliefs import Product, believed_product_seconds, parts_of
from sbp.rates.chips import CHIPS


def believed_product(graph: Graph, node: Node, strategy: Strategy, network: Network) -> float:
    """The seconds that the scheduler takes a product to be; on a device of which nothing is known, what its
    arithmetic takes."""
    work = node_work(graph, node, strategy, network.placement.shape)
    product, chip = product_of(graph, node, work), network.hardware.chip
    if product is None or not chip:
        return work.arithmetic_seconds(network.hardware)
    return believed_product_seconds(chip, product)


def parts_bytes(graph: Graph, node: Node, strategy: Strategy, placement: Placement) -> float:
    """What the parts take of a product whose k XLA splits; 0 if it does not."""
    chip = hardware_for(placement.kind).chip if placement.platform == "gpu" else ""
    product = product_of(graph, node, node_work(graph, node, strategy, placement.shape)) if chip else None
    if product is None or node.op != "dot_general":
        return 0.0
    parts = parts_of(CHIPS[chip], product)
    return float(parts * product.batch * product.m * product.n * product.sum_bytes) if parts > 1 else 0.0


def product_of(graph: Graph, node: Node, work: OpWork) -> Product | None:
    """The product that an op is, with its types; None for another op."""
    product = work.product
    if product is None:
        return None
    result = graph.values[node.outputs[0]].dtype
    wide = max(product.dtypes, key=core.itemsize)
    b, m, n, k = (max(1, x) for x in (product.batch, product.m, product.n, product.k))
    sizes = int(core.itemsize(wide)), int(core.itemsize(result))
    return Product(b, m, n, k, str(wide), str(result), *sizes)
