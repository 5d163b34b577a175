"""What need not be said: operations that change nothing, and numbers that can be worked out."""

import math
from dataclasses import dataclass, field, replace

import numpy as np

from sbp.compat.untyped import DType
from sbp.runtime.source.values import Eqn, Lit, Term, Var

IDENTITIES = ("stop_gradient", "pvary", "pbroadcast", "name", "sbp_annotate", "sbp_cotangent")
"""Primitives that give what they take, where nobody takes a derivative, and what is asked has been done."""


@dataclass
class Peephole:
    """Looks at equations one by one, as they are made.

    Arguments:
      reshaped: what arrays are a reshape of.
    """

    reshaped: dict[Var, Term] = field(default_factory=dict)

    def simpler(self, eqn: Eqn) -> Eqn | Term:
        """The equation, a simpler one, or what it gives if that is there already.

        Every result is the same number: what XLA, too, leaves out.
        """
        (x, *rest), (out, *more) = eqn.ins or (None,), eqn.outs or (None,)
        if x is None or rest or out is None or more or eqn.blocks:
            return eqn
        if eqn.name == "convert_element_type" and isinstance(x, Lit) and _plain(x.dtype, out.dtype):
            return Lit(np.asarray(x.value).astype(out.dtype)[()], out.dtype)
        if eqn.name == "broadcast_in_dim" and isinstance(x, Var):
            return self._spread(eqn, x)
        if eqn.name == "reshape" and eqn.params.get("dimensions") is None:
            return self._reshape(eqn, x)
        return eqn

    def _spread(self, eqn: Eqn, x: Var) -> Eqn | Term:
        """What is spread over dims of size 1 that a reshape has taken away."""
        (out,) = eqn.outs
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
        return replace(eqn, params=params, ins=(first,))

    def _reshape(self, eqn: Eqn, x: Term) -> Eqn | Term:
        """A reshape, of what the operand is a reshape of."""
        (out,) = eqn.outs
        first = self.reshaped.get(x, x) if isinstance(x, Var) else x
        if first.shape == out.shape:
            return first
        self.reshaped[out] = first
        return replace(eqn, ins=(first,))


def _plain(*dtypes: DType) -> bool:
    """Whether NumPy and XLA convert numbers of such types alike: small whole numbers of any, and floats."""
    return all(d == np.bool_ or np.issubdtype(d, np.integer) or np.issubdtype(d, np.floating) for d in dtypes)
