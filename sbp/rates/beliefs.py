"""How long XLA's latency-hiding scheduler takes products and collectives to be.

It places kernels beside a collective until what it believes of them is as long as what it believes of the
collective. Both go by its own tables and formulas, whatever the machine: this is what they say. Where the
figures here come from is XLA's source (openxla/xla, Apache-2.0; files named at each), and they are held
against its log (benchmarks/beliefs.py).
"""

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from sbp.rates.chips import CHIPS, Chip
from sbp.rates.collectives import LIKE, HostNetwork
from sbp.rates.tables import batched_rates, raw_collective_curves

PARTITION = 8
"""Devices that it takes a host to have, unless it is told (`gpus_per_node`, sol_gpu_cost_model.cc)."""
UNKNOWN_SECONDS = 5e-3
"""Of a collective between hosts that its formula has no answer for (`kHighLatency`,
gpu_latency_hiding_scheduler.cc): where more groups than 8, or not a divisor of it, talk at the same time."""
LEAST_BYTES, MOST_BYTES = 1 << 10, 1 << 30
"""The sizes that it looks collectives in a host up at; others go at the rate of the nearest."""
MOST_BATCH, LEAST_DIM, MOST_DIM = 4, 256, 4096
"""The shapes that it looks products up at."""

_TABLED: Mapping[tuple[str, str], str] = {
    ("bfloat16", "bfloat16"): "bf16",
    ("float32", "float32"): "f32",
    ("float8_e4m3fn", "bfloat16"): "f8e4m3fn",
}
"""Operands and result of the products that it has a table of."""


@dataclass(frozen=True, slots=True)
class Product:
    """[batch, m, k] @ [batch, k, n] on one device.

    Arguments:
      operands, result: names of their types.
      operand_bytes, result_bytes: of an element.
    """

    batch: int
    m: int
    n: int
    k: int
    operands: str
    result: str
    operand_bytes: int
    result_bytes: int

    @property
    def sum_bytes(self) -> int:
        """Of an element while it is summed up."""
        return max(4, self.result_bytes)


@dataclass(frozen=True, slots=True)
class _SplitCosts:
    """What XLA reckons with when it decides on splitting k, in units of its own.

    Arguments:
      of_flop, of_byte: of arithmetic, of what the product reads and writes.
      of_part_byte: of what adding the parts up reads and writes.
      launch: of the kernel that adds them up.
    """

    of_flop: float
    of_byte: float
    of_part_byte: float
    launch: float


# `GetCostWeights` of splitk_rewriter.cc, of which tiles are 128 x 128 whatever kernel is chosen later.
_TILE = 128
_PARTS = tuple(1 << i for i in range(12))
_BY_CAPABILITY = (
    ((10, 0), _SplitCosts(100.0, 0.0848863, 189.711, 1.21563e8)),
    ((9, 0), _SplitCosts(100.0, 0.194136, 193.1384, 4.36e7)),
    ((0, 0), _SplitCosts(100.0, 0.0666955, 467.815, 5.65307e7)),
)


def parts_of(chip: Chip, product: Product) -> int:
    """Into how many parts XLA splits k of a product whose result has too few tiles to fill the chip.

    The parts are products of one batch more, which give float32; another kernel adds them up.

    >>> one = Product(1, 1024, 1024, 8192, "bfloat16", "bfloat16", 2, 2)
    >>> parts_of(CHIPS["h100"], one)
    2
    """
    costs = next(costs for least, costs in _BY_CAPABILITY if chip.capability >= least)
    return min(_PARTS, key=lambda parts: _split_cost(product, parts, chip.cores, costs))


