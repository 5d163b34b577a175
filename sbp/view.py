"""The meaning of a signature, in NumPy: the oracle of every test.

`split` gives the shards that a tensor has under a signature, `join` the tensor that shards mean.
Nothing here is fast; everything is evident.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sbp.layout import local_shape, offset, valid_length
from sbp.signature import Broadcast, Partial, Signature, Split, splits_of

Array = np.ndarray[Any, Any]
Shards = dict[tuple[int, ...], Array]


def _summed(xs: Sequence[Array]) -> Array:
    with np.errstate(all="ignore"):  # infinities of both signs are NaN, as they should be
        return np.asarray(np.sum(np.stack(xs), axis=0, dtype=xs[0].dtype))


REDUCERS: dict[str, Callable[[Sequence[Array]], Array]] = {
    "sum": _summed,
    "max": lambda xs: np.max(np.stack(xs), axis=0),
    "min": lambda xs: np.min(np.stack(xs), axis=0),
    "prod": lambda xs: np.asarray(np.prod(np.stack(xs), axis=0, dtype=xs[0].dtype)),
    "and": lambda xs: np.bitwise_and.reduce(np.stack(xs)),
    "or": lambda xs: np.bitwise_or.reduce(np.stack(xs)),
    "xor": lambda xs: np.bitwise_xor.reduce(np.stack(xs)),
}


def coordinates(hierarchy: Sequence[int]) -> list[tuple[int, ...]]:
    """All positions in the hierarchy, row-major.

    >>> coordinates((2, 2))
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    return list(itertools.product(*(range(n) for n in hierarchy)))


def split(
    tensor: Array,
    nd: Sequence[Signature],
    hierarchy: Sequence[int],
    *,
    seed: int = 0,
    padding: float = np.nan,
) -> Shards:
    """The shards of `tensor`, by position in the hierarchy.

    Partial shards are random and sign-varying, never one full copy and zeros. Padding is filled with
    `padding` (NaN where the dtype has it, else the dtype's largest value).
    """
    rng = np.random.default_rng(seed)
    shards: Shards = {(): tensor}
    for axis, group in enumerate(hierarchy):
        signature = nd[axis]
        grown: Shards = {}
        drawn: dict[tuple[int, ...], list[Array]] = {}
        for coords, value in shards.items():
            parts = [value] * group
            if isinstance(signature, Partial):
                # Copies hold equal summands, so each is drawn once.
                key = tuple(i for i, s in zip(coords, nd, strict=False) if not isinstance(s, Broadcast))
                if key not in drawn:
                    drawn[key] = parts_of(value, signature.op, group, rng)
                parts = drawn[key]
            grown.update({(*coords, i): part for i, part in enumerate(parts)})
        shards = grown
    return {c: _cut(v, nd, hierarchy, c, padding) for c, v in shards.items()}


def join(shards: Shards, shape: Sequence[int], nd: Sequence[Signature], hierarchy: Sequence[int]) -> Array:
    """The tensor that `shards` mean; padding is ignored.

    Raises:
      ValueError: if a shard has the wrong shape, or if copies that must be equal (B) differ.
    """
    padded = local_shape(shape, nd, hierarchy)
    parts: Shards = {}
    for coords, shard in shards.items():
        if shard.shape != padded:
            raise ValueError(f"the shard at {coords} has shape {shard.shape}, not {padded}")
        parts[coords] = shard[_region(shape, nd, hierarchy, coords)[1]]
    # Copies are equal summands too, so they are compared before anything is reduced; then inner axes first.
    for axis in sorted(range(len(hierarchy)), key=lambda a: (isinstance(nd[a], Partial), -a)):
        signature = nd[axis]
        if not isinstance(signature, Split):
            parts = {
                c: _merge([parts[c[:axis] + (i,) + c[axis + 1 :]] for i in range(hierarchy[axis])], signature)
                for c in parts
                if c[axis] == 0
            }
    out = np.zeros(tuple(shape), next(iter(shards.values())).dtype)
    for coords, value in parts.items():
        out[_region(shape, nd, hierarchy, coords)[0]] = value
    return out


