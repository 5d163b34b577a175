"""What a compiler makes of the steps of one body: kernels, and the tensors that lie in memory between them.

XLA:GPU writes few of a program's tensors. This is the part of its fusion that memory depends on: a loop
(fusion.py) is merged into all that read it, each of which computes it again, as long as that moves fewer
bytes than to write it once and to read it; then who reads it reads its operands instead. XLA compares the
same, producer by producer (priority_fusion.cc, gpu_performance_model.cc). Products of matrices are merged
before that, with what makes their operands of no more than they are themselves (gemm_fusion.cc); whoever else
reads such an operand does not count.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from sbp.passes.physical.fusion import (
    COSTLY,
    PARTIAL,
    PRODUCTS,
    PROLOGUES,
    Fusing,
    KernelOp,
    ShardSizes,
    diamonds,
    op_of,
    reduces_rows,
)
from sbp.passes.physical.program import Box, Compute, Version, barrier_of
from sbp.passes.program.graph import Const

Found = TypeVar("Found")

DEEPEST = 8
"""How many loops that follow each other are looked through."""
NOTHING: frozenset[int] = frozenset()
MORE_BYTES = 1024
"""What a product may read beyond its operand for a loop that makes it (`kIoToleranceBytes`)."""


@dataclass(slots=True, eq=False)
class Buffer:
    """A tensor and its readers.

    Arguments:
      maker: the position of the op that makes it; -1 for what is there before.
      dims: how many it has.
      written: whether it lies in memory.
      readers: the positions of the kernels that read it, and whether element by element.
      users: the positions of all ops that read it or a view of it, merged or not.
    """

    version: Version
    bytes: float
    maker: int
    dims: int = 0
    written: bool = False
    readers: dict[int, bool] = field(default_factory=dict)
    users: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Kernels:
    """The kernels of a body, at the positions of their roots, and the tensors that they leave in memory.

    Arguments:
      ops: all of them; those that are merged, or that nobody needs, are no kernels.
      writes, reads: per op, what it writes to memory, and reads from there.
      tensors: all in memory, those that are there before first.
      sources: per op, the tensor of each version that it reads; a view is of what it is a view of.
      ends: of each version that is kept, the tensor.
      waits: per op, what else it waits for, by who makes that: a barrier lets nothing through before all that
        enters it is there.
      by_rows: who reads whole rows of a tensor before it writes any of them.
      cache: what was found of them already: the same is asked for each order that they may run in.
    """

    ops: Sequence[KernelOp]
    writes: Sequence[Sequence[Buffer]]
    reads: Sequence[Sequence[Buffer]]
    tensors: Sequence[Buffer]
    sources: Sequence[Sequence[Buffer]]
    ends: Mapping[Version, Buffer]
    waits: Sequence[frozenset[int]] = ()
    by_rows: Mapping[Buffer, Collection[int]] = field(default_factory=dict)
    cache: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def memo(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """What was found under a key, or is found now.

        Arguments:
          key: of what it is, and all that it depends on beside these kernels.
        """
        if key not in self.cache:
            self.cache[key] = find()
        found: Found = self.cache[key]
        return found

    @cached_property
    def makers(self) -> Sequence[Sequence[int]]:
        """Per op, the positions of the ops that it waits for."""
        found = [[t.maker for t in read if t.maker >= 0] for read in self.reads[: self.end]]
        for i, behind in enumerate(self.waits):
            if behind:
                found[i].extend(sorted(behind))
        return [list(dict.fromkeys(each)) if len(each) > 1 else each for each in found]

    @property
    def end(self) -> int:
        """The position of who reads what is kept."""
        return len(self.ops)

    def source(self, i: int, operand: int) -> Buffer | None:
        """The tensor that an operand of an op is or is a view of; None for a scalar of the program."""
        op = self.ops[i]
        assert isinstance(op.step, Compute)
        x, nd = op.step.node.inputs[operand], op.step.strategy.operands[operand]
        return None if isinstance(x, Const) else self.sources[i][list(op.reads).index((x, nd))]

    def runs(self, i: int) -> bool:
        """Whether an op is a kernel."""
        return bool(self.writes[i] or self.reads[i])


def kernels(
    ops: Sequence[KernelOp], sizes: ShardSizes, kept: Iterable[Version], held: Iterable[Version] = ()
) -> Kernels:
    """Merges ops into kernels.

    Arguments:
      kept: versions that are needed after the last op.
      held: versions that are there before the first one. What is read and neither held nor made lies
        elsewhere, and is not counted.
    """
    fusion = _Fusion(ops, sizes, held)
    fusion.keep(kept)
    for i in reversed(range(len(ops))):
        fusion.place(i)
    return fusion.result(kept)


def program_kernels(sizes: ShardSizes, known: dict[int, KernelOp] | None = None) -> Kernels:
    """The kernels of a program, none of whose loops has a trip taken out.

    Arguments:
      sizes: of its tensors.
      known: what ops are to fusion, by their ids, which is added to.
    """
    physical = sizes.physical
    there = list(dict.fromkeys(zip(physical.graph.inputs, physical.inputs, strict=True)))
    results = zip(physical.graph.outputs, physical.outputs, strict=True)
    known, ops = {} if known is None else known, list[KernelOp]()
    for step in physical.steps:
        op = known.get(id(step)) or op_of(step, physical)
        if isinstance(step, Compute):
            known[id(step)] = op
        ops.append(op)
    made = {*there, *(v for op in ops for v in op.writes)}
    kept = [v for v in dict.fromkeys((x, nd) for x, nd in results if not isinstance(x, Const)) if v in made]
    return kernels(ops, sizes, kept, there)


def is_row_by_row(k: Kernels, i: int, t: Buffer) -> bool:
    """Whether a kernel reduces rows and reads them again, as a softmax does, and so reads a whole row of an
    operand before it writes any of it."""
    return any(y.bytes == t.bytes and _is_called(k, y) for y in k.reads[i] if i in k.by_rows.get(y, ()))


def _is_called(k: Kernels, t: Buffer) -> bool:
    # What a scatter has made is reduced apart, as compiled programs show.
    return t.maker < 0 or k.ops[t.maker].kind is not Fusing.ROOT


class _Fusion:
    """Walks the ops backwards: who reads a tensor is known by then, and so whether it is written."""

    def __init__(self, ops: Sequence[KernelOp], sizes: ShardSizes, held: Iterable[Version]) -> None:
        self.ops, self.sizes = ops, sizes
        self.before: list[Buffer] = []
        self.reads: list[list[tuple[Buffer, bool]]] = []
        self.writes: list[list[Buffer]] = []
        self.last: dict[Version, tuple[Buffer, bool]] = {}
        self.behind: dict[Version, frozenset[int]] = {}
        self.waits: list[frozenset[int]] = []
        self.entering: dict[int, list[Version]] = {}
        self.barriers = [barrier_of(op.step) for op in ops]
        for op, barrier in zip(ops, self.barriers, strict=True):
            if barrier >= 0:
                self.entering.setdefault(barrier, []).extend(op.reads)
        for v in held:
            self._there(v, sizes.bytes(v))
        for i, op in enumerate(ops):
            # What is sent lies as it is sent; an element-wise op goes through its operands in one order.
            sent, read = isinstance(op.step, Box), list[tuple[Buffer, bool]]()
            for v in op.reads:
                t, straight = self.last.get(v) or self._there(v, 0.0)
                read.append((t, (straight or sent) and v in op.straight))
            for t in {t for t, _ in read}:
                t.users.append(i)
            self.reads.append(read)
            self.waits.append(self._waits(i, op))
            behind = self.waits[i] if op.kind is Fusing.VIEW else NOTHING
            if behind or self.behind:
                self.behind.update(dict.fromkeys(op.writes, behind))
            if op.kind is Fusing.VIEW and read:
                self.writes.append([])
                t, straight = read[0]
                # A product writes its result turned over, if it is read so.
                turned = op.name == "transpose" and t.maker >= 0 and ops[t.maker].name in PRODUCTS
                self.last.update(dict.fromkeys(op.writes, (t, straight or turned)))
                continue
            made = [Buffer(v, sizes.bytes(v), i, len(sizes.shape(v[0]))) for v in op.writes]
            self.writes.append(made)
            self.last.update((t.version, (t, True)) for t in made)
        self.diamonds, self.by_rows = diamonds(ops, self.reads, sizes), dict[Buffer, set[int]]()
        self.reductions = frozenset(self.diamonds.values())

    def _waits(self, i: int, op: KernelOp) -> frozenset[int]:
        """What an op waits for beside what it reads."""
        entering = [op.step.after] if isinstance(op.step, Box) and op.step.after is not None else []
        if not self.behind and self.barriers[i] < 0 and not entering:  # as most
            return NOTHING
        found = [self.behind.get(v, NOTHING) for v in op.reads]
        if self.barriers[i] >= 0:
            entering += self.entering[self.barriers[i]]
        for v in entering:
            if v in self.last:
                tensor, _ = self.last[v]
                tensor.written = True
                found.append(frozenset([tensor.maker] if tensor.maker >= 0 else []))
        return frozenset().union(*found) if found else NOTHING

    def _there(self, v: Version, n: float) -> tuple[Buffer, bool]:
        self.before.append(Buffer(v, n, -1, written=True))
        self.last[v] = found = self.before[-1], True
        return found

    def keep(self, kept: Iterable[Version]) -> None:
        """What is needed at the end is written."""
        for v in kept:
            tensor, _ = self.last[v]
            tensor.written = True
            tensor.readers[len(self.ops)] = False

    def place(self, i: int) -> None:
        """Makes a kernel of an op, or merges it into its readers."""
        op, made = self.ops[i], self.writes[i]
        if not made and op.kind is Fusing.VIEW:
            return
        reduces = i in self.reductions
        if op.kind is Fusing.CALL or (op.kind is Fusing.ROOT and not reduces):
            if any(t.readers for t in made) or not op.writes:
                self._kernel(i)
            return
        readers: dict[int, bool] = {}
        for t in made:
            for k, straight in t.readers.items():
                readers[k] = readers.get(k, True) and straight
        closed = i in self.diamonds and not self._is_by_rows(readers)
        written = closed or any(t.written for t in made)
        if written or (len(readers) > 1 and not reduces and not self._cheap(i, len(readers))):
            self._kernel(i)
            return
        for k in readers:
            if k < len(self.ops):
                self.waits[k] |= self.waits[i]
        by_rows = [*readers] if reduces else {k for t in made for k in self.by_rows.get(t, ())}
        in_product = any(k < len(self.ops) and self.ops[k].name in PRODUCTS for k in readers)
        for t, straight in self.reads[i]:
            for k, beyond in readers.items():
                t.readers[k] = t.readers.get(k, True) and (reduces or (straight and beyond))
            if by_rows:
                self.by_rows.setdefault(t, set()).update(by_rows)
            t.written = t.written or (in_product and not self._is_prologue(t))

    def _kernel(self, i: int) -> None:
        for t in self.writes[i]:
            t.written = True
        op = self.ops[i]
        for v, (t, straight) in zip(op.reads, self.reads[i], strict=True):
            t.readers[i] = t.readers.get(i, True) and straight
            # A call reads memory; a loop or a root computes what is not there.
            inside = v in op.loop_updates or (op.name in PRODUCTS and self._is_prologue(t))
            t.written = t.written or (op.kind is Fusing.CALL and not inside)

    def _is_prologue(self, t: Buffer) -> bool:
        """Whether a product computes a tensor itself: of one other tensor that is no larger, scalars and rows
        of arguments, or of arguments that nobody else reads."""
        if t.maker < 0 or self.ops[t.maker].name not in PROLOGUES:
            return False
        if self.ops[t.maker].name == "broadcast_in_dim":
            return True
        read = {x for x, _ in self.reads[t.maker] if not self._is_repeated(x)}
        if len(read) < 2 and sum(x.bytes for x in read) <= t.bytes + MORE_BYTES:
            return True
        return len(t.users) == 1 and all(x.maker < 0 and len(x.users) == 1 for x in read)

    def _is_repeated(self, t: Buffer) -> bool:
        """Whether a tensor is an argument that is repeated, such as a bias."""
        repeated = t.maker >= 0 and self.ops[t.maker].name == "broadcast_in_dim"
        return repeated and all(x.maker < 0 for x, _ in self.reads[t.maker])

    def _cheap(self, i: int, readers: int) -> bool:
        """Whether to compute a tensor in each reader moves no more bytes than to write and to read it."""
        own = sum(t.bytes for t in self.writes[i])
        operands = self._operands(i)
        return readers * operands <= operands + (1 + readers) * own

    def _is_by_rows(self, readers: Mapping[int, bool]) -> bool:
        """Whether all who read the last of a diamond go through its rows as it does, and so compute it."""
        return all(
            (straight and k < len(self.ops) and self.ops[k].kind is Fusing.LOOP)
            or (k < len(self.ops) and reduces_rows(self.ops, k, self.sizes))
            for k, straight in readers.items()
        )

    def _merges(self, i: int) -> bool:
        return self.ops[i].kind is Fusing.LOOP and self.ops[i].name not in COSTLY

    def _operands(self, i: int, seen: int = 0) -> float:
        """The bytes that a loop reads, once the loops that only it reads are merged into it."""
        own, found = sum(t.bytes for t in self.writes[i]), 0.0
        for t in dict.fromkeys(t for t, _ in self.reads[i]):
            through = t.maker >= 0 and len(t.users) == 1 and seen < DEEPEST and self._merges(t.maker)
            n = self._operands(t.maker, seen + 1) if through else t.bytes
            # Without a step it is a slice of what a loop goes through.
            part = self.ops[i].name in PARTIAL or self.ops[i].step is None
            found += min(n, own) if part else n
        return found

    def result(self, kept: Iterable[Version]) -> Kernels:
        """What has come out."""
        made = [[t for t in ts if t.written] for ts in self.writes]
        tensors = [*self.before, *(t for ts in made for t in ts)]
        read: list[list[Buffer]] = [[] for _ in range(len(self.ops) + 1)]
        for t in tensors:
            for k in t.readers:
                read[k].append(t)
        sources = [[t for t, _ in ts] for ts in self.reads]
        return Kernels(
            self.ops,
            made,
            read,
            tensors,
            sources,
            {v: self.last[v][0] for v in kept},
            self.waits,
            self.by_rows,
        )
