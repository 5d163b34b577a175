"""Element-wise ops: every dim of the result may be split."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from sbp.communication.bits import identity_of
from sbp.compat.untyped import DType, finfo, iinfo
from sbp.rules.entry import Op, Row, element_flops
from sbp.rules.factors import MAX, MIN, additive_row, factors, same_dims
from sbp.rules.registry import rule
from sbp.signature import B, Partial

# What holds for sums, maxima and minima in the operands of each op. A plain op passes splits only.
PLAIN = """
abs acos asin atan2 atanh cos cosh digamma erf_inv igamma igammac igamma_grad_a is_finite
lgamma nextafter xor population_count clz polygamma polynomial pow rem
regularized_incomplete_beta rsqrt sin square tan shift_right_arithmetic shift_right_logical eq ne
eq_to le_to lt_to bessel_i0e bessel_i1e one_minus_square zeta threefry2x32
""".split()
# Defined on the whole line. (atanh is not: a part below the maximum may be outside, and give NaN.)
INCREASING = """
asinh atan cbrt ceil erf exp exp2 expm1 floor logistic round sign sinh tanh
""".split()
# Defined from some point upwards: where the minimum is inside, every part is.
INCREASING_ABOVE = "acosh sqrt log log1p log2".split()
DECREASING = "erfc not".split()
# No maxima pass here: infinity plus minus infinity is NaN, and integers wrap around.
ADDITIVE = "add sub add_any".split()
IDENTITY = "copy name stop_gradient sbp_annotate sbp_cotangent optimization_barrier".split()
PARTS_OF_COMPLEX = ["real", "imag"]


def _splits(op: Op) -> list[Row]:
    """Every dim."""
    return factors(op, *same_dims(op))


def _weighted(weight: float) -> Callable[[Op], float]:
    return lambda op: weight * element_flops(op)


rule(*PLAIN, fused=True, pointwise=True, flops=_weighted(2))(_splits)


@rule(*INCREASING, fused=True, pointwise=True, flops=_weighted(4))
def increasing(op: Op) -> list[Row]:
    """Increasing functions of one operand: maxima and minima pass."""
    return factors(op, *same_dims(op), increasing=(0,))


@rule(*INCREASING_ABOVE, fused=True, pointwise=True, flops=_weighted(4))
def increasing_above(op: Op) -> list[Row]:
    """Increasing, but NaN below some point: minima pass, maxima do not."""
    return [*factors(op, *same_dims(op)), Row((MIN,), (MIN,))]


@rule(*DECREASING, fused=True, pointwise=True, flops=_weighted(4))
def decreasing(op: Op) -> list[Row]:
    """Decreasing functions of one operand: maxima and minima are exchanged."""
    return factors(op, *same_dims(op), decreasing=(0,))


@rule(*ADDITIVE, fused=True, pointwise=True)
def additive(op: Op) -> list[Row]:
    """Sums of two operands: both partial at once."""
    return factors(op, *same_dims(op), additive=(0, 1))


@rule(*PARTS_OF_COMPLEX, fused=True, pointwise=True)
@rule(*IDENTITY, fused=True, pointwise=True, identity=True, layout=True)
def unchanged(op: Op) -> list[Row]:
    """What comes out is what went in, or a part of it; complex numbers have no extrema."""
    return factors(op, *same_dims(op), moved=(0,))


@rule("neg", "conj", fused=True, pointwise=True)
def negated(op: Op) -> list[Row]:
    """Additive; maxima and minima are exchanged, but for integers: the least has no negative."""
    turned = op.name == "neg" and jnp.issubdtype(op.dtypes[0], jnp.floating)
    return factors(op, *same_dims(op), additive=(0,), decreasing=(0,) if turned else ())


@rule("complex", fused=True, pointwise=True)
def complex_(op: Op) -> list[Row]:
    """Both parts partial at once; one of the two may be filled with zeros."""
    return factors(op, *same_dims(op), moved=(0, 1))


@rule("mul", fused=True, pointwise=True)
def mul(op: Op) -> list[Row]:
    """Linear in each operand while the other is whole."""
    return factors(op, *same_dims(op), linear=(0, 1))


@rule("shift_left", fused=True, pointwise=True)
def shift_left(op: Op) -> list[Row]:
    """A multiplication by a power of two, in integers that wrap."""
    return factors(op, *same_dims(op), linear=(0,))


@rule("div", fused=True, pointwise=True)
def div(op: Op) -> list[Row]:
    """Linear in the numerator, for numbers that are not integers."""
    exact = jnp.issubdtype(op.result_dtypes[0], jnp.inexact)
    return factors(op, *same_dims(op), linear=(0,) if exact else ())


@rule("max", "min", fused=True, pointwise=True)
def extremum(op: Op) -> list[Row]:
    """Increasing in each operand; also both operands at once under the same reduction."""
    operands, results = same_dims(op)
    same = MAX if op.name == "max" else MIN
    return [*factors(op, operands, results, increasing=(0, 1)), Row((same, same), (same,))]


@rule("lt", "le", "gt", "ge", fused=True, pointwise=True, flops=_weighted(2))
def ordered(op: Op) -> list[Row]:
    """All parts of a maximum are below what it is below. Of integers one is above what it is above: a float
    that is NaN would hide it."""
    far, near = (MAX, MIN) if op.name in ("lt", "le") else (MIN, MAX)
    rows = [*factors(op, *same_dims(op)), Row((far, B), (MIN,)), Row((B, near), (MIN,))]
    if jnp.issubdtype(op.dtypes[0], jnp.floating):
        return rows
    return [*rows, Row((near, B), (MAX,)), Row((B, far), (MAX,))]


@rule("and", "or", fused=True, pointwise=True)
def joined(op: Op) -> list[Row]:
    """Each operand, and both at once, under the same reduction; of booleans, all that is increasing."""
    operands, results = same_dims(op)
    if op.dtypes[0] == bool:
        same = MIN if op.name == "and" else MAX
        return [*factors(op, operands, results, increasing=(0, 1)), Row((same, same), (same,))]
    same = Partial(op.name)
    both = Row((same, same), (same,)), Row((same, B), (same,)), Row((B, same), (same,))
    return [*factors(op, operands, results), *both]


@rule("clamp", fused=True, pointwise=True)
def clamp(op: Op) -> list[Row]:
    """Increasing in the clamped operand."""
    return factors(op, *same_dims(op), increasing=(1,))


@rule("integer_pow", fused=True, pointwise=True)
def integer_pow(op: Op) -> list[Row]:
    """Linear only as the first power; odd powers increase, where nothing wraps."""
    y = op.params["y"]
    rises = y == 1 or (y > 0 and y % 2 == 1 and jnp.issubdtype(op.dtypes[0], jnp.floating))
    first = y == 1
    up = (0,) if rises and not first else ()
    return factors(op, *same_dims(op), moved=(0,) if first else (), increasing=up)


@rule("select_n", fused=True, pointwise=True)
def select_n(op: Op) -> list[Row]:
    """Sums and extrema of all cases pass while the predicate is whole."""
    return factors(op, *same_dims(op), moved=tuple(range(1, len(op.shapes))))


@rule("convert_element_type", "reduce_precision", fused=True, pointwise=True, layout=True)
def convert(op: Op) -> list[Row]:
    """Additive only where nothing is rounded and integers wrap alike; increasing where nothing wraps."""
    old, new = op.dtypes[0], op.result_dtypes[0]
    rounds = op.name == "reduce_precision"
    sums = not rounds and (old == new or sums_pass(old, new))
    rows = factors(op, *same_dims(op), increasing=(0,) if _rises(old, new) else ())
    # A wider type holds the same numbers: to whom an element belongs, its sign and NaN stay.
    return [*rows, additive_row(1, 1, (0,), moves=True)] if sums else rows


def _kind(dtype: DType) -> str:
    kinds = {"float": jnp.floating, "int": jnp.integer, "complex": jnp.complexfloating}
    return next((name for name, kind in kinds.items() if jnp.issubdtype(dtype, kind)), "other")


def sums_pass(old: DType, new: DType) -> bool:
    """Whether the conversion of a sum is the sum of the conversions: wider floats, not wider integers."""
    kinds = _kind(old), _kind(new)
    if kinds == ("int", "int"):
        return bool(iinfo(new).bits <= iinfo(old).bits)
    return kinds[0] in ("float", "complex") and kinds[1] in (kinds[0], "complex") and _holds(old, new)


def _rises(old: DType, new: DType) -> bool:
    """Whether larger values stay at least as large: no integer wraps, and what overflows becomes infinite."""
    kinds = _kind(old), _kind(new)
    if old == bool:
        return kinds[1] in ("int", "float")
    if kinds == ("int", "int"):
        a, b = iinfo(old), iinfo(new)
        return bool(b.min <= a.min and a.max <= b.max)
    return kinds[0] in ("float", "int") and kinds[1] == "float" and (old == new or _has_infinity(new))


def _has_infinity(dtype: DType) -> bool:
    return bool(np.isinf(identity_of("min", np.dtype(dtype))))


def _holds(old: DType, new: DType) -> bool:
    """Whether every value of float (or complex) type `old` is exact in `new`."""
    a, b = finfo(old), finfo(new)
    infinite = _kind(old) == "complex" or _has_infinity(new) or not _has_infinity(old)
    return infinite and bool(b.nmant >= a.nmant and b.maxexp >= a.maxexp and b.minexp <= a.minexp)


@rule(
    "bitcast_convert_type",
    fused=True,
    note="a change of the element's width adds or removes a last dim",
)
def bitcast(op: Op) -> list[Row]:
    """The dims that both sides share; a word dim is whole."""
    n = min(len(op.shapes[0]), len(op.results[0]))
    names = tuple(f"d{i}" for i in range(n))
    pad = (None,)
    operand = names + pad * (len(op.shapes[0]) - n)
    return factors(op, [operand], [names + pad * (len(op.results[0]) - n)])
