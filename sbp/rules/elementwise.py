"""Element-wise ops: every dim of the result may be split."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from sbp.rules.factors import factors, same_dims
from sbp.rules.registry import Op, Row, element_flops, rule

# What holds for sums, maxima and minima in the operands of each op. An op in none of the tables passes splits only.
PLAIN = """
abs acos acosh asin atan2 cos cosh digamma erf_inv exp2 igamma igammac igamma_grad_a
is_finite lgamma nextafter not or and xor population_count clz polygamma pow regularized_incomplete_beta rem rsqrt
sin square sinh tan shift_left shift_right_arithmetic shift_right_logical eq ne lt le gt ge eq_to le_to lt_to
bessel_i0e bessel_i1e complex one_minus_square zeta random_gamma_grad threefry2x32
""".split()
INCREASING = """
asinh atan cbrt ceil erf exp expm1 floor log log1p logistic round sign sqrt tanh atanh
""".split()
DECREASING = "erfc".split()
ADDITIVE = "add sub add_any".split()
ADDITIVE_UNARY = "neg real imag conj stop_gradient copy copy_p sbp_annotate sbp_cotangent optimization_barrier".split()


def _splits(op: Op) -> list[Row]:
    operands, results = same_dims(op)
    return factors(op, operands, results)


def _weighted(weight: float) -> Callable[[Op], float]:
    return lambda op: weight * element_flops(op)


rule(*PLAIN, fused=True, flops=_weighted(2))(_splits)


@rule(*INCREASING, fused=True, flops=_weighted(4))
def increasing(op: Op) -> list[Row]:
    """Increasing functions of one operand: maxima and minima pass."""
    operands, results = same_dims(op)
    return factors(op, operands, results, increasing=(0,))


@rule(*DECREASING, fused=True, flops=_weighted(4))
def decreasing(op: Op) -> list[Row]:
    """Decreasing functions of one operand: maxima and minima are exchanged."""
    operands, results = same_dims(op)
    return factors(op, operands, results, decreasing=(0,))


@rule(*ADDITIVE, fused=True)
def additive(op: Op) -> list[Row]:
    """Sums of two operands: both partial at once, or a maximum plus a whole value."""
    operands, results = same_dims(op)
    minus = op.name == "sub"
    return factors(
        op,
        operands,
        results,
        additive=(0, 1),
        increasing=(0,) if minus else (0, 1),
        decreasing=(1,) if minus else (),
    )


@rule(*ADDITIVE_UNARY, fused=True)
def additive_unary(op: Op) -> list[Row]:
    """Functions that are additive in their one operand."""
    operands, results = same_dims(op)
    real = not jnp.issubdtype(op.dtypes[0], jnp.complexfloating)
    up = (0,) if real and op.name != "neg" else ()
    return factors(op, operands, results, additive=(0,), increasing=up, decreasing=(0,) if op.name == "neg" else ())


@rule("mul", fused=True)
def mul(op: Op) -> list[Row]:
    """Linear in each operand while the other is whole."""
    operands, results = same_dims(op)
    return factors(op, operands, results, linear=(0, 1))


@rule("div", fused=True)
def div(op: Op) -> list[Row]:
    """Linear in the numerator, for numbers that are not integers."""
    operands, results = same_dims(op)
    exact = jnp.issubdtype(op.result_dtypes[0], jnp.inexact)
    return factors(op, operands, results, linear=(0,) if exact else ())


@rule("max", "min", fused=True)
def extremum(op: Op) -> list[Row]:
    """Increasing in each operand; also both operands at once under the same reduction."""
    from sbp.rules.factors import MAX, MIN

    operands, results = same_dims(op)
    same = MAX if op.name == "max" else MIN
    rows = factors(op, operands, results, increasing=(0, 1))
    return [*rows, Row((same, same), (same,), fills=(0, 1))]


@rule("clamp", fused=True)
def clamp(op: Op) -> list[Row]:
    """Increasing in the clamped operand."""
    operands, results = same_dims(op)
    return factors(op, operands, results, increasing=(1,))


@rule("integer_pow", fused=True)
def integer_pow(op: Op) -> list[Row]:
    """Linear only as the first power."""
    operands, results = same_dims(op)
    return factors(op, operands, results, additive=(0,) if op.params["y"] == 1 else ())


@rule("select_n", fused=True)
def select_n(op: Op) -> list[Row]:
    """Additive in the cases while the predicate is whole."""
    operands, results = same_dims(op)
    return factors(op, operands, results, additive=tuple(range(1, len(op.shapes))))


@rule("convert_element_type", "reduce_precision", fused=True)
def convert(op: Op) -> list[Row]:
    """Additive only where no rounding or wrapping happens: to a wider float; always increasing between floats."""
    operands, results = same_dims(op)
    old, new = op.dtypes[0], op.result_dtypes[0]
    floats = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    widening = old == new or (floats and _holds(old, new))
    exact = widening and op.name == "convert_element_type"
    return factors(
        op, operands, results, additive=(0,) if exact else (), increasing=(0,) if floats or old == new else ()
    )


def _holds(old: object, new: object) -> bool:
    """Whether every value of float type `old` is exact in `new`."""
    a, b = jnp.finfo(old), jnp.finfo(new)
    return bool(b.nmant >= a.nmant and float(b.maxexp) >= float(a.maxexp) and b.minexp <= a.minexp)


@rule("bitcast_convert_type", fused=True, note="a change of the element's width adds or removes a last dim")
def bitcast(op: Op) -> list[Row]:
    """The dims that both sides share; a word dim is whole."""
    n = min(len(op.shapes[0]), len(op.results[0]))
    names = tuple(f"d{i}" for i in range(n))
    pad = (None,)
    operand = names + pad * (len(op.shapes[0]) - n)
    result = names + pad * (len(op.results[0]) - n)
    return factors(op, [operand], [result])

