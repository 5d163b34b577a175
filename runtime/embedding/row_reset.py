"""Rows that a vocabulary has given to other keys begin anew, inside the compiled step."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr
from numpy.typing import NDArray

from sbp.compat.untyped import PyTree
from sbp.errors import EmbeddingError
from sbp.lazy import Optimizer
from sbp.runtime.embedding.admission import mix_bits
from sbp.runtime.embedding.collection import Collection
from sbp.runtime.embedding.initial import initial_rows
from sbp.runtime.embedding.keys import NO_ID, problem
from sbp.runtime.embedding.row_access import stack_leaves
from sbp.runtime.embedding.shards import whole_shard
from sbp.runtime.embedding.vocabulary import Assignment


class RowReset(NamedTuple):
    """The rows of each stack that begin anew, an argument of a step; all batches have one of one size.

    Arguments:
      rows: `{stack: [n]}` int32 in one count over all groups; -1 where there are fewer.
      seeds: `{stack: [n]}` uint32, of the keys that have the rows now.
    """

    rows: dict[str, NDArray[np.int32]]
    seeds: dict[str, NDArray[np.uint32]]


def row_reset(tables: Collection, found: Mapping[str, Assignment], size: int) -> RowReset:
    """What a batch has changed in vocabularies, on the host.

    Arguments:
      found: of each table that has a vocabulary, what its lookup gave.
      size: rows of a stack that a batch may change, at most: the ids of a batch are always enough.

    Raises:
      EmbeddingError: if there are more.
    """
    rows = {stack: np.full(size, NO_ID, np.int32) for stack in tables.stacks}
    seeds = {stack: np.zeros(size, np.uint32) for stack in tables.stacks}
    filled = dict.fromkeys(tables.stacks, 0)
    for table, one in found.items():
        stack, n = tables.stack_of(table), one.new_rows.size
        begin = filled[stack]
        filled[stack] += n
        if filled[stack] <= size:
            at = slice(begin, begin + n)
            rows[stack][at] = np.asarray(tables.row_maps[stack].row(table, jnp.asarray(one.new_rows)))
            seeds[stack][at] = mix_bits(one.new_keys.view(np.uint64)).astype(np.uint32)
    if over := {stack: n for stack, n in filled.items() if n > size}:
        got = ", ".join(f"{n} in stack {stack!r}" for stack, n in over.items()) + " rows that are new"
        why, fix = "a step is compiled for so many", "row_reset(..., size) of the ids in a batch"
        raise EmbeddingError(problem("row_reset(...)", got, f"at most {size}", why, fix))
    return RowReset(rows, seeds)


def reset_rows(
    tables: Collection, params: PyTree, state: PyTree, tx: Optimizer, change: RowReset, key: jax.Array
) -> tuple[PyTree, PyTree]:
    """Parameters and state of a step's beginning: rows of new keys have initial values; traceable.

    What a row begins with depends on `key`, the table and the row's key alone, so that a key that comes back
    begins as it did before.

    Arguments:
      params: `{stack: array}`.
      state: of an optimizer that sees stacks by name: `sbp.rows(tx).init(...)`.
      tx: the optimizer.

    Raises:
      EmbeddingError: if another optimizer has made the state.
    """
    new = {
        name: initial_rows(stack, key, jnp.asarray(change.rows[name]), jnp.asarray(change.seeds[name]))
        for name, stack in tables.stacks.items()
    }
    return _put(tables, params, new, change), _put(tables, state, tx.init(new), change)


def _put(tables: Collection, tree: PyTree, new: PyTree, change: RowReset) -> PyTree:
    """A tree with rows that begin anew; what is not by row stays."""
    lines = {keystr(path): x for path, x in jax.tree.leaves_with_path(new)}
    leaves, structure = jax.tree.flatten(tree)
    for i, leaf in enumerate(stack_leaves(tree, tables.row_maps)):
        if leaf is None:
            continue
        if leaf.path not in lines:
            legal, why = ", ".join(lines) or "no array by row", "rows begin as the optimizer begins"
            got, fix = f"a state with {leaf.path}", "the optimizer that has made the state"
            raise EmbeddingError(problem("reset_rows(...)", got, legal, why, fix))
        at = whole_shard(leaf.lead, leaves[i].shape).index(jnp.asarray(change.rows[leaf.stack]))
        leaves[i] = leaves[i].at[at].set(lines[leaf.path].astype(leaves[i].dtype), mode="drop")
    return jax.tree.unflatten(structure, leaves)
