"""What need not be said: operations that change nothing, and numbers that can be worked out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sbp.compat import ops
from sbp.compat.untyped import DType
from sbp.runtime.source.values import Eqn, Lit, Term, Var

IDENTITIES = ("stop_gradient", "pvary", "pbroadcast", "name", "sbp_annotate", "sbp_cotangent")
"""Primitives that give what they take, where nobody takes a derivative, and what is asked has been done."""
_FOLDED: Mapping[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
}
_COMPARED: Mapping[str, Any] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_EXTREMA = {"max": -np.inf, "min": np.inf}
_POSITION_BYTES = 4
_GROWING = ("add", "mul", "max", "min", "clamp", "convert_element_type", "broadcast_in_dim", "reshape")


@dataclass
class Peephole:
    """Looks at equations one by one, as they are made.

    Arguments:
      full: arrays of which every element is the same number.
      natural: integers that are not negative, such as a position along an axis.
      reshaped: what arrays are a reshape of.
    """

    full: dict[Var, Lit] = field(default_factory=dict)
    natural: set[Var] = field(default_factory=set)
    reshaped: dict[Var, Term] = field(default_factory=dict)

    def simpler(self, eqn: Eqn) -> Eqn | Term:
        """The equation, a simpler one, or what it gives if that is there already.

        Every result is the same number: what XLA, too, leaves out.
        """
        if len(eqn.outs) != 1 or eqn.blocks:
            return eqn
        found = self._known(eqn)
        if not isinstance(found, Eqn):
            return found
        self._learn(found)
        return found

    def _known(self, eqn: Eqn) -> Eqn | Term:
        (out,) = eqn.outs
        name, ins = eqn.name, eqn.ins
        numbers = [x if isinstance(x, Lit) else self.full.get(x) for x in ins]
        if name in _FOLDED and all(n is not None for n in numbers) and np.issubdtype(out.dtype, np.inexact):
            values = (np.asarray(n.value, n.dtype) for n in numbers if n is not None)
            with np.errstate(all="ignore"):
                value = Lit(np.asarray(_FOLDED[name](*values), out.dtype)[()], out.dtype)
            return value if not out.shape else _filled(eqn, value)
        if name == "convert_element_type" and isinstance(ins[0], Lit) and _plain(ins[0].dtype, out.dtype):
            return Lit(np.asarray(ins[0].value).astype(out.dtype)[()], out.dtype)
        if name in ("mul", "add", "div"):
            return self._neutral(eqn, numbers)
        if name == "lt" and ins[0] in self.natural and numbers[1] is not None and numbers[1].value == 0:
            return Lit(np.bool_(False), np.dtype(bool))
        if name in _COMPARED and all(n is not None for n in numbers):
            asked = _COMPARED[name](*(np.asarray(n.value, n.dtype) for n in numbers if n is not None))
            return _truth(asked) if not out.shape else _filled(eqn, _truth(asked))
        if name in _EXTREMA and any(n is not None and n.value == _EXTREMA[name] for n in numbers):
            x = ins[0 if numbers[0] is None else 1]
            return x if x.shape == out.shape else eqn
        if name == "integer_pow" and eqn.params["y"] == 1:
            return ins[0]
        if name == "select_n" and (mask := numbers[0]) is not None:
            chosen = ins[1 + int(mask.value)]
            return chosen if chosen.shape == out.shape else eqn
        if name == "broadcast_in_dim" and len(ins) == 1 and isinstance(ins[0], Var):
            return self._spread(eqn, ins[0])
        if name == "squeeze" and (number := numbers[0]) is not None:
            return _filled(eqn, number)
        if name == "select_n" and not out.shape and _same(numbers[1:]):
            return ins[1]
        if name == "reduce_sum" and out.shape != ins[0].shape:
            axes = eqn.params["axes"]
            if all(ins[0].shape[a] == 1 for a in axes):
                return self._reshape(eqn)
        if name == "reshape" and eqn.params.get("dimensions") is None and len(ins) == 1:
            return self._reshape(eqn)
        return eqn

    def _neutral(self, eqn: Eqn, numbers: Sequence[Lit | None]) -> Eqn | Term:
        """A product with 1, a sum of integers with 0."""
        (out,) = eqn.outs
        whole = np.issubdtype(out.dtype, np.integer)
        neutral = 0 if eqn.name == "add" else 1
        for k in (0, 1):
            x, n = eqn.ins[1 - k], numbers[k]
            if n is None or x.shape != out.shape or (eqn.name == "div" and k == 0):
                continue
            if n.value == neutral and (whole or eqn.name != "add"):
                return x
        return eqn

    def _spread(self, eqn: Eqn, x: Var) -> Eqn | Term:
        """What is spread over dims of size 1 that a reshape has taken away."""
        (out,) = eqn.outs
        if x in self.full:
            return _filled(eqn, self.full[x])
        first, dims = self.reshaped.get(x, x), tuple(eqn.params["broadcast_dimensions"])
        kept = [1] * len(out.shape)
        for d, size in zip(dims, x.shape, strict=True):
            kept[d] = size
        if math.prod(x.shape) == math.prod(out.shape):
            self.reshaped[out] = first
        if first is x or first.shape != tuple(kept):
            return eqn
        if first.shape == out.shape:
            return first
        params = {**eqn.params, "broadcast_dimensions": tuple(range(len(kept)))}
        return Eqn(eqn.primitive, params, (first,), eqn.outs, eqn.step)

    def _reshape(self, eqn: Eqn) -> Eqn | Term:
        """A reshape, of what the operand is a reshape of."""
        (out,) = eqn.outs
        x = eqn.ins[0]
        first = self.reshaped.get(x, x) if isinstance(x, Var) else x
        if first.shape == out.shape:
            return first
        primitive = ops.primitives()["reshape"]
        params = {"new_sizes": out.shape, "dimensions": None, "sharding": None}
        self.reshaped[out] = first
        return Eqn(primitive, params, (first,), eqn.outs, eqn.step)

    def _learn(self, eqn: Eqn) -> None:
        (out,), ins = eqn.outs, eqn.ins
        if eqn.name == "broadcast_in_dim" and len(ins) == 1 and isinstance(ins[0], Lit):
            self.full[out] = ins[0]
        wide = isinstance(out.dtype, np.dtype) and out.dtype.itemsize >= _POSITION_BYTES
        signed = wide and np.issubdtype(out.dtype, np.signedinteger)
        known = all((isinstance(x, Lit) and x.value >= 0) or x in self.natural for x in ins)
        if eqn.name in ("axis_index", "iota") or (eqn.name in _GROWING and signed and known):
            self.natural.add(out)


def _truth(asked: Any) -> Lit:
    return Lit(np.bool_(asked), np.dtype(bool))


def _plain(*dtypes: DType) -> bool:
    """Whether NumPy and XLA convert numbers of such types alike: small whole numbers of any, and floats."""
    return all(d == np.bool_ or np.issubdtype(d, np.integer) or np.issubdtype(d, np.floating) for d in dtypes)


def _same(numbers: Sequence[Lit | None]) -> bool:
    """Whether all are one number."""
    return len({None if n is None else np.asarray(n.value).tobytes() for n in numbers} | {None}) == 2 and all(
        n is not None for n in numbers
    )


def _filled(eqn: Eqn, value: Lit) -> Eqn:
    primitive = ops.primitives()["broadcast_in_dim"]
    shape = eqn.outs[0].shape
    params = {"shape": shape, "broadcast_dimensions": (), "sharding": None}
    return Eqn(primitive, params, (value,), eqn.outs, eqn.step)
