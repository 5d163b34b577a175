"""What a step is to a compiler that merges ops into kernels.

- A *view* (a reshape, a transpose, an op that changes nothing) is its operand under another name: layouts are
  chosen so that it costs nothing.
- A *loop* (element-wise ops, broadcasts, slices, gathers) may be computed wherever it is read.
- A *root* (a reduction, a scatter) is written, and computes the loops that it reads.
- A *call* (a product of matrices, a collective, a sort, a loop of the program) reads and writes memory alone;
  but a product computes of its operands what one other tensor and scalars, or rows of an argument, give.

Rows that are reduced and read again, as in a softmax or a norm, are a *diamond*. XLA:GPU makes one kernel of
`x -> reduction of its rows -> op(x, reduction)` before it merges anything else (softmax_rewriter_triton.cc),
also where several follow each other, and reads a whole row before it writes any of it. Loops and reductions
of the same rows compute what the last of them gives, and the reduction with it; for anything else it is
written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

from sbp.compat import core
from sbp.compat.core import itemsize
from sbp.hardware.catalogue import hardware_for
from sbp.passes.boxing.links import Network
from sbp.passes.physical.program import (
    Border,
    Box,
    Compute,
    Physical,
    Step,
    Version,
    inner_steps,
    reads,
    writes,
)
from sbp.passes.plan.candidates import Strategy
from sbp.passes.plan.cost import OpWork, local_bytes, node_work
from sbp.passes.program.control import ports, summed_ports
from sbp.passes.program.graph import Const, Graph, Node
from sbp.passes.program.views import communication_of, held_bytes
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


@dataclass(frozen=True)
class ShardSizes:
    """How large the tensors of a physical program are."""

    physical: Physical
    sizes: dict[Version, float] = field(default_factory=dict, compare=False, repr=False)

    def shape(self, value: int) -> tuple[int, ...]:
        """The logical shape of a value."""
        return self.physical.graph.values[value].shape

    def bytes(self, version: Version) -> float:
        """The bytes of one device's shard of a value under a signature, padding included."""
        # Asked several times for each of tens of thousands.
        found = self.sizes.get(version)
        if found is None:
            value, nd = self.physical.graph.values[version[0]], version[1]
            found = local_bytes(value.shape, value.dtype, nd, self.physical.placement.shape)
            self.sizes[version] = found
        return found

    def elements(self, version: Version) -> float:
        """The number of elements of one device's shard."""
        return self.bytes(version) / itemsize(self.physical.graph.values[version[0]].dtype)


class Fusing(StrEnum):
    """What an op is to fusion."""

    VIEW = "view"
    LOOP = "loop"
    ROOT = "root"
    CALL = "call"


# Of ops whose rule does not say it: it says which are element-wise, and which change nothing.
KINDS: Mapping[str, Fusing] = {
    # A library takes the reverse of a kernel as a parameter: an input gradient is a convolution of its own.
    **dict.fromkeys("reshape squeeze transpose rev".split(), Fusing.VIEW),
    **dict.fromkeys("concatenate dynamic_slice gather split stack unstack".split(), Fusing.LOOP),
    **dict.fromkeys("reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_xor".split(), Fusing.ROOT),
    **dict.fromkeys("reduce_prod reduce argmax argmin dynamic_update_slice".split(), Fusing.ROOT),
    **dict.fromkeys(
        "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub".split(), Fusing.ROOT
    ),
}
MOVES: Mapping[str, Fusing] = {
    "keep": Fusing.VIEW,
    **dict.fromkeys(("slice", "fill", "embed"), Fusing.LOOP),
}
PARTIAL = frozenset("dynamic_slice gather slice split unstack".split())
"""Loops that read no more of their operands than they give."""
PROLOGUES = frozenset(
    "add sub mul div max min neg abs sqrt rsqrt cbrt exp expm1 log log1p sin cos tan tanh erf logistic "
    "floor ceil convert_element_type broadcast_in_dim".split()
)
"""Loops that a product of matrices computes as it reads an operand, if it reads no more for it: those that
the Triton emitter has (`IsTritonSupportedElementwise`, support_legacy.cc)."""
PRODUCTS = frozenset(["dot_general"])
"""Calls that compute such loops: all products are Triton fusions where XLA cannot measure those of cuBLAS."""
COSTLY = frozenset(["random_bits"])
"""Loops that take longer to compute than to read."""
IN_PLACE = frozenset(["dynamic_update_slice", "sbp_update_rows", "sbp_add_rows"])
"""Ops beside scatters that change their first operands in place, one per result, if nobody needs them any
more."""


