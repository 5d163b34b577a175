"""How long one matrix product takes: interpolated between measured shapes."""

import itertools
import math
from collections.abc import Mapping, Sequence

from sbp.rates.chips import CHIPS, Chip
from sbp.rates.tables import Evidence, Timing, matmul_rates

# What runs on the vector units: float32 whose precision is not to be cut to TF32.
VECTOR = "vector"
# Of the peak, for types that nobody measured (float64, true float32); large TF32 products reach 0.82.
UNMEASURED_SHARE = 0.8
# Of the peak, the most that a measurement is believed: those of float8 go up to 1.23 of it.
BELIEVED_SHARE = 0.85
FUSED_SHARE = 0.6
"""Of the rate of a product as large, what products have that follow each other in one kernel, as those of an
attention: the exponentials between them run elsewhere. On H100, causal, heads 128 wide, 8192 positions: cuDNN
reaches about 500 TFLOP/s forward, and less backward, where products reach 780 (Shah et al., 2024,
arXiv:2407.08608, figures 5 and 6)."""

_LOW, _HIGH = 8.0, 12.0  # the tables go from 256 to 4096 in every dim
_Rates = Mapping[tuple[int, int, int], float]


def matmul_seconds(chip: Chip, m: int, n: int, k: int, *, batch: int = 1, operands: str = "bf16") -> Timing:
    """How long the matrix units take for [batch, m, k] @ [batch, k, n], launch and memory not counted.

    Between measured shapes, the logarithm of the time is linear in those of m, n and k. Below them it goes on
    falling as it does at the edge; above them the rate of the edge holds. A batch, and what one of m and n
    has above the table, count towards the smaller of both: to fill the chip, tiles are tiles.

    Arguments:
      operands: a key of `chip.matrix_flops` ("f32" is TF32), or VECTOR.

    >>> t = matmul_seconds(CHIPS["h100"], 4096, 4096, 4096)
    >>> f"{2 * 4096**3 / t.seconds / 1e12:.0f} TFLOP/s, {t.source}"
    '780 TFLOP/s, measured'
    """
    flops = 2.0 * batch * m * n * k
    if not flops:
        return Timing(0.0, "formula")
    peak = peak_flops(chip, operands)
    rates, scale, source = _table(chip, operands)
    if rates is None:
        return Timing(flops / (peak * UNMEASURED_SHARE), source)
    logs = (*_balanced(m, n, batch), math.log2(k))
    inside = batch == 1 and all(_LOW <= math.log2(size) <= _HIGH for size in (m, n, k))
    seconds, least = _seconds(rates, logs) / scale, flops / (peak * BELIEVED_SHARE)
    return Timing(max(seconds, least), source if inside and seconds >= least else "scaled")


def fused_seconds(chip: Chip, m: int, n: int, k: int, *, batch: int = 1, operands: str = "bf16") -> Timing:
    """The same where what one product gives is an operand of the next, in one kernel (`FUSED_SHARE`).

    Such a kernel goes through [k, n] tile by tile and keeps its place in [m, k] or [m, n]: it does not begin
    anew for each sum of k, and its rate is that of long sums.

    >>> t = fused_seconds(CHIPS["h100"], 8192, 4096, 128, batch=16)
    >>> f"{2 * 16 * 8192 * 4096 * 128 / t.seconds / 1e12:.0f} TFLOP/s"
    '468 TFLOP/s'
    """
    found = matmul_seconds(chip, m, min(n, k), max(n, k), batch=batch, operands=operands)
    return Timing(found.seconds / FUSED_SHARE, found.source)


def peak_flops(chip: Chip, operands: str) -> float:
    """The dense peak of the units that multiply such operands, FLOP/s."""
    return chip.vector_flops if operands == VECTOR else chip.matrix_flops[operands]


def _table(chip: Chip, operands: str) -> tuple[_Rates | None, float, Evidence]:
    """The rates to use, and how much faster this chip is than the one they were measured on."""
    key = "f8e4m3fn" if operands == "f8" else operands
    if (chip.tables, key) in matmul_rates():
        return matmul_rates()[chip.tables, key], 1.0, "measured"
    # A chip without tables of its own reaches the share of its peak that the nearest one in kind reaches.
    other = CHIPS["b200" if chip.capability >= (10, 0) else "h100"]
    if (other.tables, key) not in matmul_rates():
        return None, 1.0, "formula"
    return (
        matmul_rates()[other.tables, key],
        peak_flops(chip, operands) / peak_flops(other, operands),
        "scaled",
    )


def _balanced(m: int, n: int, batch: int) -> tuple[float, float]:
    """log2 of rows and columns of one product with as many tiles; each is filled up to 4096 first."""
    logs = [math.log2(m), math.log2(n)]
    spare = math.log2(batch) + sum(max(0.0, x - _HIGH) for x in logs)
    logs = [min(x, _HIGH) for x in logs]
    for i in sorted((0, 1), key=lambda i: logs[i]):
        taken = min(spare, _HIGH - logs[i])
        logs[i], spare = logs[i] + taken, spare - taken
    return logs[0] + spare, logs[1]


def _seconds(rates: _Rates, logs: Sequence[float]) -> float:
    """Seconds of a product, by the logarithms of m, n and k."""
    inside = [min(max(x, _LOW), _HIGH) for x in logs]
    base = _log_seconds(rates, inside)
    found = base
    for i, x in enumerate(logs):
        if x > _HIGH:
            found += x - _HIGH
        elif x < _LOW:
            up = [y + (j == i) for j, y in enumerate(inside)]
            slope = _log_seconds(rates, up) - base
            found += min(max(slope, 0.0), 1.0) * (x - _LOW)
    return float(2.0**found)


def _log_seconds(rates: _Rates, logs: Sequence[float]) -> float:
    """log2 of the seconds at a point inside the table: linear between its corners."""
    total = 0.0
    lows = [min(int(x), int(_HIGH) - 1) for x in logs]
    for corner in itertools.product((0, 1), repeat=3):
        weight = math.prod(x - a if c else a + 1 - x for x, a, c in zip(logs, lows, corner, strict=True))
        if weight:
            m, n, k = (1 << (a + c) for a, c in zip(lows, corner, strict=True))
            total += weight * math.log2(2 * m * n * k / rates[m, n, k])
    return total
