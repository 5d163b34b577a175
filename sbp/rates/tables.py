"""The measured tables as they lie beside this file, read once; README.md here says where they come from."""

import csv
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Literal, TypeAlias

# Measured on this chip; measured on another chip or group size and scaled; or nothing measured at all.
Evidence: TypeAlias = Literal["measured", "scaled", "formula"]


@dataclass(frozen=True, slots=True)
class Timing:
    """How long something takes on a chip, and how that is known.

    Seconds have twelve digits: the last ones of a logarithm differ between libraries of C, and plans would.
    """

    seconds: float
    source: Evidence

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", float(f"{self.seconds:.12g}"))


@dataclass(frozen=True, slots=True)
class CollectiveCurve:
    """Seconds of one collective by size, for one shape of groups.

    Arguments:
      ranks: devices per group.
      groups: groups that ran at the same time.
      sizes: transfer bytes, rising.
      seconds: of each size, never falling: where measurements fall with size, which is noise, neighbours
        are merged and their median taken.
    """

    ranks: int
    groups: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, transfer_bytes: float) -> float:
        """Log-linear between sizes; the least time below them, the rate of the largest size above."""
        sizes, seconds = self.sizes, self.seconds
        if transfer_bytes <= sizes[0]:
            return seconds[0]
        if transfer_bytes >= sizes[-1]:
            return seconds[-1] * transfer_bytes / sizes[-1]
        i = next(i for i, size in enumerate(sizes) if size > transfer_bytes) - 1
        part = math.log(transfer_bytes / sizes[i]) / math.log(sizes[i + 1] / sizes[i])
        return float(seconds[i] * (seconds[i + 1] / seconds[i]) ** part)


@functools.cache
def collective_curves() -> Mapping[tuple[str, str, str], tuple[CollectiveCurve, ...]]:
    """(table, kind, pattern) -> the curves of all group shapes; only permutes have a pattern."""
    return {
        key: tuple(replace(c, seconds=tuple(rise_monotonically(c.seconds))) for c in curves)
        for key, curves in raw_collective_curves().items()
    }


@functools.cache
def raw_collective_curves() -> Mapping[tuple[str, str, str], tuple[CollectiveCurve, ...]]:
    """The same as they were measured, falls and all: it is what XLA looks up."""
    found: dict[tuple[str, str, str], list[CollectiveCurve]] = {}
    for row in _rows("collectives.csv"):
        table, kind, pattern, ranks, groups, first, *cells = row
        seconds = [float(cell) * 1e-6 for cell in cells if cell]
        sizes = tuple(int(first) << i for i in range(len(seconds)))
        curve = CollectiveCurve(int(ranks), int(groups), sizes, tuple(seconds))
        found.setdefault((table, kind, pattern), []).append(curve)
    return {key: tuple(curves) for key, curves in found.items()}


@functools.cache
def batched_rates() -> Mapping[tuple[str, str], Mapping[tuple[int, int, int, int], float]]:
    """(table, operand type) -> FLOP/s by (batch, m, n, k), of one product and of several at once."""
    found: dict[tuple[str, str], dict[tuple[int, int, int, int], float]] = {
        key: {(1, *at): rate for at, rate in rates.items()} for key, rates in matmul_rates().items()
    }
    for table, operands, batch, m, n, *cells in _rows("batched.csv"):
        rates = {(int(batch), int(m), int(n), 256 << i): float(c) * 1e12 for i, c in enumerate(cells)}
        found[table, operands].update(rates)
    return found


@functools.cache
def matmul_rates() -> Mapping[tuple[str, str], Mapping[tuple[int, int, int], float]]:
    """(table, operand type) -> FLOP/s by (m, n, k), each 256, 512, ..., 4096."""
    found: dict[tuple[str, str], dict[tuple[int, int, int], float]] = {}
    for table, operands, m, n, *cells in _rows("matmuls.csv"):
        rates = found.setdefault((table, operands), {})
        rates.update({(int(m), int(n), 256 << i): float(c) * 1e12 for i, c in enumerate(cells)})
    return found


def rise_monotonically(values: Sequence[float]) -> list[float]:
    """The values with every fall taken out: neighbours are merged until their medians rise.

    >>> rise_monotonically([173.0, 20.0, 30.0, 25.0, 50.0])
    [20.0, 20.0, 25.0, 25.0, 50.0]
    """
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([value])
        while len(blocks) > 1 and statistics.median_low(blocks[-2]) > statistics.median_low(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return [statistics.median_low(block) for block in blocks for _ in block]


def _rows(name: str) -> list[list[str]]:
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return list(csv.reader(text.splitlines()))[1:]
