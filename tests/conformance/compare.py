"""Whether two runs of a harness agree: dtypes, shapes and values, or what factors must satisfy.

Integers and booleans are equal. Floats differ by a few units of their last place; in ops that add or
multiply many elements, whose order a split changes, by more, and relative to the largest element. What an op
may return in more than one way (eigenvectors, factors, ties of an unstable sort) is compared by what defines
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sbp.compat import core

Array = np.ndarray[Any, Any]
Arrays = Sequence[Array]
Check = Callable[[Mapping[str, Any], Arrays, Arrays, Arrays], str]

# Differences in units of the dtype's epsilon, by its size in bytes.
ELEMENT = {2: 2.0, 4: 16.0, 8: 16.0}  # relative to each element
REDUCED = {2: 8.0, 4: 64.0, 8: 64.0}  # relative to the largest element
FACTOR = 30.0  # relative to the size and the largest element of a matrix

# Ops whose result is a sum or a product of many elements, or solves a system.
REDUCING = frozenset(
    "conv_general_dilated cumlogsumexp cumprod cumsum custom_linear_solve dot_general fft reduce_prod"
    " reduce_sum reduce_window_add reduce_window_mul scatter_add scatter_mul select_and_scatter_add"
    " triangular_solve tridiagonal_solve".split()
)


def mismatch(
    group: str, params: Mapping[str, Any], args: Sequence[Any], got: Sequence[Any], want: Sequence[Any]
) -> str:
    """What is wrong with the results, or nothing.

    Arguments:
      group, params: of the harness.
      args, got, want: the leaves of the arguments, of the results, and of the plain results.
    """
    if len(got) != len(want):
        return f"{len(got)} results, not {len(want)}"
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            return f"result {i} is {x.dtype}{list(x.shape)}, not {y.dtype}{list(y.shape)}"
    arrays = [list(map(to_numpy, xs)) for xs in (args, got, want)]
    check = CHECKS.get(group)
    if check is not None and all(np.isfinite(wide(y)).all() for y in arrays[2]):
        return check(params, *arrays)
    reduces = group in REDUCING
    found = (difference(x, y, reduces) for x, y in zip(*arrays[1:], strict=True))
    return next((f"result {i}: {text}" for i, text in enumerate(found) if text), "")


def to_numpy(x: Any) -> Array:
    """The array; a typed key as its words."""
    if not np.size(x):
        # jax 0.10 cannot fetch an empty array that is split.
        return np.empty(np.shape(x), x.dtype)
    return np.asarray(jax.random.key_data(x) if core.is_key(jnp.asarray(x).dtype) else x)


def wide(x: Array) -> Array:
    """Floats of any kind as float64 or complex128; the rest as it is."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return x.astype(np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64)


def epsilon(x: Array) -> float:
    """The spacing of the dtype's numbers at 1."""
    return float(jnp.finfo(x.dtype).eps)


def difference(got: Array, want: Array, reduces: bool = False) -> str:
    """What differs beyond rounding, or nothing; NaN equals NaN, and each infinity itself."""
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        wrong = got != want
        return _describe(got, want, wrong) if wrong.any() else ""
    limits = REDUCED if reduces else ELEMENT
    size = jnp.finfo(want.dtype).bits // 8
    x, y = wide(got), wide(want)
    with np.errstate(invalid="ignore", over="ignore"):
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        finite = np.isfinite(x) & np.isfinite(y)
        scale = np.abs(y) if not reduces else np.abs(y[np.isfinite(y)]).max(initial=0.0)
        tiny = float(jnp.finfo(want.dtype).tiny)
        near = np.abs(x - y) <= limits[size] * (epsilon(want) * scale + tiny * epsilon(want))
    wrong = ~(same | (finite & near))
    return _describe(got, want, wrong) if wrong.any() else ""


def _describe(got: Array, want: Array, wrong: Array) -> str:
    """How many elements are wrong, and the first of them."""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    place = f" at {list(at)}" if at else ""
    return f"{int(wrong.sum())} of {wrong.size} elements differ: {got[at]!r} is not {want[at]!r}{place}"


