"""A second, tiny implementation of what a signature means, with nothing in common with the first.

It never computes an offset or a length: it pads a plain list of row numbers and cuts it.
"""

import math
from collections.abc import Sequence

import numpy as np

from sbp.signature import Signature, Split

HOLE = -1  # a row of padding


def rows_of(
    size: int, dim: int, nd: Sequence[Signature], hierarchy: Sequence[int], coords: Sequence[int]
) -> list[int]:
    """The logical rows of `dim` that the device at `coords` holds, HOLE where it holds padding."""
    rows = list(range(size))
    for signature, group, i in zip(nd, hierarchy, coords, strict=True):
        if isinstance(signature, Split) and signature.dim == dim:
            while len(rows) % group:
                rows.append(HOLE)
            part = len(rows) // group
            rows = rows[i * part : (i + 1) * part]
    return rows


def shard_of(
    tensor: np.ndarray, nd: Sequence[Signature], hierarchy: Sequence[int], coords: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """One device's shard of a tensor without partial axes, and where it is real."""
    rows = [rows_of(n, d, nd, hierarchy, coords) for d, n in enumerate(tensor.shape)]
    shard = np.zeros([len(r) for r in rows], tensor.dtype)
    real = np.zeros(shard.shape, bool)
    for at in np.ndindex(*shard.shape):
        source = tuple(r[i] for r, i in zip(rows, at, strict=True))
        if HOLE not in source:
            shard[at], real[at] = tensor[source], True
    return shard, real


def elements(shape: Sequence[int], nd: Sequence[Signature], hierarchy: Sequence[int]) -> int:
    """Of one shard, padding included."""
    first = (0,) * len(hierarchy)
    return math.prod(len(rows_of(n, d, nd, hierarchy, first)) for d, n in enumerate(shape))
