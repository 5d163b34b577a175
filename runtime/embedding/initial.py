"""The initial rows of stacks: each device makes its own, a piece at a time, and nothing else.

How the tables of a collection are stacked, and taken apart, is here too.
"""

import hashlib
import math
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from sbp.compat.untyped import DType, partition_spec
from sbp.errors import EmbeddingError, Problem
from sbp.runtime.embedding.groups import TableStack
from sbp.runtime.embedding.keys import problem
from sbp.runtime.embedding.shards import TableShard, on_shards, whole_shard
from sbp.runtime.embedding.stacks import RowStack, StoredPart, lookup, parts_of
from sbp.runtime.embedding.tables import RowWise, TableConfig, TableLayout, TableWise

Stack: TypeAlias = RowStack | TableStack

DIGITS = 6
"""Of the digest in the name of a stack."""


def stacks_of(tables: Sequence[TableConfig], spread: bool, multiple: int) -> dict[str, Stack]:
    """Tables that agree in all that makes an array, together.

    The name of a stack says what its rows are: its tables in their order, and where rows lie. So no array of
    another collection is taken for one of this, from a checkpoint neither, though it has the same shape.
    """
    alike: dict[tuple[int, DType, Hashable, TableLayout], list[TableConfig]] = {}
    for t in tables:
        alike.setdefault((t.embedding_dim, t.dtype, t.optimizer, t.placement), []).append(t)
    out: dict[str, Stack] = {}
    for (dim, _, _, placement), group in alike.items():
        made: Stack
        if isinstance(placement, TableWise):
            made = TableStack(f"dim{dim}", tuple(group), placement)
        else:
            rows = isinstance(placement, RowWise)
            made = RowStack(f"dim{dim}", tuple(group), placement, multiple if rows else 1, spread and rows)
        named = replace(made, name=name_of(dim, made.row_key))
        out[named.name] = named
    return out


def name_of(dim: int, meaning: Hashable) -> str:
    """The name of a stack of some width, of what its rows are."""
    return f"dim{dim}_{hashlib.sha256(repr(meaning).encode()).hexdigest()[:DIGITS]}"


def stack_array(stack: Stack, tables: Mapping[str, jax.Array], dtype: DType | None) -> jax.Array:
    """The array of a stack, of the rows of each table by name; rows of nobody are zero."""
    rows = stack.row_map
    given = [jnp.asarray(tables[name], dtype or stack.tables[0].dtype) for name in rows.names]
    at = jnp.concatenate([rows.every(name) for name in rows.names])
    rest = given[0].shape[1:]
    flat = jnp.zeros((rows.size, *rest), given[0].dtype).at[at].set(jnp.concatenate(given))
    # A state of one number per row has all groups in one dim.
    return flat.reshape(*rows.lead, *rest) if rest else flat


def table_arrays(stack: Stack, array: jax.Array) -> dict[str, jax.Array]:
    """The inverse of `_joined`."""
    rows = stack.row_map
    if array.shape[: len(rows.lead)] == rows.lead:
        array = array.reshape(rows.size, *array.shape[len(rows.lead) :])
    return {name: lookup(array, rows.every(name)) for name in rows.names}


def uneven(stack: Stack, dim: int, parts: int) -> Problem:
    """A dim of a stack that does not divide over the devices."""
    size = stack.shape[dim]
    what = "groups" if isinstance(stack, TableStack) else ("rows", "columns")[dim]
    fixes = {
        RowWise: f"Collection(..., multiple={parts}) or a multiple of it",
        TableWise: f"TableWise(groups={-(-size // parts) * parts})",
    }
    return problem(
        f"stack {stack.name!r}",
        f"{size} {what} over {parts} devices",
        f"a multiple of {parts}",
        "a jax.Array has no uneven split; the stack would be whole on every device",
        fixes.get(type(stack.placement), "another embedding_dim, or placement=RowWise()"),
    )


PIECE_BYTES = 1 << 20
"""Of a piece of a table that is made at once."""


def initial_stacks(
    stacks: Mapping[str, Stack], key: jax.Array, shardings: Mapping[str, NamedSharding] | None = None
) -> dict[str, jax.Array]:
    """The initial arrays of stacks.

    Arguments:
      shardings: of the arrays; None for whole ones, which may be traced.

    Raises:
      EmbeddingError: if an initializer does not make one row from one key.
    """
    if shardings is None:
        return {name: _made(s, whole_shard(s.row_map.lead, s.shape), key) for name, s in stacks.items()}
    nothing = partition_spec()

    def every(key: jax.Array) -> dict[str, jax.Array]:
        return {
            name: on_shards(
                partial(_made, s), s.row_map.lead, s.shape, shardings[name], [nothing], shardings[name].spec
            )(key)
            for name, s in stacks.items()
        }

    found: dict[str, jax.Array] = jax.jit(every)(key)
    return found


