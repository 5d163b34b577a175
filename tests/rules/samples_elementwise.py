"""Applications of the element-wise ops."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sbp.annotation import Pin, annotate_p, cotangent_p
from sbp.compat import core
from tests.rules.claims import Sample, sample, whole

# Functions that share a rule run on one dim, once; the last samples take the rules apart.
ONE: Any = {"pairs": 0}
LINE, LINE_2 = whole((5,)), whole((5,), seed=1)
SMALL = LINE / 16
POSITIVE = whole((5,), low=1, high=9)
INTS = whole((5,), np.int32)
BYTES = whole((5,), np.int8, low=-100, high=100)
UNSIGNED = whole((5,), np.uint8, low=5, high=9)
BOOLS = whole((5,), bool)
COMPLEX = whole((5,), np.complex64)
AWKWARD = np.array([np.nan, np.inf, -np.inf, -0.0, 1, -2, 3, 5], np.float32)
KEYWORD = whole((5,), np.uint32, low=0, high=99)
EXTREME = whole((5,), np.int32, -(2**31), 2**31 - 1)
A, C = whole((5, 4)), whole((5, 4), seed=1)


def spelled(name: str) -> Any:
    """The function of `jax.lax` that binds the primitive `name`; None where this JAX has none."""
    return getattr(
        lax,
        {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "not": "bitwise_not"}.get(
            name, name
        ),
        None,
    )


def unary(names: str, x: np.ndarray, close: float = 1e-5) -> list[Sample]:
    """One sample for each function of `jax.lax`."""
    return [
        sample(name, spelled(name), x, close=close, label=str(x.dtype), **ONE)
        for name in names.split()
        if spelled(name)
    ]


def binary(names: str, x: np.ndarray, y: np.ndarray, close: float = 0.0) -> list[Sample]:
    """One sample for each function of two arrays."""
    return [
        sample(name, spelled(name), x, y, close=close, label=str(x.dtype), **ONE) for name in names.split()
    ]


def cast(x: np.ndarray, dtype: object) -> Sample:
    """A conversion."""
    label = f"{x.dtype}-{np.dtype(dtype)}"
    return sample("convert_element_type", lambda x: lax.convert_element_type(x, dtype), x, label=label, **ONE)


SAMPLES = [
    *unary(
        "abs cos cosh exp2 sin sinh tan acosh asinh atan sign square floor ceil round is_finite neg", LINE
    ),
    *unary("cbrt exp expm1 erf erfc logistic tanh bessel_i0e bessel_i1e", LINE),
    *unary("acos acosh asin atanh erf_inv", SMALL),
    *unary("sqrt log log1p log2 rsqrt digamma lgamma", POSITIVE),
    *unary("sqrt log log1p atanh acos neg sign", LINE),
    *unary("neg sign abs not population_count clz", INTS, 0),
    *unary("neg not abs", BYTES, 0),
    *unary("neg not population_count", UNSIGNED, 0),
    *unary("not", BOOLS, 0),
    *unary("neg real imag conj abs exp", COMPLEX),
    *unary("neg floor exp erf", AWKWARD),
    *unary("conj", LINE),
    *binary("add sub mul max min atan2 nextafter pow", LINE, POSITIVE, 1e-6),
    *binary("add sub mul div max min", LINE, LINE_2 + 0.5, 1e-6),
    *binary("rem", LINE, POSITIVE),
    *binary("add sub max min", AWKWARD, AWKWARD[::-1].copy()),
    *binary("add sub mul max min and or xor", INTS, whole((5,), np.int32, seed=1)),
    *binary(
        "div rem shift_left shift_right_arithmetic shift_right_logical", INTS, whole((5,), np.int32, 1, 4)
    ),
    *binary("add sub mul", BYTES, BYTES[::-1].copy()),
    *binary("add sub mul max min div rem", UNSIGNED, whole((5,), np.uint8, low=5, high=8, seed=2)),
    *binary("and or xor eq ne max min", BOOLS, whole((5,), bool, seed=1)),
    *binary("eq ne lt le gt ge", LINE, LINE_2),
    *binary("add sub mul div", COMPLEX, whole((5,), np.complex64, 1, 3), 1e-5),
    *binary("complex", LINE, LINE_2),
    *binary("igamma igammac igamma_grad_a zeta polygamma", POSITIVE, POSITIVE + 1, 1e-3),
    *[
        sample("polynomial", lambda x: jax.jit(lax.polynomial)(x, [1.0, 2.0, 3.0]), LINE, **ONE)
        for _ in range(hasattr(lax, "polynomial"))
    ],
    *[
        sample("one_minus_square", lax.one_minus_square, LINE, **ONE)
        for _ in range(hasattr(lax, "one_minus_square"))
    ],
    sample("regularized_incomplete_beta", lax.betainc, POSITIVE, POSITIVE, abs(SMALL), close=1e-3, **ONE),
    # Dims of size 1 beside larger ones, scalars, nothing at all.
    sample("add", lax.add, whole((5, 1)), whole((5, 4)), pairs=2),
    sample("mul", lax.mul, whole((1, 4)), whole((5, 1))),
    sample("mul", lambda x: x * 2.0, whole((7,)), label="literal"),
    sample("add", lambda x: x + 1, whole((7,), np.int32), label="literal"),
    sample("add", lax.add, whole((5, 7, 3)), whole((5, 7, 3), seed=1), pairs=3),
    sample("add", lax.add, whole(), whole(seed=1)),
    sample("exp", lax.exp, whole()),
    sample("max", lax.max, whole((9,)), whole((9,), seed=1)),
    sample("sub", lax.sub, EXTREME, whole((5,), np.int32)),
    sample("neg", lax.neg, EXTREME),
    sample("clamp", lax.clamp, np.float32(-1), whole((5, 4)), np.float32(2)),
    sample("clamp", lax.clamp, whole((5, 4)) - 2, whole((5, 4)), whole((5, 4)) + 2, **ONE),
    sample("clamp", lax.clamp, np.float32(-1), whole(), np.float32(2)),
    sample("clamp", lax.clamp, np.float32(-1), AWKWARD, np.float32(2), label="nan"),
    sample("select_n", lax.select_n, np.bool_(True), A, C),
    sample("select_n", lax.select_n, whole((5, 4), bool), A, C, pairs=2),
    sample("select_n", lax.select_n, whole((5, 4), np.int32, 0, 3), A, C, A - 2, label="three", **ONE),
    sample("select_n", lax.select_n, whole((8,), bool), AWKWARD, AWKWARD[::-1].copy(), label="nan"),
    sample("select_n", lax.select_n, BOOLS, INTS, BYTES.astype(np.int32), label="int", **ONE),
    sample("select_n", lax.select_n, BOOLS, BOOLS, ~BOOLS, label="bool", **ONE),
    sample("select_n", lambda p, x: jnp.where(p, x, 0.0), whole((5, 4), bool), A, label="literal", **ONE),
    *[
        sample("integer_pow", lambda x, y=y: lax.integer_pow(x, y), A + 0.5, label=f"y{y}", close=1e-5, **ONE)
        for y in (-2, 0, 2, 3)
    ],
    sample("integer_pow", lambda x: lax.integer_pow_p.bind(x, y=1), A, label="y1", **ONE),
    cast(LINE, np.float16),
    cast(LINE, jnp.bfloat16),
    cast(LINE.astype(jnp.bfloat16), np.float32),
    cast(LINE.astype(np.float16), np.float32),
    cast(LINE.astype(jnp.bfloat16), np.float16),
    cast(LINE, np.int32),
    cast(AWKWARD, np.float16),
    cast(AWKWARD, np.int32),
    cast(LINE, jnp.float8_e4m3fn),
    cast(LINE, np.complex64),
    cast(LINE, jnp.float8_e5m2),
    cast(LINE.astype(jnp.bfloat16), np.complex64),
    cast(LINE, bool),
    cast(INTS, np.float32),
    cast(INTS, np.int8),
    cast(INTS, np.int16),
    cast(INTS, np.uint32),
    cast(INTS, bool),
    cast(BYTES, np.int32),
    cast(BYTES, np.float32),
    cast(BYTES, np.uint8),
    cast(UNSIGNED, np.int32),
    cast(UNSIGNED, np.float32),
    cast(UNSIGNED, np.int8),
    cast(UNSIGNED, np.uint32),
    cast(BOOLS, np.float32),
    cast(BOOLS, np.int32),
    cast(EXTREME, np.float32),
    sample("reduce_precision", lambda x: lax.reduce_precision(x, 5, 3), A + 1 / 16, **ONE),
    sample("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, np.int32), A),
    sample(
        "bitcast_convert_type",
        lambda x: lax.bitcast_convert_type(x, np.int8),
        A.astype(np.int32),
        label="narrow",
    ),
    sample(
        "bitcast_convert_type",
        lambda x: lax.bitcast_convert_type(x, np.int32),
        A.astype(np.int8),
        label="wide",
    ),
    sample("threefry2x32", core.threefry, KEYWORD, KEYWORD, KEYWORD, KEYWORD + 1, **ONE),
    sample("copy", jnp.array, A, **ONE),
    sample("optimization_barrier", lax.optimization_barrier, A, **ONE),
    sample("sbp_annotate", lambda x: annotate_p.bind(x, pin=Pin(None, None, None)), A, **ONE),
    sample("sbp_cotangent", lambda x: cotangent_p.bind(x, pin=Pin(None, None, None)), A, **ONE),
    sample("stop_gradient", lax.stop_gradient, LINE, **ONE),
    sample("name", lambda x: checkpoint_name(x, "here"), LINE, **ONE),
    sample("add_any", jax.grad(lambda x: jnp.sum(x * x)), A, **ONE),
]
