"""Rows of keys that nobody has written yet: as tables and their optimizer begin."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from sbp.compat.untyped import PyTree
from sbp.errors import EmbeddingError
from sbp.lazy import Optimizer, by_row
from sbp.runtime.embedding.admission import mix_bits
from sbp.runtime.embedding.initial import RowMaker
from sbp.runtime.embedding.keys import KEY_BITS
from sbp.runtime.embedding.tiers import messages
from sbp.runtime.embedding.tiers.row_codec import RowCodec
from sbp.runtime.embedding.tiers.segment import Keys, Rows

SIZES = 1 << 9, 1 << 14
"""Rows of the two programs that make rows: of few, and of many."""


def state_order(stack: str, optimizer: Optimizer, params: PyTree, leaves: Sequence[str]) -> list[int]:
    """Which array an optimizer begins stands for which array of a state.

    Arguments:
      stack: the name under which an optimizer sees the rows.
      params: `{stack: rows}`, or its shapes.
      leaves: the paths of the arrays by row in the state, in its order.

    Returns:
      of each leaf, the number of the optimizer's array by row; -1 for the rows themselves.

    Raises:
      EmbeddingError: if they are not the arrays of this optimizer.
    """
    made = [path for path, _ in _by_row(stack, optimizer, params)]
    for at in range(len(leaves)):
        others = [x for i, x in enumerate(leaves) if i != at]
        if len(others) == len(made) and all(map(_goes_into, made, others)):
            behind = iter(range(len(made)))
            return [-1 if i == at else next(behind) for i in range(len(leaves))]
    raise EmbeddingError(messages.other_state(stack, leaves, made))


@dataclass(frozen=True)
class NewRows:
    """Makes rows as bytes.

    Arguments:
      maker: of the rows of the tables.
      first: the number of its first table.
      stack: the name under which the optimizer sees them.
      optimizer: of the tables.
      codec: of rows.
      order: as `state_order` gives it.
      is_wide: whether numbers have 64 bits.
    """

    maker: RowMaker
    first: int
    stack: str
    optimizer: Optimizer
    codec: RowCodec
    order: tuple[int, ...]
    is_wide: bool

    def __call__(self, keys: Keys) -> Rows:
        """The first rows of some keys."""
        out = np.empty((len(keys), self.codec.width), np.uint8)
        few, many = SIZES
        for begin in range(0, len(keys), many):
            part = keys[begin : begin + many]
            count = few if len(part) <= few else many
            filled = np.concatenate([part, np.zeros(count - len(part), np.uint64)])
            ids = filled & np.uint64((1 << KEY_BITS) - 1)
            seeds = np.where(ids < 1 << 32, ids, mix_bits(ids)).astype(np.uint32)
            with jax.enable_x64(self.is_wide), jax.default_device(_host()):
                numbers = (filled >> np.uint64(KEY_BITS)).astype(np.int32) - np.int32(self.first)
                lines = self._made(np.maximum(numbers, 0), seeds)
                out[begin : begin + len(part)] = self.codec.rows([np.asarray(x)[: len(part)] for x in lines])
        return out

    @cached_property
    def _made(self) -> Any:
        def made(numbers: jax.Array, seeds: jax.Array) -> list[jax.Array]:
            rows = self.maker(numbers, seeds)
            state = [x for _, x in _by_row(self.stack, self.optimizer, {self.stack: rows})]
            return [rows if at < 0 else state[at] for at in self.order]

        return jax.jit(made)


# -- inside


def _host() -> jax.Device:
    """A device whose memory is the host's, where there is one."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def _by_row(stack: str, optimizer: Optimizer, params: PyTree) -> list[tuple[str, Any]]:
    """The arrays by row of an optimizer's state, and their paths."""
    state = (
        optimizer.init(params)
        if isinstance(params[stack], jax.Array)
        else jax.eval_shape(optimizer.init, params)
    )
    shape = params[stack].shape
    found = jax.tree.leaves_with_path(state)
    return [(jax.tree_util.keystr(path), x) for path, x in found if by_row(x.shape, shape)]


def _goes_into(part: str, whole: str) -> bool:
    """Whether a path is in another one, with others between: of a part of the parameters in that of all."""
    left = iter(_keys(whole))
    return all(any(key == other for other in left) for key in _keys(part))


def _keys(path: str) -> list[str]:
    return path.replace(".", "[").replace("]", "").split("[")[1:]
