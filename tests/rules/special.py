"""Values that no rule may assume away: infinities, NaN, both zeros, the ends of integers; and their parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from sbp import view
from sbp.compat import core
from sbp.rules import Row
from sbp.signature import P, Partial

Array = np.ndarray[Any, Any]
SPECIAL = (np.inf, -np.inf, np.nan, -0.0)
# Operands that must be what an op was promised: identities of a user's function, ids of their own group.
PROMISED: dict[str, Callable[[Any, int], Sequence[int]]] = {
    "reduce": lambda params, n: range(n // 2, n),
    "reduce_window": lambda params, n: range(n // 2, n),
    **dict.fromkeys(
        ("sbp_update_rows", "sbp_sum_rows"), lambda params, n: range(n) if params["grouped"] else ()
    ),
}
ZEROS_WITHOUT_SIGN = {
    "sbp_update_rows": "a row that no id names stays as it is; the dense step adds +0.0 to it",
}


def to_numpy(x: Any) -> Array:
    """The array in NumPy; a typed key as its words, in one more dim."""
    return np.asarray(jax.random.key_data(x) if core.is_key(x.dtype) else x)


def from_numpy(x: Array, like: Any) -> Any:
    """The opposite of `to_numpy`."""
    if not core.is_key(like.dtype):
        return x
    return jax.random.wrap_key_data(jax.numpy.asarray(x), impl=jax.random.key_impl(like))


def redrawn(value: Array, dtype: Any, extreme: bool, rng: np.random.Generator) -> Array:
    """Other values of the same kind: small numbers; integers, which may be indices, up to what there is."""
    if core.is_key(dtype):
        return np.asarray(rng.permutation(value.reshape(-1)).reshape(value.shape))
    if value.dtype.kind == "b":
        return np.asarray(rng.integers(0, 2, value.shape).astype(bool))
    if value.dtype.kind in "iu":
        low, high = min(0, int(value.min(initial=0))), int(value.max(initial=0))
        return rng.integers(low, high, value.shape, value.dtype, endpoint=True)
    # Not zero: a finite sum of parts divided by zero is infinite, the parts are so with both signs.
    small = [-4, -3, -2, -1, 1, 2, 3, 4]
    fresh = rng.choice(small, value.shape).astype(value.dtype)
    if value.dtype.kind == "c":
        fresh = fresh + 1j * rng.choice(small, value.shape).astype(value.dtype)
    if extreme:
        fresh = fresh + (value.dtype.itemsize > 2) * rng.integers(0, 4, value.shape) / 4
        odd = rng.permutation(np.resize(rng.permutation(SPECIAL), value.size)).reshape(value.shape)
        fresh = np.where(rng.random(value.shape) < 0.6, odd, fresh)
    return np.asarray(fresh).astype(value.dtype)


def any_integers(value: Array, rng: np.random.Generator) -> Array:
    """Integers of the whole range of their type, its ends often."""
    info = np.iinfo(value.dtype)
    ends = rng.choice(np.array([info.min, info.max, 0, 1], value.dtype), value.shape)
    middle = rng.integers(info.min, info.max, value.shape, value.dtype, endpoint=True)
    return np.where(rng.random(value.shape) < 0.6, ends, middle)


def ignored(value: Array, op: str, rng: np.random.Generator) -> Array:
    """What a maximum (minimum) with `value` ignores: any integers, fractions, anything beside NaN."""
    if value.dtype.kind == "b":
        noise = rng.integers(0, 2, value.shape).astype(bool)
        return value & noise if op == "max" else value | noise
    if value.dtype.kind in "iu":
        info = np.iinfo(value.dtype)
        low, high = (info.min, value) if op == "max" else (value, info.max)
        return rng.integers(low, high, value.shape, value.dtype, endpoint=True)
    noise = (rng.integers(0, 20, value.shape) / 4).astype(value.dtype)
    near = value - noise if op == "max" else value + noise
    return np.where(near == near, near, rng.integers(-9, 10, value.shape).astype(value.dtype))


def special_draw(value: Array, dtype: Any, rng: np.random.Generator) -> Array:
    """Values of which many are special, by kind; of an empty tensor there is nothing to draw."""
    if not value.size:
        return value
    if value.dtype.kind in "iu" and not core.is_key(dtype):
        return any_integers(value, rng)
    return redrawn(value, dtype, True, rng)


def special_parts(value: Array, op: str, group: int, owned: bool, rng: np.random.Generator) -> list[Array]:
    """Parts of special values. Of a sum: one device has an infinity or NaN, the others anything finite.

    Arguments:
      owned: whether each element is on one device, with zeros on the others, so that its bits come through.
    """
    owner = rng.integers(0, group, value.shape)
    mine = [owner == i for i in range(group)]
    if op not in ("sum", "max", "min"):
        return view.parts_of(value, op, group, rng)
    if op != "sum":
        return [np.where(m, value, ignored(value, op, rng)).astype(value.dtype) for m in mine]
    zero = np.zeros((), value.dtype)
    if owned:
        return [np.where(m, value, zero).astype(value.dtype) for m in mine]
    if value.dtype.kind in "iu":
        info = np.iinfo(value.dtype)
        rest = rng.integers(info.min, info.max, (group - 1, *value.shape), value.dtype, endpoint=True)
        return [*rest, value - np.sum(rest, axis=0, dtype=value.dtype)]
    noise = rng.integers(-9, 10, (group, *value.shape)).astype(value.dtype)
    noise[0] = -noise[1:].sum(axis=0, dtype=value.dtype)
    # Of -0.0 all parts are so: anything else adds up to +0.0.
    parts = [np.where(m, value + n, n).astype(value.dtype) for m, n in zip(mine, noise, strict=True)]
    minus = (value == 0) & np.signbit(value.real)
    return [np.where(minus, value, part).astype(value.dtype) for part in parts]


def halves(*xs: Array) -> list[list[Array]]:
    """The real and the imaginary parts of complex arrays; others as they are."""
    if xs[0].dtype.kind != "c":
        return [list(xs)]
    return [[x.real for x in xs], [x.imag for x in xs]]


def bits(x: Array) -> Array:
    """The bits of the elements, as unsigned integers."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").astype(np.uint64)


