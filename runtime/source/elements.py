"""How ops that work element by element are spelled: tables, a row per primitive."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from sbp.compat.untyped import iinfo
from sbp.runtime.source.operands import Operands, Spelling
from sbp.runtime.source.text import (
    AND,
    ATOM,
    COMPARE,
    OR,
    POWER,
    PRODUCT,
    SHIFT,
    SUM,
    UNARY,
    XOR,
    Text,
    dtype_text,
)
from sbp.runtime.source.values import Lit

# name -> operator, how tightly it binds
_OPERATORS: Mapping[str, tuple[str, int]] = {
    "add": ("+", SUM),
    "add_any": ("+", SUM),
    "sub": ("-", SUM),
    "mul": ("*", PRODUCT),
    "div": ("/", PRODUCT),
    "and": ("&", AND),
    "or": ("|", OR),
    "xor": ("^", XOR),
    "eq": ("==", COMPARE),
    "ne": ("!=", COMPARE),
    "lt": ("<", COMPARE),
    "le": ("<=", COMPARE),
    "gt": (">", COMPARE),
    "ge": (">=", COMPARE),
}
_ARITHMETIC = ("add", "add_any", "sub", "mul", "div")
# Functions whose operands NumPy's broadcasting brings together.
_FUNCTIONS: Mapping[str, str] = {
    "max": "jnp.maximum",
    "min": "jnp.minimum",
    "exp": "jnp.exp",
    "exp2": "jnp.exp2",
    "log": "jnp.log",
    "log1p": "jnp.log1p",
    "expm1": "jnp.expm1",
    "sin": "jnp.sin",
    "cos": "jnp.cos",
    "tanh": "jnp.tanh",
    "sqrt": "jnp.sqrt",
    "square": "jnp.square",
    "abs": "jnp.abs",
    "floor": "jnp.floor",
    "ceil": "jnp.ceil",
    "is_finite": "jnp.isfinite",
}
# Functions of `jax.lax` of the same name, whose operands have the very shape and type.
_EXACT = (
    "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt clz complex conj cosh digamma "
    "erf erf_inv erfc igamma igamma_grad_a igammac imag lgamma log2 logistic mulhi nextafter "
    "one_minus_square polygamma population_count pow real rem rsqrt "
    "sign sinh tan zeta"
).split()


def _operator(o: Operands) -> Text | None:
    sign, binds = _OPERATORS[o.eqn.name]
    dtype = o.eqn.ins[0].dtype
    arithmetic = o.eqn.name in _ARITHMETIC
    if arithmetic and (dtype == np.bool_ or (o.eqn.name == "div" and not jnp.issubdtype(dtype, jnp.inexact))):
        return _lax(o, "add" if o.eqn.name == "add_any" else o.eqn.name)
    left, right = o.broadcast(o.eqn.outs[0].shape)
    if arithmetic and (plain := _unchanged(o, left, right)) is not None:
        return plain
    # To the right of what is not associative, and of comparisons on both sides, stands what binds tighter.
    # Sums of floats are added up in their order.
    a = left.within(binds + (binds == COMPARE))
    if o.eqn.name in ("and", "or", "xor") and isinstance(o.eqn.ins[1], Lit) and right.code.isdigit():
        right = Text(f"{int(right.code):#x}")
    return Text(f"{a} {sign} {right.within(binds + 1)}", binds)


def _shift(o: Operands) -> Text:
    """By a number that is less than the width; others are of `lax`, which says what then becomes of them."""
    x, by = o.eqn.ins
    info = iinfo(x.dtype)
    right = o.eqn.name != "shift_left"
    signed = np.issubdtype(x.dtype, np.signedinteger)
    if not isinstance(by, Lit) or not 0 <= by.value < info.bits:
        return _exact(o)
    if right and signed != (o.eqn.name == "shift_right_arithmetic"):
        return _exact(o)
    return Text(f"{o.exact(0).within(SHIFT)} {'>>' if right else '<<'} {int(by.value)}", SHIFT)


def _unchanged(o: Operands, left: Text, right: Text) -> Text | None:
    """The operand that a sum with 0 of integers, or a product with 1, gives as it is."""
    neutral = {"mul": 1, "add": 0}.get(o.eqn.name)
    for k, other in ((0, right), (1, left)):
        x, y = o.eqn.ins[k], o.eqn.ins[1 - k]
        exact = o.eqn.name == "mul" or jnp.issubdtype(x.dtype, jnp.integer)
        whole = not isinstance(y, Lit) and y.shape == o.eqn.outs[0].shape and other.shape is None
        if neutral is not None and isinstance(x, Lit) and exact and whole and x.value == neutral:
            return other
    return None


def _function(o: Operands) -> Text | None:
    if o.params.get("accuracy") is not None or o.eqn.ins[0].dtype == np.bool_:
        return _lax(o, o.eqn.name)
    args = o.broadcast(o.eqn.outs[0].shape)
    return Text(f"{_FUNCTIONS[o.eqn.name]}({', '.join(t.code for t in args)})")


def _lax(o: Operands, name: str) -> Text:
    return Text(f"lax.{name}({o.args()}{o.keywords('accuracy')})")


def _exact(o: Operands) -> Text:
    return _lax(o, o.eqn.name)


def _select(o: Operands) -> Text | None:
    if len(o.texts) != 3 or o.eqn.ins[0].dtype != np.bool_:
        return Text(f"lax.select_n({o.args()})")
    mask, no, yes = o.broadcast(o.eqn.outs[0].shape)
    if o.is_number(1) and o.is_number(2):
        no, yes = o.exact(1), o.exact(2)
    return Text(f"jnp.where({mask.code}, {yes.code}, {no.code})")


ELEMENTS: Mapping[str, Spelling] = {
    **dict.fromkeys(_OPERATORS, _operator),
    **dict.fromkeys(_FUNCTIONS, _function),
    **dict.fromkeys(_EXACT, _exact),
    "neg": lambda o: Text(f"-{o.exact(0).within(UNARY)}", UNARY),
    "not": lambda o: Text(f"~{o.exact(0).within(UNARY)}", UNARY),
    "shift_left": _shift,
    "shift_right_arithmetic": _shift,
    "shift_right_logical": _shift,
    "integer_pow": lambda o: Text(f"{o.exact(0).within(ATOM)} ** {o.params['y']}", POWER),
    "select_n": _select,
    "convert_element_type": lambda o: Text(
        f"{o.exact(0).within(ATOM)}.astype({dtype_text(o.params['new_dtype'])})"
    ),
    "bitcast_convert_type": lambda o: Text(
        f"lax.bitcast_convert_type({o.arg(0)}, {dtype_text(o.params['new_dtype'])})"
    ),
    "clamp": lambda o: Text(f"lax.clamp({o.args()})"),
    "round": lambda o: Text(f"lax.round({o.arg(0)}, {o.literal('rounding_method')})"),
    "reduce_precision": lambda o: Text(
        f"lax.reduce_precision({o.arg(0)}, {o.params['exponent_bits']}, {o.params['mantissa_bits']})"
    ),
}
