"""How the tables of a collection are stacked, and taken apart."""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import jax
import jax.numpy as jnp

from sbp.compat.untyped import DType
from sbp.errors import Problem
from sbp.runtime.embedding.groups import TableStack
from sbp.runtime.embedding.keys import problem
from sbp.runtime.embedding.stacks import RowStack, lookup
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
        named = replace(made, name=name_of(dim, made.meaning))
        out[named.name] = named
    return out


def name_of(dim: int, meaning: Hashable) -> str:
    """The name of a stack of some width, of what its rows are."""
    return f"dim{dim}_{hashlib.sha256(repr(meaning).encode()).hexdigest()[:DIGITS]}"


def joined(stack: Stack, tables: Mapping[str, jax.Array], dtype: DType | None) -> jax.Array:
    """The array of a stack, of the rows of each table by name; rows of nobody are zero."""
    rows = stack.row_map
    given = [jnp.asarray(tables[name], dtype or stack.tables[0].dtype) for name in rows.names]
    at = jnp.concatenate([rows.every(name) for name in rows.names])
    rest = given[0].shape[1:]
    flat = jnp.zeros((rows.size, *rest), given[0].dtype).at[at].set(jnp.concatenate(given))
    # A state of one number per row has all groups in one dim.
    return flat.reshape(*rows.lead, *rest) if rest else flat


def separated(stack: Stack, array: jax.Array) -> dict[str, jax.Array]:
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
