"""Python expressions as text, with what binds how tightly; literals of all that parameters hold."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp.compat import core
from sbp.compat.untyped import DType, finfo, iinfo
from sbp.signature import Partial, Signature, is_signature

# How tightly operators bind, loosest first.
COMPARE, OR, XOR, AND, SHIFT, SUM, PRODUCT, UNARY, POWER, ATOM = range(10)
_FEW = 64
"""Elements of an array that is written out."""
_INT32 = 2**31


@dataclass(frozen=True, slots=True)
class Text:
    """An expression.

    Arguments:
      code: Python, in which `«7»` stands for the name of value 7.
      binds: how tightly its outermost operator binds.
      shape: of what it gives, if that is not the value's own: what NumPy's broadcasting makes it.
      with_kept_dims: of a reduction, the same with its dims kept at size 1.
      axes: those dims.
      index: of what is cut out of an array, the array and the index of each dim.
      exactly: the same of the value's very shape, if `code` leaves that to NumPy's broadcasting.
      number: whether it is a number, of which every element of the value is one.
      einsum: of a product, the letters of both operands and of the result, both operands and what follows.
    """

    code: str
    binds: int = ATOM
    shape: tuple[int, ...] | None = None
    with_kept_dims: str = ""
    axes: tuple[int, ...] = ()
    index: tuple[str, tuple[str, ...]] = ("", ())
    exactly: str = ""
    number: bool = False
    einsum: tuple[str, str, str, Text, Text, str] | None = None

    def within(self, binds: int) -> str:
        """As an operand of what binds so tightly."""
        return self.code if self.binds >= binds else f"({self.code})"


def marker(id: int) -> str:
    """What stands for the name of a value."""
    return f"«{id}»"


def dtype_text(dtype: DType) -> str:
    """A dtype as Python.

    >>> dtype_text(np.dtype("float32")), dtype_text(np.dtype(bool))
    ('jnp.float32', 'jnp.bool_')
    """
    return "jnp.bool_" if dtype == np.bool_ else f"jnp.{np.dtype(dtype).name}"


def number(value: Any, dtype: DType) -> str:
    """A scalar as a Python number, which takes the type of the arrays around it.

    >>> number(np.float32(0.1), np.dtype("float32")), number(-np.inf, np.dtype("float32"))
    ('0.1', '-jnp.inf')
    """
    if dtype == np.bool_:
        return str(bool(value))
    if jnp.issubdtype(dtype, jnp.integer):
        whole = int(value)
        return str(whole) if -_INT32 <= whole < _INT32 else _extreme(whole, dtype) or typed_text(value, dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return repr(complex(value))
    if not math.isfinite(float(value)):
        return {"inf": "jnp.inf", "-inf": "-jnp.inf"}.get(str(float(value)), "jnp.nan")
    return _extreme(value, dtype) or _shortest(value, dtype)


def _shortest(value: Any, dtype: DType) -> str:
    """The shortest decimal that is this number in its type."""
    for digits in range(1, 18):
        text = f"{float(value):.{digits}g}"
        if np.asarray(float(text)).astype(dtype) == np.asarray(value).astype(dtype):
            return repr(float(text))
    return repr(float(value))


def _extreme(value: Any, dtype: DType) -> str:
    info, name = (finfo, "finfo") if jnp.issubdtype(dtype, jnp.floating) else (iinfo, "iinfo")
    for end in ("max", "min"):
        if value == getattr(info(dtype), end) and value not in (0, 1):
            return f"jnp.{name}({dtype_text(dtype)}).{end}"
    return ""


def typed_text(value: Any, dtype: DType) -> str:
    """A scalar of its very type."""
    if dtype == np.bool_:
        return f"np.bool_({bool(value)})"
    if jnp.issubdtype(dtype, jnp.integer):
        return (
            f"{dtype_text(dtype).replace('jnp', 'np')}({int(value)})"
            if _in_numpy(dtype)
            else _jax(value, dtype)
        )
    text = number(value, dtype)
    return f"np.{np.dtype(dtype).name}({text})" if _in_numpy(dtype) else _jax(value, dtype)


def _jax(value: Any, dtype: DType) -> str:
    text = repr(int(value)) if jnp.issubdtype(dtype, jnp.integer) else number(value, dtype)
    return f"jnp.{np.dtype(dtype).name}({text})"


def _in_numpy(dtype: DType) -> bool:
    return hasattr(np, np.dtype(dtype).name)


@dataclass
class GivenThings:
    """What no text can say: it is handed to the module when it is run.

    Arguments:
      things: by name.
    """

    things: dict[str, Any] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def name(self, thing: Any, wanted: str) -> str:
        """The expression that gives a thing."""
        if id(thing) not in self.names:
            wanted = "".join(c if c.isalnum() else "_" for c in wanted).strip("_") or "thing"
            free = (wanted if k == 0 else f"{wanted}_{k + 1}" for k in range(len(self.things) + 1))
            name = next(n for n in free if n not in self.things)
            self.things[name] = thing
            self.names[id(thing)] = name
        return f'given["{self.names[id(thing)]}"]'


def literal(value: Any, wanted: str, given: GivenThings) -> str:
    """Any parameter as Python.

    Arguments:
      wanted: what it is called if it cannot be written.
      given: takes what cannot be written.
    """
    inner: Callable[[Any], str] = lambda x: literal(x, wanted, given)  # noqa: E731
    if isinstance(value, enum.Enum):
        known = type(value).__name__ in vars(lax)
        return f"lax.{type(value).__name__}.{value.name}" if known else given.name(value, wanted)
    if value is None or isinstance(value, bool | int | str | np.bool_ | np.integer):
        if isinstance(value, str):
            return json.dumps(value)
        return repr(value.item() if isinstance(value, np.generic) else value)
    if is_signature(value):
        return signature(value)
    if isinstance(value, float):
        return number(value, np.dtype("float64"))
    if isinstance(value, np.generic):
        return typed_text(value, value.dtype)
    if isinstance(value, np.dtype) or (isinstance(value, type) and hasattr(value, "dtype")):
        return dtype_text(np.dtype(value))
    if isinstance(value, np.ndarray) and value.size <= _FEW:
        return array(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return record(value, {k: getattr(value, k) for k in value._fields}, wanted, given)
    if type(value) is tuple:
        return f"({', '.join(map(inner, value))}{',' if len(value) == 1 else ''})"
    if type(value) is list:
        return f"[{', '.join(map(inner, value))}]"
    if type(value) is dict and all(isinstance(k, str) for k in value):
        return "{" + ", ".join(f"{k!r}: {inner(v)}" for k, v in value.items()) + "}"
    own = getattr(type(value), "__dataclass_fields__", None)
    if own and type(value).__name__ in vars(lax):
        return record(value, {k: getattr(value, k) for k in own}, wanted, given)
    return given.name(value, wanted)


def signature(s: Signature) -> str:
    """A signature as Python.

    >>> from sbp.signature import P, S
    >>> signature(S(1)), signature(P), signature(P("max"))
    ('S(1)', 'P', 'P("max")')
    """
    return f'P("{s.op}")' if isinstance(s, Partial) and s.op != "sum" else repr(s)


def record(value: Any, fields: Mapping[str, Any], wanted: str, given: GivenThings) -> str:
    """A record of `lax`, such as dimension numbers, without fields that are empty by default."""
    name = type(value).__name__
    if name not in vars(lax):
        return given.name(value, wanted)
    shown = {k: v for k, v in fields.items() if not (v == () and k.endswith("batching_dims"))}
    return f"lax.{name}({', '.join(f'{k}={literal(v, wanted, given)}' for k, v in shown.items())})"


def array(value: Any) -> str:
    """A small array of the host."""
    elements = str(value.tolist())
    if jnp.issubdtype(value.dtype, jnp.inexact):
        flat = [number(x, value.dtype) for x in value.reshape(-1)]
        elements = _nested(flat, value.shape)
    return f"np.array({elements}, {dtype_text(value.dtype)})"


def _nested(flat: list[str], shape: tuple[int, ...]) -> str:
    if not shape:
        return flat[0]
    size = len(flat) // shape[0] if shape[0] else 0
    return "[" + ", ".join(_nested(flat[k * size : (k + 1) * size], shape[1:]) for k in range(shape[0])) + "]"


def kind_of(dtype: DType, shape: tuple[int, ...]) -> str:
    """A type for comments, such as `float32[8, 16]`."""
    return f"{str(dtype) if core.is_key(dtype) else np.dtype(dtype).name}[{', '.join(map(str, shape))}]"
