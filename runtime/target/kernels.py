"""How long one kernel takes on a chip: its arithmetic or its traffic, whichever is longer, and its launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sbp.rates.chips import Chip
from sbp.rates.kernels import LAUNCH_SECONDS, MEMORY_SHARE
from sbp.rates.matmuls import fused_seconds, matmul_seconds
from sbp.rates.tables import Evidence, Timing
from sbp.runtime.target.matmuls import MatrixProduct
from sbp.runtime.target.work import Work


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Seconds of one kernel and what they are made of; the longest of the parts, and the launch, count."""

    seconds: float
    matrix_seconds: float
    vector_seconds: float
    memory_seconds: float
    source: Evidence


def kernel_time(chip: Chip, work: Work) -> KernelTime:
    """How long a kernel takes.

    >>> from sbp.rates.chips import CHIPS
    >>> round(kernel_time(CHIPS["h100"], Work(bytes=3 * 2**30)).seconds * 1e6)  # an addition of 1 GiB arrays
    1069
    """
    if work == Work():
        return KernelTime(0.0, 0.0, 0.0, 0.0, "formula")
    timed = [
        (_timed(p)(chip, p.m, p.n, p.k, batch=p.batch, operands=p.operands), p.count * p.passes)
        for p in work.products
    ]
    matrix = sum(t.seconds * count for t, count in timed)
    # The peak counts a fused multiply-add as two.
    vector = 2 * work.operations / chip.vector_flops
    memory = work.bytes / (chip.memory_bytes_per_second * MEMORY_SHARE)
    longest = max(matrix, vector, memory)
    by_matrix = timed and longest == matrix
    source: Evidence = max((t.source for t, _ in timed), key=_CERTAIN.index) if by_matrix else "formula"
    return KernelTime(LAUNCH_SECONDS + longest, matrix, vector, memory, source)


def _timed(product: MatrixProduct) -> Callable[..., Timing]:
    """How products of a kind are timed."""
    return fused_seconds if product.fused else matmul_seconds


_CERTAIN: list[Evidence] = ["measured", "scaled", "formula"]
