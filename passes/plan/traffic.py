"""What goes through memory, and when it lies there, where compilers merge chains of ops into kernels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpTraffic:
    """What of an op's operands and results goes through memory: compilers merge chains of ops into kernels.

    Arguments:
      reads: per operand, how many kernels read it for this op; 0 where it is computed on the spot.
      writes: per result, whether it is written.
      partial: whether it reads no more of an operand than its results have.
      in_place: whether it changes its first operand where that lies; what it reads is written there once.
    """

    reads: tuple[int, ...]
    writes: tuple[bool, ...]
    partial: bool = False
    in_place: bool = False

    def bytes(self, reads: Sequence[float], writes: Sequence[float]) -> float:
        """Of one device, given the bytes of its operands and results there."""
        most = sum(writes) if self.partial else math.inf
        read = sum(n * min(b, most) for n, b in zip(self.reads, reads, strict=True))
        return (2 if self.in_place else 1) * read + self.written_bytes(writes)

    def written_bytes(self, writes: Sequence[float]) -> float:
        """Of its results."""
        return sum(b for w, b in zip(self.writes, writes, strict=True) if w)


@dataclass(frozen=True, slots=True)
class Lifetime:
    """When a value that is written to memory lies there; times are those of ops, as memory would have them.

    Arguments:
      start, end: from when until when; all the time for an argument. What takes the space of an operand is
        there when that is not.
      first, last: from its first reader's beginning to its last one's end.
      is_result: whether it lies in the space of a result, as it is or under another shape.
    """

    value: int
    start: int
    end: int
    first: int
    last: int
    is_result: bool = False


@dataclass(frozen=True, slots=True)
class OperandCopy:
    """When a copy of an operand lies in memory that a library wants laid out otherwise.

    Arguments:
      value: of which it is a copy.
      node, operand: the id of the first op that reads it, and which operand of that it is.
      factor: how many times as large as the operand's shard it is.
      start, end: from that op until the last one that reads it is done.
    """

    value: int
    node: int
    operand: int
    factor: float
    start: int
    end: int
