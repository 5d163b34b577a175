"""Rows that are reduced and read again: a softmax, a norm.

XLA:GPU makes one kernel of `x -> reduction of its rows -> op(x, reduction)` before it merges anything else
(softmax_rewriter_triton.cc), also where several follow each other, and reads a whole row before it writes any
of it. Loops and reductions of the same rows compute what the last of them gives, and the reduction with it;
for anything else it is written.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

from sbp.passes.physical.fusing import Fusing, KernelOp, ShardSizes
from sbp.passes.physical.program import Compute

LONGEST_ROW = 32_768
"""Longer rows are reduced in two steps (`RowReductionRaceFreeBound`: 32 threads, 1,024 elements each)."""
REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min".split())


class Storage(Protocol):
    """What an op reads: at which position its maker stands, and how large it is."""

    maker: int
    bytes: float


def diamonds(
    ops: Sequence[KernelOp], reads: Sequence[Sequence[tuple[Storage, bool]]], sizes: ShardSizes
) -> dict[int, int]:
    """The ops that read rows and their reduction, which nobody else reads, each with the position of the
    reduction.

    Arguments:
      reads: per op, the tensors that it reads, views looked through.
    """
    found: dict[int, int] = {}
    uses = Counter(
        n
        for op, read in zip(ops, reads, strict=True)
        if op.kind is not Fusing.VIEW
        for n in {id(t) for t, _ in read}
    )
    begins = _beginnings(ops, reads)
    for i, op in enumerate(ops):
        if op.kind is not Fusing.LOOP or len(reads[i]) < 2 or not isinstance(op.step, Compute):
            continue
        for t, _ in reads[i]:
            at = begins[t.maker] if t.maker >= 0 else -1
            if not reduces_rows(ops, at, sizes) or any(uses[id(x)] > 1 for x in _line(ops, reads, t)):
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
