"""Figures of a machine as users write them: a number in the base unit, or a text such as "400 Gb/s"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

_POWERS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BYTES = {
    **{f"{letter}B": power for letter, power in _POWERS.items()},
    **{f"{letter}iB": 1024.0**power for power, letter in enumerate("KMGTP", 1)},
}


@dataclass(frozen=True, slots=True)
class Quantity:
    """What a figure measures.

    Arguments:
      words: the unit, in words, for messages.
      units: each unit that a text may have, in base units.
      example: how a user writes it.
    """

    words: str
    units: Mapping[str, float]
    example: str


BYTES = Quantity("bytes", _BYTES, "80GB")
RATE = Quantity(
    "bytes per second",
    # Network cards are sold by bits.
    {f"{unit}/s": n for unit, n in _BYTES.items()} | {f"{k}b/s": n / 8 for k, n in _POWERS.items() if k},
    "400 Gb/s",
)
FLOPS = Quantity("FLOP per second", {f"{k}FLOP/s": n for k, n in _POWERS.items()}, "989 TFLOP/s")
SECONDS = Quantity("seconds", {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}, "10 us")


def amount(given: object, of: Quantity) -> float | None:
    """A figure in the base unit; None if it is negative or not a figure.

    >>> amount("400 Gb/s", RATE), amount(3.35e12, RATE), amount("80 GB", RATE), amount(-1, SECONDS)
    (50000000000.0, 3350000000000.0, None, None)
    """
    if isinstance(given, str):
        found = re.fullmatch(r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?)\s*([A-Za-z]\S*)\s*", given, re.ASCII)
        scale = None if found is None else of.units.get(found[2])
        # In decimals, so that 5 us is 5e-6.
        return None if found is None or scale is None else float(Decimal(found[1]) * Decimal(repr(scale)))
    if isinstance(given, bool) or not isinstance(given, int | float) or not given >= 0:
        return None
    return float(given)
