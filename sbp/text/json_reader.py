"""Reads JSON that somebody may have damaged, or made up: everything that is wrong is a `ValueError`.

Python's own reader also takes NaN, infinities and numbers that are none as a float, and ends with a
RecursionError where lists are deep.
"""

from __future__ import annotations

import json
import math
from typing import Any

MOST_DIGITS = 300
"""Of a whole number: a float has no more."""


def json_of(text: str | bytes) -> Any:
    """What a text says, in JSON as its standard has it.

    Raises:
      ValueError: in words, if it is no such JSON.

    >>> json_of('{"bytes": [1, 2.5]}')
    {'bytes': [1, 2.5]}
    >>> json_of("[" * 100000)
    Traceback (most recent call last):
    ValueError: it is nested too deeply
    """
    try:
        return json.loads(text, parse_constant=_constant, parse_float=_float, parse_int=_int)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _float(text: str) -> float:
    if not math.isfinite(found := float(text)):
        raise ValueError(f"{text:.20} is larger than any number here")
    return found


def _int(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a whole number of {len(text)} digits is larger than any number here")
    return int(text)
