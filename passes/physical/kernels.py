"""What a compiler makes of the steps of one body: kernels, and the tensors between them.

XLA:GPU writes few of a program's tensors to memory. This is the part of its fusion that memory depends on:

- A *view* (a reshape, a transpose, an op that changes nothing) is its operand under another name: layouts are
  chosen so that it costs nothing.
- A *loop* (element-wise ops, broadcasts, slices, gathers) is merged into all that read it, each of which
  computes it again, as long as that moves fewer bytes than writing it once; then who reads it reads its
  operands. XLA's priority fusion compares the same (priority_fusion.cc, gpu_performance_model.cc).
- A *root* (a reduction, a scatter) is written, and merges what it reads.
- A *call* (a product of matrices, a collective, a sort, a loop of the program) reads and writes memory alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from sbp.compat import itemsize
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
from sbp.passes.plan.cost import local_bytes
from sbp.passes.program.control import ports
from sbp.passes.program.graph import Const


@dataclass(frozen=True)
class Shards:
    """How large the tensors of a physical program are."""

    physical: Physical
    known: dict[Version, float] = field(default_factory=dict, compare=False, repr=False)

    def shape(self, value: int) -> tuple[int, ...]:
        """The logical shape of a value."""
        return self.physical.graph.values[value].shape

    def bytes(self, version: Version) -> float:
        """The bytes of one device's shard of a value under a signature, padding included."""
        # Asked several times for each of tens of thousands.
        if version not in self.known:
            value, nd = self.physical.graph.values[version[0]], version[1]
            self.known[version] = local_bytes(value.shape, value.dtype, nd, self.physical.placement.shape)
        return self.known[version]

    def elements(self, version: Version) -> float:
        """The number of elements of one device's shard."""
        return self.bytes(version) / itemsize(self.physical.graph.values[version[0]].dtype)


class Kind(StrEnum):
    """What an op is to fusion."""

    VIEW = "view"
    LOOP = "loop"
    ROOT = "root"
    CALL = "call"


# Of ops whose rule does not say it: it says which are element-wise, and which change nothing.
KINDS: Mapping[str, Kind] = {
    # A library takes the reverse of a kernel as a parameter: an input gradient is a convolution of its own.
    **dict.fromkeys("reshape squeeze transpose rev".split(), Kind.VIEW),
    **dict.fromkeys("concatenate dynamic_slice gather split stack unstack".split(), Kind.LOOP),
    **dict.fromkeys("reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_xor".split(), Kind.ROOT),
    **dict.fromkeys("reduce_prod reduce argmax argmin dynamic_update_slice".split(), Kind.ROOT),
    **dict.fromkeys("scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub".split(), Kind.ROOT),
}
MOVES: Mapping[str, Kind] = {"keep": Kind.VIEW, **dict.fromkeys(("slice", "fill", "embed"), Kind.LOOP)}
PARTIAL = frozenset("dynamic_slice gather slice split unstack".split())
"""Loops that read no more of their operands than they give."""
IN_PLACE = frozenset(["dynamic_update_slice", "sbp_update_rows", "sbp_add_rows"])
"""Ops beside scatters that change their first operand in place, if nobody needs it any more."""