def _split_cost(p: Product, parts: int, cores: int, costs: _SplitCosts) -> float:
    rows, columns = min(p.m, _TILE), min(p.n, _TILE)
    tiles = p.batch * parts * -(-p.m // _TILE) * -(-p.n // _TILE)
    waves = max(1.0, tiles * rows * columns / (cores * _TILE * _TILE))
    flops = 2.0 * rows * columns * -(-p.k // parts) * waves
    given = p.batch * parts * p.m * p.n * (p.sum_bytes if parts > 1 else p.result_bytes)
    moved = p.batch * (p.m + p.n) * p.k * p.operand_bytes + given
    found = max(flops * costs.of_flop, moved * costs.of_byte)
    if parts == 1:
        return found
    return found + costs.launch + (given + p.batch * p.m * p.n * p.result_bytes) * costs.of_part_byte


@lru_cache(maxsize=1 << 14)
def believed_product_seconds(name: str, product: Product) -> float:
    """Of a matrix product on a chip, with the kernel that adds up its parts where k is split.

    Rates are the mean of those at the corners around a shape, each with the inverse of its squared distance
    as weight (interpolator.h, matmul_interpolator.cc). Where it has no table of some types it takes that of
    bfloat16, and counts each dim in bytes of the result: what bfloat16 gives in float32 takes 64 times as
    long to it, and so does each part of a bfloat16 product whose k is split.

    >>> one = Product(1, 1024, 4096, 8192, "bfloat16", "bfloat16", 2, 2)
    >>> f"{believed_product_seconds('h100', one) * 1e6:.2f} us"
    '91.39 us'
    """
    chip, p = CHIPS[name], product
    parts = parts_of(chip, p)
    if parts == 1:
        return _tabled_seconds(chip, p.batch, p.m, p.n, p.k, p.operands, p.result, p.result_bytes)
    # Split operands are padded to whole parts of whole 16 bytes.
    unit = parts * max(1, 16 // p.operand_bytes)
    k, summed = -(-p.k // unit) * unit // parts, p.result if p.sum_bytes == p.result_bytes else "float32"
    found = _tabled_seconds(chip, p.batch * parts, p.m, p.n, k, p.operands, summed, p.sum_bytes)
    moved = p.batch * p.m * p.n * (parts * p.sum_bytes + p.result_bytes)
    return found + moved / chip.memory_bytes_per_second


def _tabled_seconds(
    chip: Chip, batch: int, m: int, n: int, k: int, operands: str, result: str, result_bytes: int
) -> float:
    """Of a product whose k is not split."""
    key = _TABLED.get((operands, result))
    scale = 1 if key is not None else result_bytes
    flops = 2.0 * batch * m * n * k * scale**3
    rates, share = _rates(chip, key or "bf16")
    step = 1 if key is not None else 2  # the table of bfloat16 in bytes
    point = batch, m * scale, n * scale, k * scale
    corners = [
        _around(batch, 1, MOST_BATCH),
        *(_around(x, LEAST_DIM * step, MOST_DIM * step) for x in point[1:]),
    ]
    total = weights = 0.0
    for corner in itertools.product(*corners):
        weight = 1.0 / (1.0 + math.fsum((a - x) ** 2 for a, x in zip(corner, point, strict=True)))
        b, (m, n, k) = corner[0], (x // step for x in corner[1:])
        total += weight * rates.get((b, m, n, k), rates[1, m, n, k])
        weights += weight
    return flops * weights / (total * share)


def _rates(chip: Chip, key: str) -> tuple[Mapping[tuple[int, int, int, int], float], float]:
    """FLOP/s by (batch, m, n, k), and how much faster this chip is than the one they were measured on."""
    tables = batched_rates()
    if (chip.tables, key) in tables:
        return tables[chip.tables, key], 1.0
    other = CHIPS["b200" if chip.capability >= (10, 0) else "h100"]
    peak = "f8" if key == "f8e4m3fn" else key
    return tables[other.tables, key], chip.matrix_flops[peak] / other.matrix_flops[peak]


def _around(x: int, least: int, most: int) -> tuple[int, int]:
    """The powers of two around a size, within bounds, which may be the same one."""
    low = 1 << (x.bit_length() - 1)
    high = low if low == x else 2 * low
    return min(max(low, least), most), min(max(high, least), most)


def believed_collective_seconds(
    chip: Chip, kind: str, transfer_bytes: float, groups: Sequence[Collection[int]]
) -> float:
    """Of a collective.

    In a host it goes by the table, between hosts by its formula (`DispatchEstimation`,
    sol_latency_estimator.cc), which knows the device by its name alone.

    Arguments:
      kind: one of `sbp.rates.collectives.KINDS`.
      transfer_bytes: the whole tensor on one device, as of `collective_seconds`.
      groups: ranks of the devices that talk, a group each.

    >>> hosts = [range(128)]
    >>> f"{believed_collective_seconds(CHIPS['h100'], 'all_reduce', 4, hosts) * 1e6:.0f} us"
    '1029 us'
    """
    kind = LIKE.get(kind, kind)
    ranks = len(groups[0])
    hosts = Counter(r // PARTITION for r in groups[0])
    if len(hosts) == 1:
        return _inside_seconds(chip, kind, transfer_bytes, ranks)
    network = _network(chip.name)
    if kind == "permute":
        return network.ring_seconds(kind, transfer_bytes, 2, 2)
    if PARTITION % len(groups):
        return UNKNOWN_SECONDS
    # Of a group that has only some devices of each host it takes each to be a host.
    nodes = ranks // PARTITION if all(n == PARTITION for n in hosts.values()) else ranks
    devices = nodes * PARTITION // len(groups)
    # It divides whole bytes: a scalar is nothing to send.
    return network.ring_seconds(kind, transfer_bytes // devices * devices, devices, nodes)


def _inside_seconds(chip: Chip, kind: str, transfer_bytes: float, ranks: int) -> float:
    """By the rate of the nearest power of two (`EstimatedRuntime`, collective_interpolator.cc)."""
    curves = raw_collective_curves()
    # Two devices exchange, more send to their neighbours.
    pattern = "" if kind != "permute" else "pairs" if ranks == 2 else "ring"
    every = curves.get((chip.tables, kind, pattern), curves["sm_90", kind, pattern])
    sizes = {c.ranks: c for c in every}
    curve = sizes[min(sizes, key=lambda n: (abs(n - ranks), -n))] if kind != "permute" else every[0]
    size = min(max(transfer_bytes, LEAST_BYTES), MOST_BYTES)
    at = min(curve.sizes, key=lambda s: (abs(s - size), -s))
    return transfer_bytes * curve.seconds[curve.sizes.index(at)] / at


@lru_cache(maxsize=16)
def _network(name: str) -> HostNetwork:
    """What it takes the cards between hosts to be (`device_to_cfg`, sol_gpu_cost_model.cc): two names it
    knows, and one figure for all others."""
    known = {"h100": (25e9, 6e-6, 31e-6), "b200": (50e9, 2e-6, 21e-6)}
    rate, prepare, round_trip = known.get(name, (50e9, 6e-6, 31e-6))
    return HostNetwork(rate, prepare, round_trip, 45e-6, CHIPS[name].memory_bytes_per_second)
