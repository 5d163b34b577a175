"""Reductions between devices that lose neither NaN nor the sign of a zero.

Left to itself a collective loses both. A maximum of floats drops NaN on CPUs and in NCCL (both compare with
an instruction that does), where one device gives NaN. A sum on CPUs starts from +0.0, so that a -0.0 that one
device has, and zeros that the others fill in, come out as +0.0. Reduced as integers, both survive, for as
many bytes: floats of 16 bits and less have their maxima compared in 32. Boxing reduces so; a body of an op
has `Context.maximum` and `Context.total` (docs/communication.md).

The limits of dtypes, and the identities of reductions, which fill padding.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from sbp.compat import core
from sbp.compat.product import all_product
from sbp.compat.untyped import DType, all_gather, finfo, iinfo, pmax, pmin, psum, psum_scatter


def identity_of(op: str, dtype: DType) -> NDArray[Any]:
    """The identity of a reduction.

    >>> float(identity_of("max", np.dtype("float32")))
    -inf
    """
    if op in ("sum", "xor"):
        return np.zeros((), dtype)
    if op == "prod":
        return np.ones((), dtype)
    if op in ("and", "or"):
        ones = np.asarray(op == "and") if dtype == bool else np.asarray(-1 if op == "and" else 0)
        return ones.astype(dtype)
    if dtype == bool:
        return np.asarray(op == "min")
    if jnp.issubdtype(dtype, jnp.integer):
        info = iinfo(dtype)
        return np.asarray(info.min if op == "max" else info.max, dtype)
    finite = finfo(dtype)
    extreme = np.asarray(-np.inf if op == "max" else np.inf).astype(dtype)
    return extreme if np.isinf(extreme) else np.asarray(finite.min if op == "max" else finite.max, dtype)


COMPARED_BYTES = 4
"""The least width in which maxima and minima of floats are compared: no collective compares int16."""


def reduced_bytes(dtype: DType, how: str, wide_int16: bool) -> float:
    """Bytes that an element takes in a reduction between devices.

    XLA packs integers of 4 bits when it moves them, not when it computes with them.

    Arguments:
      how: of `PARTIAL_OPS`.
      wide_int16: whether XLA reduces integers of 16 bits as ones of 32, as it does on GPUs.

    >>> [reduced_bytes(np.dtype(name), "max", True) for name in ("float64", "float16", "int16", "int8")]
    [8.0, 4.0, 4.0, 1.0]
    >>> [reduced_bytes(np.dtype(name), "sum", False) for name in ("float16", "int16")]
    [2.0, 2.0]
    """
    itemsize = core.itemsize(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return 4.0 if itemsize == 2 and wide_int16 else max(itemsize, 1.0)
    compared = how in ("max", "min") and jnp.issubdtype(dtype, jnp.floating)
    return max(itemsize, float(COMPARED_BYTES)) if compared else itemsize


def extremum(x: jax.Array, how: str, names: Sequence[str]) -> jax.Array:
    """The "max" or "min" of what the devices along the mesh axes `names` have; NaN where one has NaN.

    Read as an integer, a float that is not negative orders as it should; of a negative one all bits but the
    sign are turned around first. NaN becomes the integer beyond all others.
    """
    reduce = pmax if how == "max" else pmin
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return reduce(x, tuple(names))
    wide = x if x.dtype.itemsize >= COMPARED_BYTES else x.astype(np.float32)
    word = np.dtype(f"int{8 * wide.dtype.itemsize}")
    beyond = np.iinfo(word).max if how == "max" else np.iinfo(word).min
    ordered = jnp.where(jnp.isnan(wide), word.type(beyond), _turned(lax.bitcast_convert_type(wide, word)))
    best = _turned(reduce(ordered, tuple(names)))  # the integers beyond all others are read as NaN
    return lax.bitcast_convert_type(best, wide.dtype).astype(x.dtype)


def reduction(x: jax.Array, how: str, names: Sequence[str]) -> jax.Array:
    """What the devices along the mesh axes `names` have, as one; "and", "or" and "xor" of what is gathered.

    Arguments:
      how: of `PARTIAL_OPS`.
    """
    if how == "sum":
        return psum(x, tuple(names))
    if how == "prod":
        return all_product(x, names)
    if how in ("max", "min"):
        return extremum(x, how, names)
    return fold(all_gather(x, tuple(names), axis=0, tiled=False), how, 0)


def _turned(word: jax.Array) -> jax.Array:
    """Bits of floats as integers that order alike, and back: it is its own inverse."""
    return jnp.where(word < 0, word ^ word.dtype.type(np.iinfo(word.dtype).max), word)


def owned_sum(x: jax.Array, names: Sequence[str]) -> jax.Array:
    """The sum along the mesh axes `names` of elements that one device has, and the others zeros: its bits."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return psum(x, tuple(names))
    words = _words(x)
    if words.dtype.itemsize == 2:
        (summed,) = _alone(psum(_paired(words.reshape(1, -1)), tuple(names)), words.size)
        words = summed.reshape(words.shape)
    else:
        words = psum(words, tuple(names))
    return _floats(words, x.dtype)