def initial_rows(
    stack: Stack, key: jax.Array, row: jax.Array, seeds: jax.Array | None = None, *, lazily: bool = False
) -> jax.Array:
    """The initial values of some rows of a stack, `[n] -> [n, dim]`; zeros for rows of nobody.

    A row depends on the key, the name of its table, and its seed alone.

    Arguments:
      seeds: of the rows, `[n]` uint32; None for their ids.
      lazily: whether to look first which tables' rows are there at all.
    """
    by_name = {p.name: p for p in stack.parts}
    parts = [by_name[name] for name in stack.row_map.names]
    part, ids = stack.row_map.owner(row)
    of_table = jnp.stack([jax.random.fold_in(key, zlib.crc32(p.name.encode())) for p in parts])
    keys = jax.vmap(jax.random.fold_in)(of_table[jnp.maximum(part, 0)], ids if seeds is None else seeds)
    out = jnp.zeros((row.shape[0], stack.shape[-1]), stack.tables[0].dtype)
    for recipe, made in _recipes(parts).items():
        flags, put = jnp.asarray(made)[part], partial(_put, recipe)
        # A piece of a large table has rows of few tables: what makes the others need not run.
        if lazily:
            out = lax.cond(flags.any(), put, lambda out, *_: out, out, flags, keys)
        else:
            out = put(out, flags, keys)
    return out


@dataclass(frozen=True)
class RowMaker:
    """Makes initial rows of tables, on the host: the same as those that `initial_stacks` begins with.

    Arguments:
      tables: by their numbers; all of one width and dtype, not compressed.
      key: as of `Collection.init`.
    """

    tables: tuple[TableConfig, ...]
    key: jax.Array

    def __call__(self, numbers: jax.Array, seeds: jax.Array) -> jax.Array:
        """The rows, "n" -> "n dim"; traceable.

        Arguments:
          numbers: of each row's table.
          seeds: of each row, as of `initial_rows`.
        """
        names = jnp.asarray([zlib.crc32(t.name.encode()) for t in self.tables], np.uint32)
        of_table = jax.vmap(partial(jax.random.fold_in, self.key))(names[numbers])
        keys = jax.vmap(jax.random.fold_in)(of_table, seeds)
        out = jnp.zeros((numbers.shape[0], self.tables[0].embedding_dim), self.tables[0].dtype)
        for recipe, made in _recipes(parts_of(self.tables)).items():
            out = _put(recipe, out, jnp.asarray(made)[numbers], keys)
        return out


# -- inside


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How rows are made: one for all tables that are made alike."""

    table: TableConfig
    suffix: str

    def __call__(self, key: jax.Array) -> jax.Array:
        """One row, `[dim]`."""
        values = self.table.initializer(key, (1, self.table.embedding_dim), self.table.dtype)
        wanted = (1, self.table.embedding_dim)
        if np.shape(values) != wanted:
            why = "every row is made by itself, of its own key, on the device that has it"
            fix = "an initializer of jax.nn.initializers; rows that are known go through write"
            raise EmbeddingError(
                problem(
                    f"the initializer of {self.table.name!r}", f"{np.shape(values)}", f"{wanted}", why, fix
                )
            )
        return self.table.compression.initial(self.suffix, values)[0]


def _recipes(parts: Sequence[StoredPart]) -> dict[_Recipe, list[bool]]:
    """How rows are made, and of which parts; behind the last one stand the rows of nobody."""
    found = dict[Hashable, _Recipe]()
    alike: list[Hashable] = [(p.table.initializer, p.table.compression, p.suffix) for p in parts]
    for likeness, p in zip(alike, parts, strict=True):
        found.setdefault(likeness, _Recipe(p.table, p.suffix))
    return {recipe: [*(a == likeness for a in alike), False] for likeness, recipe in found.items()}


def _put(recipe: _Recipe, out: jax.Array, flags: jax.Array, keys: jax.Array) -> jax.Array:
    return jnp.where(flags[:, None], jax.vmap(recipe)(keys), out)


def _made(stack: Stack, shard: TableShard, key: jax.Array) -> jax.Array:
    """The initial rows of a shard, piece by piece: no more than that is held beside them."""
    *lead, columns = shard.shape
    n = math.prod(lead)
    rows = max(1, min(n, PIECE_BYTES // (stack.shape[-1] * stack.tables[0].dtype.itemsize)))

    def piece(i: ArrayLike, out: jax.Array) -> jax.Array:
        begin = jnp.minimum(i * np.int32(rows), np.int32(n - rows))  # the last one overlaps
        values = initial_rows(stack, key, shard.rows(begin + lax.iota(np.int32, rows)), lazily=True)
        own = lax.dynamic_slice_in_dim(values, shard.first[-1], columns, axis=1)
        return lax.dynamic_update_slice_in_dim(out, own, begin, 0)

    out = jnp.zeros((n, columns), stack.tables[0].dtype)
    made: jax.Array = lax.fori_loop(0, -(-n // rows), piece, out)
    return made.reshape(shard.shape)
