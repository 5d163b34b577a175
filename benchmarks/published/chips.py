"""From the name of a chip in the table to the hardware that is planned for."""

from __future__ import annotations

import re
from dataclasses import replace

from benchmarks.published.rows import RowError
from sbp.hardware import Hardware, hardware_for

# What a name begins with, the entry of the catalogue, and dense peaks of 16 and of 8 bits in TFLOP/s as vendors
# publish them, for shares of the peak. GB300 computes these types at the rate of GB200, and B300 of B200.
CHIPS: dict[str, tuple[str, float, float]] = {
    "A100": ("a100", 312, 312),
    "H100": ("h100", 989, 1979),
    "H200": ("h200", 989, 1979),
    "GB200": ("gb200", 2450, 4900),
    "GB300": ("gb200", 2450, 4900),
    "B200": ("b200", 2250, 4500),
    "B300": ("b200", 2250, 4500),
}
# Memories and boards that differ from the catalogue's: by a word in the name.
MEMORIES = {"HBM2e": 2.4e12}
BOARD_WATTS = {"h100": 700.0, "h200": 700.0, "a100": 400.0}


def _entry(chip: str) -> tuple[str, float, float]:
    for name, entry in CHIPS.items():
        if chip.upper().startswith(name):
            return entry
    raise RowError(f"chip {chip!r} is none of {', '.join(CHIPS)}")


def kind_of(chip: str) -> str:
    """The catalogue's name.

    >>> kind_of("H100-SXM-80GB"), kind_of("GB300")
    ('h100', 'gb200')
    """
    return _entry(chip)[0]


def peak_flops(chip: str, precision: str) -> float:
    """The published dense peak, FLOP/s."""
    _, wide, narrow = _entry(chip)
    return 1e12 * (narrow if precision == "fp8" else wide)


def hardware_of(chip: str) -> Hardware:
    """What a chip is planned as: the catalogue's entry, with what the name says is different.

    Under a cap on power the clock falls: power grows with about its cube, as voltage follows it.
    """
    kind = kind_of(chip)
    hardware = hardware_for(kind)
    for word, bytes_per_second in MEMORIES.items():
        if word.lower() in chip.lower():
            hardware = replace(hardware, memory_bytes_per_second=bytes_per_second)
    watts = re.search(r"(\d+)W\b", chip)
    if watts is not None and kind in BOARD_WATTS:
        clock = min(1.0, float(watts[1]) / BOARD_WATTS[kind]) ** (1 / 3)
        rates = tuple((size, rate * clock) for size, rate in hardware.flops_per_second)
        hardware = replace(hardware, flops_per_second=rates)
    return hardware