def _region(
    shape: Sequence[int], nd: Sequence[Signature], hierarchy: Sequence[int], coords: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Which part of the tensor a device holds, and where in its shard that part is."""
    whole, own = [], []
    for d, n in enumerate(shape):
        axes = splits_of(nd, d)
        length = valid_length(n, axes, hierarchy, coords)
        # A shard whose start lies in the outer axis' padding is empty.
        start = offset(n, axes, hierarchy, coords) if length else 0
        whole.append(slice(start, start + length))
        own.append(slice(0, length))
    return tuple(whole), tuple(own)


def _merge(group: Sequence[Array], signature: Signature) -> Array:
    if isinstance(signature, Partial):
        return REDUCERS[signature.op](group)
    assert isinstance(signature, Broadcast)
    first = group[0]
    for other in group[1:]:
        if not np.all((first == other) | ((first != first) & (other != other))):  # NaN equals NaN here
            raise ValueError("copies of a broadcast tensor differ")
    return first


def parts_of(value: Array, op: str, group: int, rng: np.random.Generator) -> list[Array]:
    """`group` arrays that reduce to `value`: integers exactly, floats up to rounding."""
    if group == 1:
        return [value]
    if op == "sum":
        noise = rng.integers(-9, 10, size=(group - 1, *value.shape)).astype(value.dtype)
        with np.errstate(over="ignore"):  # integers wrap around; NumPy says so for scalars only
            return [*noise, (value - noise.sum(axis=0, dtype=value.dtype)).astype(value.dtype)]
    owner = rng.integers(0, group, size=value.shape)
    if op == "prod":  # one has the number and minus one, the others as many of these as make up for it
        signs = rng.integers(0, 2, size=value.shape).astype(bool) & np.asarray(group > 1)
        minus = np.asarray(-1).astype(value.dtype)
        flips = [((owner + i) % group < 2) & signs for i in range(group)]
        ones = [np.where(flip, minus, value.dtype.type(1)) for flip in flips]
        return [np.where(owner == i, value, 1).astype(value.dtype) * ones[i] for i in range(group)]
    if op in ("and", "or", "xor"):
        bits = [_bits(value, rng) for _ in range(group)]
        if op == "xor":
            return [value ^ np.bitwise_xor.reduce(bits[1:]), *bits[1:]]
        if op == "and":
            return [value | (x & ~np.bitwise_and.reduce(bits)) for x in bits]
        return [value & (x | ~np.bitwise_or.reduce(bits)) for x in bits]
    noise = rng.integers(0, 5, size=(group, *value.shape)).astype(value.dtype)
    return [
        np.where(owner == i, value, _worse(value, op, noise[i])).astype(value.dtype) for i in range(group)
    ]


def _bits(value: Array, rng: np.random.Generator) -> Array:
    """Any bits, as many as a tensor of integers or of truth values has."""
    if value.dtype.kind == "b":
        return np.asarray(rng.integers(0, 2, value.shape), bool)
    info = np.iinfo(value.dtype)
    return np.asarray(rng.integers(info.min, info.max, value.shape, value.dtype, endpoint=True))


def _worse(value: Array, op: str, noise: Array) -> Array:
    """`value` moved by `noise` to the side that the reduction ignores; integers do not wrap around."""
    if value.dtype.kind == "b":
        return value & noise if op == "max" else value | noise
    with np.errstate(over="ignore"):
        moved = value - noise if op == "max" else value + noise
    worse: Array = (np.minimum if op == "max" else np.maximum)(value, moved)
    return worse


def _cut(
    value: Array, nd: Sequence[Signature], hierarchy: Sequence[int], coords: Sequence[int], padding: float
) -> Array:
    """One device's part of a tensor of full shape, padded."""
    if value.dtype.kind in "fc" or value.dtype.kind == "V":
        fill = padding
    else:
        fill = True if value.dtype.kind == "b" else np.iinfo(value.dtype).max
    out = np.full(local_shape(value.shape, nd, hierarchy), fill, value.dtype)
    whole, own = _region(value.shape, nd, hierarchy, coords)
    out[own] = value[whole]
    return out