@dataclass(slots=True)
class KernelOp:
    """A step, as fusion sees it.

    Arguments:
      reads, writes: versions.
      straight: of what it reads, which it reads element by element, each where it writes it: the result may
        take that space.
      loop_updates: of what a call reads, what a loop changes for it first, and so needs not be written
        itself.
      product: whether it holds a product of matrices.
      sends: whether it holds a collective.
      held_bytes: what a device holds inside of it, beside what it reads and writes.
      step: None for a slice of a scanned tensor that enters, or leaves.
      combines: of a collective, with those of which type it may be sent as one; "" if with none.
      peeled: whether it is of the first trip of a loop, and runs before that.
      name: what it is called; "" for a move.
    """

    kind: Fusing
    reads: Sequence[Version]
    writes: Sequence[Version]
    straight: frozenset[Version] = frozenset()
    loop_updates: frozenset[Version] = frozenset()
    product: bool = False
    sends: bool = False
    held_bytes: float = 0.0
    step: Step | None = None
    combines: str = ""
    peeled: bool = False
    name: str = field(init=False)

    def __post_init__(self) -> None:
        step = self.step  # its name is asked for by everybody
        self.name = "" if step is None or isinstance(step, Box) else step.node.op


Seconds: TypeAlias = Callable[..., float]
"""How long an op takes, or collectives that are sent as one."""


def op_of(step: Step, physical: Physical) -> KernelOp:
    """A step of a program as an op."""
    read, written = reads(step), writes(step)
    if isinstance(step, Box):
        kind = MOVES.get(step.move.kind, Fusing.CALL)
        # XLA lets an all-reduce write over its operand (all of its buffers may be shared).
        over = step.move.kind in ("all_reduce", "fill")
        sends, is_gpu = step.move.is_collective, physical.placement.platform == "gpu"
        dtype = str(physical.graph.values[step.value].dtype) if sends and is_gpu else ""
        same = frozenset(read if over else ())
        return KernelOp(kind, read, written, same, sends=sends, step=step, combines=dtype)
    if isinstance(step, Border):
        wired = ports(step.node)
        summed = set(summed_ports(step.node, wired, step.inner_signatures).values())
        carried = {
            (x, p.outer(nd))
            for i, (p, nd) in enumerate(zip(wired, step.inner_signatures, strict=True))
            if p.operand is not None and (p.result is not None or i in summed)
            for x in [step.node.inputs[p.operand]]
            if isinstance(x, int)
        }
        inner = [op_of(s, physical) for s in inner_steps(step)]
        product, sends = any(op.product for op in inner), any(op.sends for op in inner)
        return KernelOp(
            Fusing.CALL, read, written, frozenset(carried), product=product, sends=sends, step=step
        )
    node, rule, name = step.node, step.node.rule, step.node.op
    by_element = rule is not None and rule.pointwise
    straight: Sequence[Version] = read if by_element or name in ("reshape", "squeeze") else ()
    if not straight and changes_in_place(name):
        pairs = zip(node.inputs[: len(written)], step.strategy.operands, strict=False)
        straight = [(x, nd) for x, nd in pairs if not isinstance(x, Const)]
    product = rule is not None and rule.matmul is not None
    sends, held = False, 0.0
    if product:
        held = parts_bytes(physical.graph, node, step.strategy, physical.placement)
    if rule is not None and (rule.communication is not None or rule.body_bytes is not None):
        where = physical.graph, node, step.strategy.signatures, physical.placement.shape
        sends, held = bool(communication_of(*where)), held + held_bytes(*where)
    changed = frozenset(read[:1] if name == "conv_general_dilated" and is_padded(node.params) else ())
    return KernelOp(kind_of(node), read, written, frozenset(straight), changed, product, sends, held, step)


