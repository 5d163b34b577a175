"""Reading and writing rows of tables: those of parameters, and of every other tree with arrays by stack."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, Sharding
from jax.typing import ArrayLike
from numpy.typing import NDArray

from sbp.compat.untyped import DType, Leaf, PyTree, partition_spec, psum
from sbp.errors import EmbeddingError
from sbp.runtime.embedding.keys import problem
from sbp.runtime.embedding.row_map import RowMap
from sbp.runtime.embedding.shards import TableShard, axes_of, columns_spec, on_shards, whole_shard
from sbp.signature import B, Signature, Split

LEAST_ROWS = 128
"""Of a program that reads or writes; fewer are filled up. More are rounded up to a power of two."""


@dataclass(frozen=True, slots=True)
class StackLeaf:
    """An array with a line per row of a stack.

    Arguments:
      path: in its tree.
      stack: the stack's name.
      lead: the sizes of its dims that count rows.
    """

    path: str
    stack: str
    lead: tuple[int, ...]


def stack_leaves(tree: PyTree, maps: Mapping[str, RowMap]) -> list[StackLeaf | None]:
    """Of each leaf of a tree, whether it has a line per row of a stack: those below a key of its name."""
    return [_stack_leaf(path, x, maps) for path, x in jax.tree.leaves_with_path(tree)]


def lead_of(shape: tuple[int, ...], rows: RowMap) -> tuple[int, ...]:
    """The sizes of the dims of an array that count the rows of a stack; () if it has no line per row."""
    return next((lead for lead in (rows.lead, (rows.size,)) if shape[: len(lead)] == lead), ())


def as_stack(s: Signature, leaf: StackLeaf, shape: Sequence[int], stack: Sequence[int]) -> Signature:
    """How an array by row lies where its stack lies as `s`: alike along the dims that both have.

    Arguments:
      shape, stack: of the array, and of the stack.
    """
    if not isinstance(s, Split):
        return B
    columns = s.dim - (len(stack) - 1)
    if columns < 0:
        return Split(0) if s.dim == 0 else B
    at = len(leaf.lead) + columns
    return Split(at) if at < len(shape) and shape[at] == stack[s.dim] else B


def read_rows(tree: PyTree, maps: Mapping[str, RowMap], stack: str, rows: NDArray[np.int32]) -> PyTree:
    """The lines of some rows of a stack, of every array that has a line per row; None for other leaves.

    Arguments:
      rows: in one count over all groups.
    """
    filled = _filled(rows)

    def read(leaf: StackLeaf | None, x: Leaf) -> Leaf:
        if leaf is None or leaf.stack != stack:
            return None
        return _reader(leaf.lead, x.shape, _sharding(x))(x, filled)[: len(rows)]

    leaves, tree_def = jax.tree.flatten(tree)
    return jax.tree.unflatten(tree_def, list(map(read, stack_leaves(tree, maps), leaves)))


def write_rows(
    tree: PyTree, maps: Mapping[str, RowMap], stack: str, rows: NDArray[np.int32], values: PyTree
) -> PyTree:
    """The tree with some rows replaced, in place: its arrays of the stack are donated.

    Arguments:
      rows: in one count over all groups, none twice.
      values: a tree with lines for some arrays of the tree, at their paths; or an array, for the only one.

    Raises:
      EmbeddingError: if there is no array at such a path, or its lines have another shape.
    """
    leaves, tree_def = jax.tree.flatten(tree)
    known = stack_leaves(tree, maps)
    mine = {leaf.path: i for i, leaf in enumerate(known) if leaf is not None and leaf.stack == stack}
    given = _by_path(values, mine, stack)
    filled = _filled(rows)
    for path, lines in given.items():
        i, leaf = mine[path], known[mine[path]]
        assert leaf is not None
        x = leaves[i]
        rest = x.shape[len(leaf.lead) :]
        lines = _broadcast(path, lines, (len(rows), *rest), x.dtype)
        lines = np.concatenate([lines, np.zeros((len(filled) - len(rows), *rest), x.dtype)])
        leaves[i] = row_writer(leaf.lead, x.shape, _sharding(x))(x, filled, lines)
    return jax.tree.unflatten(tree_def, leaves)


@lru_cache(maxsize=256)
def row_writer(
    lead: tuple[int, ...], shape: tuple[int, ...], sharding: NamedSharding | None
) -> Callable[..., jax.Array]:
    """`(array, rows [n], lines [n, ...]) -> array`, donated; rows out of bounds are left out.

    Every device writes what it has of the rows; lines that are split are gathered for it.
    """
    if sharding is None:
        return jax.jit(partial(_written, whole_shard(lead, shape)), donate_argnums=0)
    specs = sharding.spec, partition_spec(), columns_spec(sharding, len(lead), len(shape))
    return jax.jit(on_shards(_written, lead, shape, sharding, specs, sharding.spec), donate_argnums=0)


# -- inside


def _stack_leaf(path: Any, x: Leaf, maps: Mapping[str, RowMap]) -> StackLeaf | None:
    shape = np.shape(x)
    for name in (str(key.key) for key in path if hasattr(key, "key") and str(key.key) in maps):
        if lead := lead_of(shape, maps[name]):
            return StackLeaf(jax.tree_util.keystr(path), name, lead)
    return None


def _sharding(x: Leaf) -> NamedSharding | None:
    """How an array is split; None if it is whole."""
    lies: Sharding | None = getattr(x, "sharding", None)
    return lies if isinstance(lies, NamedSharding) else None


def _filled(rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """Rows up to the next size that there are programs for; -1 for none."""
    size = max(LEAST_ROWS, 1 << max(len(rows) - 1, 0).bit_length())
    return np.concatenate([rows, np.full(size - len(rows), -1, np.int32)])


@lru_cache(maxsize=256)
def _reader(
    lead: tuple[int, ...], shape: tuple[int, ...], sharding: NamedSharding | None
) -> Callable[..., jax.Array]:
    """`(array, rows [n]) -> lines [n, ...]`, which every device has whole but for split columns."""
    if sharding is None:
        return jax.jit(partial(_read, (), whole_shard(lead, shape)))
    axes = tuple(a for d in range(len(lead)) for a in axes_of(sharding, d))
    out = columns_spec(sharding, len(lead), len(shape))
    specs = sharding.spec, partition_spec()
    return jax.jit(on_shards(partial(_read, axes), lead, shape, sharding, specs, out))


def _read(axes: tuple[str, ...], shard: TableShard, part: jax.Array, rows: jax.Array) -> jax.Array:
    lines = part.at[shard.index(rows)].get(mode="fill", fill_value=0)
    if not axes:
        return lines
    # Bits of one device and zeros of the others: as numbers, -0.0 would be lost.
    words = lax.bitcast_convert_type(lines, _WORDS[lines.dtype.itemsize])
    return lax.bitcast_convert_type(psum(words, axes), lines.dtype)


_WORDS: Mapping[int, DType] = {n: np.dtype(f"uint{8 * n}") for n in (1, 2, 4, 8)}


def _written(shard: TableShard, part: jax.Array, rows: jax.Array, lines: jax.Array) -> jax.Array:
    at = shard.index(rows)
    return part.at[at].set(lines.astype(part.dtype), mode="drop", wrap_negative_indices=False)


def _by_path(values: PyTree, mine: Mapping[str, int], stack: str) -> dict[str, Leaf]:
    """The lines that are given, by the paths of their arrays."""
    given = {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(values)}
    if [*given] == [""] and len(mine) == 1:
        return dict.fromkeys(mine, given[""])
    unknown = [path or "one array" for path, x in given.items() if path not in mine and np.ndim(x)]
    if unknown:
        legal, why = ", ".join(mine) or "nothing", "lines are written to the arrays at their paths"
        where = f"write(...): rows of stack {stack!r}"
        raise EmbeddingError(problem(where, ", ".join(unknown), legal, why, "a tree like that of read(...)"))
    return {path: x for path, x in given.items() if path in mine}


def _broadcast(path: str, lines: ArrayLike, wanted: tuple[int, ...], dtype: DType) -> NDArray[Any]:
    try:
        return np.broadcast_to(np.asarray(lines).astype(dtype), wanted)
    except ValueError:
        got, why = f"rows of shape {np.shape(lines)}", "there is a line for each id"
        fix = "the rows in the order of the ids"
        raise EmbeddingError(problem(f"write(...): {path}", got, f"{wanted}", why, fix)) from None