@dataclass(slots=True)
class Op:
    """A step, as fusion sees it.

    Arguments:
      reads, writes: versions.
      straight: of what it reads, which it reads element by element, each where it writes it: the result may
        take that room.
      product: whether it holds a product of matrices.
      step: None for a slice of a scanned tensor that enters, or leaves.
    """

    kind: Kind
    reads: Sequence[Version]
    writes: Sequence[Version]
    straight: frozenset[Version] = frozenset()
    product: bool = False
    step: Step | None = None

    @property
    def name(self) -> str:
        """What it is called."""
        return self.step.node.op if isinstance(self.step, Compute | Border) else ""


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor and its readers.

    Arguments:
      maker: the position of the op that makes it; -1 for what is there before.
      written: whether it lies in memory.
      readers: the positions of the kernels that read it, and whether element by element.
    """

    version: Version
    bytes: float
    maker: int
    written: bool = False
    readers: dict[int, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Kernels:
    """The kernels of a body, at the positions of their roots, and the tensors that they leave in memory.

    Arguments:
      ops: all of them; those that are merged, or that nobody needs, are no kernels.
      made, read: per op, what it writes to memory, and reads from there.
      tensors: all in memory, those that are there before first.
      sources: per op, the tensor of each version that it reads; a view is of what it is a view of.
      ends: of each version that is kept, the tensor.
    """

    ops: Sequence[Op]
    made: Sequence[Sequence[Tensor]]
    read: Sequence[Sequence[Tensor]]
    tensors: Sequence[Tensor]
    sources: Sequence[Sequence[Tensor]]
    ends: Mapping[Version, Tensor]

    @property
    def end(self) -> int:
        """The position of who reads what is kept."""
        return len(self.ops)

    def source(self, i: int, operand: int) -> Tensor | None:
        """The tensor that an operand of an op is or is a view of; None for a scalar of the program."""
        op = self.ops[i]
        assert isinstance(op.step, Compute)
        x, nd = op.step.node.inputs[operand], op.step.strategy.operands[operand]
        if isinstance(x, Const):
            return None
        return self.sources[i][list(op.reads).index((x, nd))]

    def runs(self, i: int) -> bool:
        """Whether an op is a kernel."""
        return bool(self.made[i] or self.read[i])


def op_of(step: Step) -> Op:
    """A step as an op."""
    read, written = reads(step), writes(step)
    if isinstance(step, Box):
        kind = MOVES.get(step.move.kind, Kind.CALL)
        # XLA lets an all-reduce write over its operand (all of its buffers may be shared).
        over = step.move.kind in ("all_reduce", "fill")
        return Op(kind, read, written, frozenset(read if over else ()), step=step)
    if isinstance(step, Border):
        wired = zip(ports(step.node), step.inside, strict=True)
        carried = {
            (x, p.outer(nd))
            for p, nd in wired
            if p.operand is not None and p.result is not None
            for x in [step.node.inputs[p.operand]]
            if isinstance(x, int)
        }
        product = any(op_of(s).product for s in inner_steps(step))
        return Op(Kind.CALL, read, written, frozenset(carried), product, step)
    rule, name = step.node.rule, step.node.op
    kind = KINDS.get(name, Kind.CALL)
    if rule is not None and name not in KINDS:
        kind = Kind.VIEW if rule.identity else Kind.LOOP if rule.fused or rule.pointwise else Kind.CALL
    same = rule is not None and rule.pointwise
    over = name in IN_PLACE or name.startswith("scatter")
    straight = read if same or name in ("reshape", "squeeze") else read[:1] if over else ()
    return Op(kind, read, written, frozenset(straight), rule is not None and rule.matmul is not None, step)


def kernels(
    ops: Sequence[Op], shards: Shards, kept: Iterable[Version], held: Iterable[Version] = ()
) -> Kernels:
    """Merges ops into kernels.

    Arguments:
      kept: versions that are needed after the last op.
      held: versions that are there before the first one. What is read and neither held nor made lies
        elsewhere, and is not counted.
    """
    fusion = _Fusion(ops, shards, held)
    fusion.keep(kept)
    for i in reversed(range(len(ops))):
        fusion.place(i)
    return fusion.result(kept)


class _Fusion:
    """Walks the ops backwards: who reads a tensor is known by then, and so whether it is written."""

    def __init__(self, ops: Sequence[Op], shards: Shards, held: Iterable[Version]) -> None:
        self.ops = ops
        self.before: list[Tensor] = []
        self.reads: list[list[tuple[Tensor, bool]]] = []
        self.writes: list[list[Tensor]] = []
        self.last: dict[Version, tuple[Tensor, bool]] = {}
        for v in held:
            self._there(v, shards.bytes(v))
        for i, op in enumerate(ops):
            for v in op.reads:
                if v not in self.last:
                    self._there(v, 0.0)
            read = [(t, straight and v in op.straight) for v in op.reads for t, straight in [self.last[v]]]
            self.reads.append(read)
            if op.kind is Kind.VIEW and read:
                self.writes.append([])
                self.last.update(dict.fromkeys(op.writes, read[0]))
                continue
            made = [Tensor(v, shards.bytes(v), i) for v in op.writes]
            self.writes.append(made)
            self.last.update((t.version, (t, True)) for t in made)

    def _there(self, v: Version, n: float) -> None:
        tensor = Tensor(v, n, -1, written=True)
        self.before.append(tensor)
        self.last[v] = tensor, True

    def keep(self, kept: Iterable[Version]) -> None:
        """What is needed at the end is written."""
        for v in kept:
            tensor, _ = self.last[v]
            tensor.written = True
            tensor.readers[len(self.ops)] = False

    def place(self, i: int) -> None:
        """Makes a kernel of an op, or merges it into its readers."""
        op, made = self.ops[i], self.writes[i]
        if not made and op.kind is Kind.VIEW:
            return
        if op.kind in (Kind.ROOT, Kind.CALL):
            if any(t.readers for t in made) or not op.writes:
                self._kernel(i)
            return
        readers: dict[int, bool] = {}
        for t in made:
            for k, straight in t.readers.items():
                readers[k] = readers.get(k, True) and straight
        if any(t.written for t in made) or (len(readers) > 1 and not self._cheap(i, len(readers))):
            self._kernel(i)
            return
        for t, straight in self.reads[i]:
            for k, beyond in readers.items():
                t.readers[k] = t.readers.get(k, True) and straight and beyond

    def _kernel(self, i: int) -> None:
        for t in self.writes[i]:
            t.written = True
        for t, straight in self.reads[i]:
            t.readers[i] = t.readers.get(i, True) and straight
            # A call reads memory; a loop or a root computes what is not there.
            t.written = t.written or self.ops[i].kind is Kind.CALL

    def _cheap(self, i: int, readers: int) -> bool:
        """Whether to compute a tensor in each reader moves no more bytes than to write and to read it."""
        own = sum(t.bytes for t in self.writes[i])
        partial = self.ops[i].name in PARTIAL
        operands = sum(min(t.bytes, own) if partial else t.bytes for t in {t for t, _ in self.reads[i]})
        return readers * operands <= operands + (1 + readers) * own

    def result(self, kept: Iterable[Version]) -> Kernels:
        """What has come out."""
        made = [[t for t in ts if t.written] for ts in self.writes]
        tensors = [*self.before, *(t for ts in made for t in ts)]
        read: list[list[Tensor]] = [[] for _ in range(len(self.ops) + 1)]
        for t in tensors:
            for k in t.readers:
                read[k].append(t)
        sources = [[t for t, _ in ts] for ts in self.reads]
        return Kernels(self.ops, made, read, tensors, sources, {v: self.last[v][0] for v in kept})
