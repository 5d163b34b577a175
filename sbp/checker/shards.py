"""Signatures as texts, and the sizes of shards: the arithmetic of the checker, from the definitions."""

import math
import re
from collections.abc import Sequence
from functools import cache

Signed = tuple[str, ...]
"""An N-D signature: per placement axis "B", "S(dim)", "P" or "P(op)"."""

_ONE = re.compile(r"B|S\(\d+\)|P(?:\(\w+\))?")


@cache
def read_signature(text: str) -> Signed:
    """The signature that a text says.

    Raises:
      ValueError: if it says none.

    >>> read_signature("[S(0), P(max)]")
    ('S(0)', 'P(max)')
    """
    parts = tuple(x.strip() for x in text.strip().removeprefix("[").removesuffix("]").split(","))
    if not all(map(_ONE.fullmatch, parts)):
        raise ValueError(f"{text!r} is no signature")
    return parts


def dim_of(one: str) -> int | None:
    """The dim that a signature splits.

    >>> dim_of("S(3)"), dim_of("B")
    (3, None)
    """
    return int(one[2:-1]) if one.startswith("S") else None


def is_partial(one: str) -> bool:
    """Whether it is a sum, a maximum or a minimum that nobody has taken yet."""
    return one.startswith("P")


def shard(shape: Sequence[int], nd: Signed, mesh: Sequence[int]) -> tuple[int, ...]:
    """The shape of one device's part: each axis, outer to inner, leaves the size divided and rounded up.

    >>> shard((10, 4), ("S(0)", "S(0)"), (2, 4))
    (2, 4)
    """
    left = list(shape)
    for one, group in zip(nd, mesh, strict=True):
        if (d := dim_of(one)) is not None:
            left[d] = math.ceil(left[d] / group)
    return tuple(left)


def elements(shape: Sequence[int], nd: Signed, mesh: Sequence[int]) -> int:
    """Of one device's part."""
    return math.prod(shard(shape, nd, mesh))


def spans(shape: Sequence[int], nd: Signed, mesh: Sequence[int], at: Sequence[int]) -> list[tuple[int, int]]:
    """From where to where, per dim, the part of the device at some coordinates goes; sizes must divide.

    >>> spans((8,), ("S(0)", "S(0)"), (2, 2), (1, 0))
    [(4, 6)]
    """
    found = [(0, n) for n in shape]
    for one, group, c in zip(nd, mesh, at, strict=True):
        if (d := dim_of(one)) is not None:
            start, end = found[d]
            size = (end - start) // group
            found[d] = start + c * size, start + (c + 1) * size
    return found


def fits(shape: Sequence[int], nd: Signed, mesh: Sequence[int]) -> bool:
    """Whether a tensor has the dims that a signature splits, and a signature per axis."""
    return (
        len(nd) == len(mesh)
        and all((dim_of(one) or 0) < max(len(shape), 1) for one in nd if one != "B")
        and (bool(shape) or not any(one.startswith("S") for one in nd))
    )


def divides(shape: Sequence[int], nd: Signed, mesh: Sequence[int]) -> bool:
    """Whether no part has padding."""
    left = list(shape)
    for one, group in zip(nd, mesh, strict=True):
        if (d := dim_of(one)) is not None:
            if left[d] % group:
                return False
            left[d] //= group
    return True
