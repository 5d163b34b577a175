"""Bytes and seconds with three digits and a unit."""

import math

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")


def bytes_text(n: float) -> str:
    """Bytes with three digits, in powers of 1000.

    >>> bytes_text(0), bytes_text(12), bytes_text(262144), bytes_text(9.996e8)
    ('0 B', '12 B', '262 kB', '1.00 GB')
    """
    if n < 1000:
        return f"{n:.0f} B"
    power = min(int(math.log10(n)) // 3, len(_BYTES) - 1)
    if round(n, 2 - int(math.log10(n))) >= 1000 ** (power + 1) and power + 1 < len(_BYTES):
        power += 1
    return f"{_digits(n / 1000**power)} {_BYTES[power]}"


def seconds_text(seconds: float) -> str:
    """A time with three digits.

    >>> seconds_text(0.00321), seconds_text(4.2e-6), seconds_text(12)
    ('3.21 ms', '4.20 us', '12.0 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds > 0 else "0 s"


def _digits(x: float) -> str:
    return f"{x:.{max(0, 2 - int(math.log10(max(x, 1.0))))}f}"
