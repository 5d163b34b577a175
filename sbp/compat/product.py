"""The product over devices: a reduction of XLA and NCCL for which `jax.lax` has no function."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax._src.lax import parallel
from jax.extend.core import Primitive
from jax.interpreters import mlir

_parallel: Any = parallel
_lower: Callable[..., Any] = getattr(_parallel, "_all_reduce_lowering", None) or _parallel._allreduce_lowering


def all_product(x: jax.Array, names: Sequence[str]) -> jax.Array:
    """The product over the devices along the mesh axes `names`."""
    whole: jax.Array = _product_p.bind(x, axes=tuple(names))
    return whole


def _lowered(ctx: Any, x: Any, *, axes: tuple[str, ...]) -> Any:
    return _lower(lax.mul_p, None, ctx, x, axes=axes, axis_index_groups=None)


_product_p: Any = Primitive("sbp_product")
_product_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_product_p, _lowered)