def owned_scatter(x: jax.Array, names: Sequence[str], dim: int, group: int) -> jax.Array:
    """The sum that `owned_sum` gives, of which each device keeps its part of `dim`.

    Arguments:
      group: how many devices there are along `names`.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return psum_scatter(x, names, scatter_dimension=dim, tiled=True)
    words = _words(x)
    if words.dtype.itemsize != 2:
        return _floats(psum_scatter(words, names, scatter_dimension=dim, tiled=True), x.dtype)
    parts = jnp.moveaxis(words, dim, 0)  # what a device keeps is one row of pairs
    own = parts.shape[0] // group, *parts.shape[1:]
    kept = psum_scatter(_paired(parts.reshape(group, -1)), names, scatter_dimension=0, tiled=True)
    return _floats(jnp.moveaxis(_alone(kept, math.prod(own)).reshape(own), 0, dim), x.dtype)


def _paired(words: jax.Array) -> jax.Array:
    """Rows of words of 16 bits, two in one of 32: no bit meets another, and GPUs add no shorter integers."""
    even = jnp.pad(words, ((0, 0), (0, words.shape[1] % 2)))
    return lax.bitcast_convert_type(even.reshape(len(words), -1, 2), np.uint32)


def _alone(pairs: jax.Array, size: int) -> jax.Array:
    """The inverse of `_paired`, of rows of some size."""
    return lax.bitcast_convert_type(pairs, np.uint16).reshape(len(pairs), -1)[:, :size]


def _words(x: jax.Array) -> jax.Array:
    """The bits of floats; of complex numbers those of both parts, in one more dim at the end."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    return lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))


def _floats(words: jax.Array, dtype: DType) -> jax.Array:
    """The inverse of `_words`."""
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.bitcast_convert_type(words, dtype)
    part = np.dtype(f"float{8 * words.dtype.itemsize}")
    return lax.complex(*(lax.bitcast_convert_type(words[..., k], part) for k in (0, 1)))


JOINS: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "max": lax.max,
    "min": lax.min,
    "prod": lax.mul,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
}
"""How two parts become one."""


def fold(x: jax.Array, how: str, axis: int) -> jax.Array:
    """What is left of `axis`, by halves: XLA on CPUs loses NaN in maxima of many numbers.

    Arguments:
      how: of `JOINS`.
    """
    while (n := x.shape[axis]) > 1:
        first, rest = (lax.slice_in_dim(x, *ends, axis=axis) for ends in ((0, n // 2), (n - n // 2, n)))
        joined = JOINS[how](first, rest)
        odd = [lax.slice_in_dim(x, n // 2, n // 2 + 1, axis=axis)] if n % 2 else []
        x = lax.concatenate([joined, *odd], axis) if odd else joined
    return jnp.squeeze(x, axis)