def _residual(name: str, left: Array, right: Array, eps: float, scale: float) -> str:
    """Whether two products of wide matrices agree, up to the rounding of matrices of such elements."""
    if not left.size:
        return ""
    bound = FACTOR * eps * max(left.shape[-2:]) * max(scale, np.finfo(np.float64).tiny)
    error = float(np.abs(left - right).max())
    return "" if error <= bound else f"{name}: an error of {error:.1e} is over {bound:.1e}"


def _dagger(x: Array) -> Array:
    return np.conj(np.swapaxes(x, -1, -2))


def _orthonormal(name: str, q: Array, eps: float) -> str:
    """Whether the columns are."""
    return _residual(f"{name} is not orthonormal", _dagger(q) @ q, np.eye(q.shape[-1]), eps, 1.0)


def _largest(x: Array) -> float:
    return float(np.abs(wide(x)).max(initial=0.0))


def _spectrum(got: Array, want: Array, scale: float) -> str:
    """Whether the values agree in any order, up to the rounding of a matrix with elements of `scale`."""
    eps, n = epsilon(want), want.shape[-1]
    for x, y in zip(wide(got).reshape(-1, n), wide(want).reshape(-1, n), strict=True):
        left = list(y)
        for value in x:
            nearest = min(range(len(left)), key=lambda i: abs(left[i] - value))
            if abs(left.pop(nearest) - value) > 10 * FACTOR * eps * n * scale:
                return f"{value} is no eigenvalue or singular value of the plain run"
    return ""


def _svd(params: Mapping[str, Any], args: Arrays, got: Arrays, want: Arrays) -> str:
    a, eps = wide(args[0]), epsilon(want[0])
    wrong = _spectrum(got[0], want[0], _largest(a)) if want[0].size else ""
    if wrong or not params["compute_uv"]:
        return wrong
    s, u, vh = map(wide, got)
    k = s.shape[-1]
    product = (u[..., :, :k] * s[..., None, :]) @ vh[..., :k, :]
    return (
        _orthonormal("u", u, eps)
        or _orthonormal("v", _dagger(vh), eps)
        or _residual("u s v", product, a, eps, _largest(a))
    )


def _eigh(params: Mapping[str, Any], args: Arrays, got: Arrays, want: Arrays) -> str:
    a, (v, w) = wide(args[0]), map(wide, got)
    eps, scale = epsilon(want[0]), _largest(a)
    if not a.size:
        return ""
    return (
        _spectrum(got[1], want[1], scale)
        or _orthonormal("v", v, eps)
        or _residual("a v = v w", a @ v, v * w[..., None, :], eps, scale)
    )


def _eig(params: Mapping[str, Any], args: Arrays, got: Arrays, want: Arrays) -> str:
    a, scale, eps = wide(args[0]), _largest(args[0]), epsilon(want[0])
    w, rest = wide(got[0]), list(map(wide, got[1:]))
    if not a.size:
        return ""
    wrong = _spectrum(got[0], want[0], scale)
    # Each vector has length 1.
    lengths = [np.abs(np.linalg.norm(v, axis=-2) - 1).max() for v in rest]
    wrong = wrong or next((f"a vector's length is off by {n:.1e}" for n in lengths if n > FACTOR * eps), "")
    if not wrong and params["compute_left_eigenvectors"]:
        left = rest.pop(0)
        wrong = _residual("u* a = w u*", _dagger(left) @ a, w[..., :, None] * _dagger(left), eps, 10 * scale)
    if not wrong and params["compute_right_eigenvectors"]:
        wrong = _residual("a v = v w", a @ rest[0], rest[0] * w[..., None, :], eps, 10 * scale)
    return wrong


