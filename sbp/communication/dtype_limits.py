"""The limits of dtypes, and the identities of reductions, which fill padding."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sbp.compat.untyped import DType, finfo, iinfo


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
