"""Rewrites scatters of one number per row into zeros as element-wise ops (one-hot).

The gradient of `take_along_axis` with one index per row, as a loss picks the logits of its labels, is such a
scatter. XLA writes the zeros, scatters into them and reads them again. A comparison of the index with an iota
is fused into the reader of the gradient, and can be split in any way.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from sbp.compat import ops
from sbp.compat.core import Aval, ClosedJaxpr, JaxprEqn
from sbp.passes.program.graph import Const, Node, Operand

SCATTER = "scatter-add"


def one_hot_scatter(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The element-wise ops of a scatter that adds one number to each row of zeros; None for any other.

    No two updates meet, so every element is a zero or one update, to the last bit: adding a zero of either
    sign leaves the zero. An index out of bounds equals no position: its update is dropped, unless the scatter
    clips indices.
    """
    dims = _picked_dims(eqn)
    if dims is None:
        return None
    rest, at = dims
    made: Aval = eqn.outvars[0].aval
    shape, mode = tuple(made.shape), eqn.params["mode"]
    kept = eqn.params["dimension_numbers"].scatter_indices_batching_dims

    def run(operand: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
        index = lax.squeeze(indices, [d for d in range(indices.ndim) if d not in kept])
        update = lax.squeeze(updates, [d for d in range(updates.ndim) if d not in kept])
        if mode is not None and mode.name == "CLIP":
            index = lax.clamp(np.array(0, index.dtype), index, _last(shape[at], index.dtype))
        wide = np.int64 if index.dtype.itemsize > 4 else np.int32
        index = lax.convert_element_type(index, wide)
        adds = lax.ne(update, lax.full_like(update, 0))
        index = lax.select(adds, index, lax.full_like(index, -1))
        hit = lax.eq(lax.broadcast_in_dim(index, shape, rest), lax.broadcasted_iota(wide, shape, at))
        return lax.select(hit, lax.broadcast_in_dim(update, shape, rest), operand)

    return ops.retrace(run, eqn)


def _last(size: int, dtype: np.dtype) -> np.ndarray:
    """The last position, or the largest number of a dtype that does not reach it."""
    return np.array(min(size - 1, np.iinfo(dtype).max), dtype)


def _picked_dims(eqn: JaxprEqn) -> tuple[tuple[int, ...], int] | None:
    """Of a scatter with one index per row: the dims of rows, and the indexed dim."""
    if eqn.primitive.name != SCATTER:
        return None
    operand: Aval = eqn.outvars[0].aval
    indices: Aval = eqn.invars[1].aval
    dn = eqn.params["dimension_numbers"]
    rest, kept = tuple(dn.operand_batching_dims), tuple(dn.scatter_indices_batching_dims)
    at = tuple(dn.scatter_dims_to_operand_dims)
    one_number = len(at) == 1 and tuple(dn.inserted_window_dims) == at and not dn.update_window_dims
    if not one_number or not rest or sorted((*rest, *at)) != list(range(len(operand.shape))):
        return None
    in_order = list(rest) == sorted(rest) and list(kept) == sorted(kept)
    one_index = all(n == 1 for d, n in enumerate(indices.shape) if d not in kept)
    return (rest, at[0]) if in_order and one_index and operand.shape[at[0]] < 1 << 31 else None


def is_zero(x: Operand, nodes: Sequence[Node]) -> bool:
    """Whether a value is zero everywhere, and not minus zero; decided from the op that makes it."""
    for node in reversed(nodes):
        if x in node.outputs:
            made = node.inputs[0] if node.op == "broadcast_in_dim" else None
            return isinstance(made, Const) and not any(np.asarray(made.value, made.dtype).tobytes())
    return False
