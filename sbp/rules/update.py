"""The step of a lazy optimizer on the rows of a table that a batch has looked up.

A pass (`passes/rows/tables.py`) makes this op of a gradient by rows, an optimizer and an addition. Operands:
the table, the leaves of the optimizer's state, then ids and rows of each lookup. Results: table and state.
The body is in sbp/communication/update.py.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sbp.communication.key_samples import KeySample
from sbp.communication.update import (
    StepOnColumns,
    split_operands,
    update_communication,
    update_held,
    update_keys,
    update_local,
)
from sbp.compat import core
from sbp.compat.untyped import DType
from sbp.lazy import Update, by_row, dense
from sbp.rules.entry import Op, Row
from sbp.rules.registry import rule
from sbp.signature import B, Signature, Split


def added_rows(shape: Sequence[int], dtype: DType, modes: Sequence[Any], *given: jax.Array) -> jax.Array:
    """A table of zeros with the rows of lookups added.

    Arguments:
      modes: per lookup, what happens to ids that are out of bounds.
      given: the ids of each lookup, then its rows.
    """
    total = jnp.zeros(shape, dtype)
    for ids, rows, mode in zip(given[: len(modes)], given[len(modes) :], modes, strict=True):
        total = total.at[ids].add(rows, mode=mode, wrap_negative_indices=False)
    return total


def update_rows(
    table: jax.Array,
    *rest: jax.Array,
    update: Update,
    modes: Sequence[Any],
    columns: Sequence[Signature] | None,
    column_step: StepOnColumns | None,
    additive: bool,
    grouped: bool,
    capacity: int | None,
    wire_dtype: str | None,
    samples: Sequence[KeySample],
) -> list[jax.Array]:
    """What the op means on one device: a table of zeros with the rows added, and the lazy step with it.

    Arguments:
      table: "v d".
      rest: the state, then the ids of each lookup, "...", then its rows, "... d".
      update: the optimizer's step, an `sbp.lazy.Update`.
      modes: per lookup, what happens to ids that are out of bounds.
      columns: how the state lies where the table is split by columns; None where it may not be.
      column_step: the step on columns, where that adds up over devices; None for `update`.
      additive: whether steps of addends of a gradient add up to the step of their sum.
      grouped: whether dim 0 of the ids counts equal parts of the table, and each has ids of its own part.
      capacity, wire_dtype, samples: of the exchange.
    """
    s, ids, rows = split_operands(rest, len(modes))
    grad = added_rows(table.shape, rows[0].dtype, modes, *ids, *rows)
    added, *state = dense(grad, *s, *([table] if update.has_param else []), update=update)
    return [table + added.astype(table.dtype), *state]


update_rows_p = core.make_op("sbp_update_rows", update_rows)


def _flops(op: Op) -> float:
    """Some tens of operations for every number that comes back; the table itself is not read."""
    n = len(op.params["modes"])
    return 20.0 * sum(math.prod(s) for s in op.shapes[-n:])


def _traffic(op: Op) -> float:
    """The rows as they come, and those of the table and of its state read and written."""
    n = len(op.params["modes"])
    rows = sum(math.prod(s) for s in op.shapes[-n:]) * core.itemsize(op.dtypes[0])
    return rows * (1 + 2 * (1 + sum(by_row(s, op.shapes[0]) for s in op.shapes[1 : -2 * n])))


@rule(
    "sbp_update_rows",
    body=update_local,
    keys=update_keys,
    communication=update_communication,
    body_bytes=update_held,
    flops=_flops,
    traffic=_traffic,
    ids=lambda params, n: split_operands(range(1, n), len(params["modes"]))[1],
    functions=("update", "column_step"),
    note="rows by a sparse exchange",
)
def rows(op: Op) -> list[Row]:
    """Rows, by an exchange with ids that are split too; a copied table; columns that are kept apart."""
    n, (table, *_) = len(op.params["modes"]), op.shapes
    state, ids, given = split_operands(op.shapes[1:], n)
    lying: list[Signature] = [Split(0) if by_row(s, table) else B for s in state]
    whole: list[Signature] = [B] * n
    out: list[Row] = []
    if table[0] > 1:
        out.append(_row(Split(0), lying, whole, whole))
    for d in range(min(map(len, ids))):
        if all(i[d] > 1 for i in ids):
            alike: list[Signature] = [Split(d)] * n
            out.append(_row(B, [B] * len(state), alike, alike))
            if table[0] > 1:
                out.append(_row(Split(0), lying, alike, alike))
    columns = op.params["columns"]
    if columns is not None and table[-1] > 1:
        across = [Split(len(r) - 1) for r in given]
        out.append(_row(Split(len(table) - 1), columns, whole, across))
    return out


def _row(
    table: Signature, state: Sequence[Signature], ids: Sequence[Signature], rows: Sequence[Signature]
) -> Row:
    return Row((table, *state, *ids, *rows), (table, *state))