def unlike_special(
    parts: Sequence[Array], op: str, want: Array, close: float, bit_for_bit: bool
) -> str | None:
    """What is wrong with what parts reduce to, as the collectives do it.

    Arguments:
      bit_for_bit: whether each element should be on one device alone, whose bits come through. Of other sums
        the sign of a zero is not looked at: a sum is arithmetic.
    """
    if bit_for_bit and want.dtype.kind == "c":
        found = [unlike_special(p, op, w, close, True) for *p, w in halves(*parts, want)]
        return next(filter(None, found), None)
    if bit_for_bit:
        held = sum((bits(p) != 0).astype(int) for p in parts)
        if np.max(held, initial=0) > 1:
            return f"an element is on {np.max(held)} devices"
        return unlike(functools.reduce(lambda a, b: np.where(bits(b) != 0, b, a), parts), want, close)
    with np.errstate(all="ignore"):
        if op == "sum":
            return unlike(np.sum(parts, axis=0, dtype=want.dtype), want, close, signs=False)
        if op not in ("max", "min"):
            return unlike(view.REDUCERS[op](parts), want, close)
        # Of zeros +0.0 is the larger one.
        best = (np.max if op == "max" else np.min)(parts, axis=0)
        if want.dtype.kind == "f":
            sign = -1.0 if op == "min" else 1.0
            larger = np.any([(p == 0) & (np.signbit(p) == (sign < 0)) for p in parts], axis=0)
            zero = np.copysign(np.zeros_like(best, np.float64), np.where(larger, sign, -sign))
            best = np.where(best == 0, zero.astype(best.dtype), best)
        return unlike(best, want, close)


def unlike(got: Array, want: Array, close: float, signs: bool = True) -> str | None:
    """How two arrays differ: in NaN, in a sign (of a zero too, with `signs`), or by more than `close`."""
    if want.dtype.kind in "biu" or not want.size:
        return None if np.array_equal(got, want) else f"got\n{got}\nwant\n{want}"
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    a, b = got.astype(wide), want.astype(wide)
    both = [tuple(map(np.atleast_1d, pair)) for pair in halves(a, b)]
    alike = np.allclose(a, b, rtol=close, atol=close, equal_nan=True)
    for x, y in both if signs else ():
        zeros = (x == 0) & (y == 0)
        alike = alike and np.array_equal(np.signbit(x[zeros]), np.signbit(y[zeros]))
    return None if alike else f"got\n{got}\nwant\n{want}"


def special_problem(claim: Any, row: Row, close: float) -> str | None:
    """What is wrong where operands are infinite, NaN, -0.0 or the ends of integers.

    A row that says so may be wrong there, and no other: it is what the default may do differently, and what
    `Options(strict_nonfinite=True)` does without.
    """
    app, (group,) = claim.app, claim.hierarchy
    op = app.op([x.shape for x in app.operands], [x.shape for x in app.results], group)
    if row.needs_finite(op):
        return None
    values, results = app.special
    rng, owned = np.random.default_rng(3), any(s == P for s in row.operands)
    for keeps in (False, True) if owned else (False,):
        shards = [
            dict(zip(view.coordinates((group,)), special_parts(v, s.op, group, keeps, rng), strict=True))
            if isinstance(s, Partial)
            else view.split(v, (s,), (group,))
            for v, s in zip(values, row.operands, strict=True)
        ]
        for i, got in enumerate(claim.run(shards)):
            s, want, bits = row.results[i], to_numpy(results[i]), row.owned or (keeps and row.moves)
            if isinstance(s, Partial):
                bad = unlike_special(list(got.values()), s.op, want, close, bits)
            else:
                signs = app.node.op not in ZEROS_WITHOUT_SIGN
                bad = unlike(view.join(got, want.shape, (s,), (group,)), want, close, signs)
            if bad:
                return f"special values, result {i}: {bad}\nof\n{values}"
    return None