def changes_in_place(name: str) -> bool:
    """Whether an op changes its first operands, one per result, where they lie."""
    return name in IN_PLACE or name.startswith("scatter")


def kind_of(node: Node) -> Fusing:
    """What an op is to fusion, if it is neither a loop of the program nor a branch."""
    rule, name = node.rule, node.op
    if rule is None or name in KINDS:
        return KINDS.get(name, Fusing.CALL)
    return Fusing.VIEW if rule.identity else Fusing.LOOP if rule.fused or rule.pointwise else Fusing.CALL


def is_padded(params: Mapping[str, Any]) -> bool:
    """Whether the image of a convolution is padded before the call: cuDNN pads alike on both sides."""
    uneven = any(low != high for low, high in params["padding"])
    return uneven and all(d == 1 for d in params["lhs_dilation"])


LONGEST_ROW = 32_768
"""Longer rows are reduced in two steps (`RowReductionRaceFreeBound`: 32 threads, 1,024 elements each)."""
REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min".split())


class Storage(Protocol):
    """What an op reads: the positions of its maker and of all ops that read it, and how large it is."""

    maker: int
    bytes: float
    users: list[int]


def diamonds(
    ops: Sequence[KernelOp], reads: Sequence[Sequence[tuple[Storage, bool]]], sizes: ShardSizes
) -> dict[int, int]:
    """The ops that read rows and their reduction, which nobody else reads, each with the position of the
    reduction.

    Arguments:
      reads: per op, the tensors that it reads, views looked through.
    """

    def is_shared(t: Storage) -> bool:
        return sum(ops[k].kind is not Fusing.VIEW for k in t.users) > 1

    found, begins = dict[int, int](), _beginnings(ops, reads)
    for i, op in enumerate(ops):
        if op.kind is not Fusing.LOOP or len(reads[i]) < 2 or not isinstance(op.step, Compute):
            continue
        for t, _ in reads[i]:
            at = begins[t.maker] if t.maker >= 0 else -1
            if not reduces_rows(ops, at, sizes) or any(is_shared(x) for x in _line(ops, reads, t)):
                continue
            rows = {id(x) for x in _line(ops, reads, reads[at][0][0])}
            others = (x for y, _ in reads[i] if y is not t for x in _line(ops, reads, y))
            if any(id(x) in rows for x in others):
                found[i] = at
    return found


def _beginnings(ops: Sequence[KernelOp], reads: Sequence[Sequence[tuple[Storage, bool]]]) -> list[int]:
    """Per op, which op makes the last tensor of the line of its result; -1 for none."""
    found = list[int]()
    for i, (op, read) in enumerate(zip(ops, reads, strict=True)):
        is_link = op.kind is Fusing.LOOP and len(read) == 1
        maker = read[0][0].maker if is_link else i
        found.append(found[maker] if 0 <= maker < i else maker)
    return found


def _line(
    ops: Sequence[KernelOp], reads: Sequence[Sequence[tuple[Storage, bool]]], t: Storage
) -> Iterator[Storage]:
    """A tensor, and those that it is computed of by loops that read one tensor each."""
    yield t
    while t.maker >= 0 and ops[t.maker].kind is Fusing.LOOP and len(reads[t.maker]) == 1:
        t = reads[t.maker][0][0]
        yield t


def reduces_rows(ops: Sequence[KernelOp], i: int, sizes: ShardSizes) -> bool:
    """Whether an op reduces the rows of a tensor, each of which fits into one block of threads."""
    op = ops[i]
    if i < 0 or op.name not in REDUCTIONS or not isinstance(op.step, Compute):
        return False
    read, written = op.reads[0], op.writes[0]
    if tuple(op.step.node.params["axes"]) != (len(sizes.shape(read[0])) - 1,):
        return False
    return 1 < sizes.elements(read) / max(sizes.elements(written), 1) <= LONGEST_ROW
