"""Reads JSON that may be damaged or forged: every mistake is a `ValueError`.

Python's own reader accepts NaN, infinities and numbers beyond a float's range, and raises RecursionError
for deep lists.
"""

import json
import math
from typing import Any

MOST_DIGITS = 300
"""Of a whole number: a float has no more."""


def json_of(text: str | bytes) -> Any:
    """The value of a text in standard JSON.

    Raises:
      ValueError: if the text is not standard JSON; the message says why.

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