def _qr(params: Mapping[str, Any], args: Arrays, got: Arrays, want: Arrays) -> str:
    a, (q, r), eps = wide(args[0]), map(wide, got), epsilon(want[0])
    return (
        _orthonormal("q", q, eps)
        or _residual("r is upper triangular", np.triu(r), r, eps, _largest(a))
        or _residual("q r", q @ r, a, eps, _largest(a))
    )


def _cholesky(params: Mapping[str, Any], args: Arrays, got: Arrays, want: Arrays) -> str:
    # The primitive leaves the upper triangle as it was.
    a, factor, eps = wide(args[0]), np.tril(wide(got[0])), epsilon(want[0])
    return _residual("l l*", factor @ _dagger(factor), a, eps, _largest(a))


def _lu(params: Mapping[str, Any], args: Arrays, got: Arrays, want: Arrays) -> str:
    a, eps = wide(args[0]), epsilon(want[0])
    packed, pivots, order = wide(got[0]), got[1], got[2]
    k = min(packed.shape[-2:])
    lower = np.tril(packed[..., :, :k], -1) + np.eye(packed.shape[-2], k)
    permuted = np.take_along_axis(a, order[..., :, None].astype(np.int64), axis=-2)
    swapped = np.broadcast_to(np.arange(a.shape[-2]), order.shape).copy()
    rows, swaps = swapped.reshape(-1, a.shape[-2]), pivots.reshape(-1, k)
    for row, swap in zip(rows, swaps, strict=True):
        for i, j in enumerate(swap):
            row[[i, j]] = row[[j, i]]
    if not np.array_equal(swapped, order):
        return f"the pivots {pivots.tolist()} are not the permutation {order.tolist()}"
    return _residual("p l u", lower @ np.triu(packed[..., :k, :]), permuted, eps, _largest(a))


def _reduce(params: Mapping[str, Any], args: Arrays, got: Arrays, want: Arrays) -> str:
    """XLA may add what a sum starts with any number of times, if it is not 0: also in the plain run."""
    terms = math.prod(args[0].shape[d] for d in params["dimensions"])
    times = range(-1, terms) if len(want) == 1 else [0]
    for extra in (np.asarray(params["init_value"] * k, np.int64) for k in times):
        shifted = (y + extra.astype(y.dtype) for y in want)
        if not any(difference(x, y, True) for x, y in zip(got, shifted, strict=True)):
            return ""
    return f"{difference(got[0], want[0], True)}, and not by a multiple of {params['init_value']}"


def _sort(params: Mapping[str, Any], args: Arrays, got: Arrays, want: Arrays) -> str:
    keys = len(want) if params["is_stable"] else params["num_keys"]
    wrong = next((w for x, y in zip(got[:keys], want[:keys], strict=True) if (w := difference(x, y))), "")
    if wrong or keys == len(want):
        return wrong
    # Elements with equal keys may come in any order, but each with its own.
    got, want = _rows(got, params["dimension"]), _rows(want, params["dimension"])
    return "" if all(map(np.array_equal, got, want)) else "the operands were not permuted together"


def _rows(arrays: Sequence[Array], dimension: int) -> list[Array]:
    """Arrays sorted together, by all of them, along a dim."""
    last = [np.moveaxis(x, dimension, -1) for x in arrays]
    order = np.lexsort(last[::-1], axis=-1)
    return [np.take_along_axis(x, order, -1) for x in last]


def _approx_top_k(params: Mapping[str, Any], args: Arrays, got: Arrays, want: Arrays) -> str:
    values, indices = got
    if not np.array_equal(np.take_along_axis(args[0], indices.astype(np.int64), -1), values):
        return "the indices do not point at the values"
    if (np.diff(np.sort(indices, axis=-1)) == 0).any():
        return "an index occurs twice"
    # On CPUs the approximation is exact.
    return difference(values, want[0])


CHECKS: dict[str, Check] = {
    "svd": _svd,
    "eigh": _eigh,
    "eig": _eig,
    "qr": _qr,
    "cholesky": _cholesky,
    "lu": _lu,
    "sort": _sort,
    "reduce": _reduce,
    "approx_top_k": _approx_top_k,
}
