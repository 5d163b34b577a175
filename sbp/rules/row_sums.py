"""A sum over all elements of a gradient by rows: of squares for a norm, of flags for a check.

A pass (`passes/rows/measures.py`) makes this op of a reduction. Operands: the table that the rows are of, of
which nothing is read, then ids and rows of each lookup. Result: a number. The body is in
sbp/communication/update.py.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sbp.communication.key_samples import KeySample
from sbp.communication.update import (
    split_operands,
    sum_rows_communication,
    sum_rows_held,
    sum_rows_keys,
    sum_rows_local,
)
from sbp.compat import core
from sbp.rules.entry import Op, Row
from sbp.rules.registry import rule
from sbp.rules.update import added_rows
from sbp.signature import B, P, Signature, Split


def sum_rows(
    table: jax.Array,
    *rest: jax.Array,
    measure: Callable[[jax.Array], jax.Array],
    modes: Sequence[Any],
    grouped: bool,
    capacity: int | None,
    wire_dtype: str | None,
    samples: Sequence[KeySample],
) -> list[jax.Array]:
    """What the op means on one device: a table of zeros with the rows added, measured and summed up.

    Arguments:
      table: "v d".
      rest: the ids of each lookup, "...", then its rows, "... d".
      measure: what each element counts; zero counts nothing.
      modes, grouped, capacity, wire_dtype, samples: as of `sbp_update_rows`.
    """
    return [jnp.sum(measure(added_rows(table.shape, rest[-1].dtype, modes, *rest)))]


sum_rows_p = core.make_op("sbp_sum_rows", sum_rows)


def _work(each: float) -> Callable[[Op], float]:
    """So much for each number that is given."""
    return lambda op: each * sum(math.prod(s) for s in op.shapes[-len(op.params["modes"]) :])


@rule(
    "sbp_sum_rows",
    body=sum_rows_local,
    keys=sum_rows_keys,
    communication=sum_rows_communication,
    body_bytes=sum_rows_held,
    flops=_work(4.0),
    traffic=_work(8.0),
    ids=lambda params, n: split_operands(range(1, n), len(params["modes"]))[1],
    functions=("measure",),
    note="rows by a sparse exchange, whose owners sum up",
)
def rows(op: Op) -> list[Row]:
    """Rows of the table, by an exchange with ids that are split too; columns."""
    n, (table, *_) = len(op.params["modes"]), op.shapes
    _, ids, given = split_operands(op.shapes[1:], n)
    whole: list[Signature] = [B] * n
    out: list[Row] = []
    if table[0] > 1:
        out.append(Row((Split(0), *whole, *whole), (P,)))
        for d in range(min(map(len, ids))):
            if all(i[d] > 1 for i in ids):
                alike: list[Signature] = [Split(d)] * n
                out.append(Row((Split(0), *alike, *alike), (P,)))
    if table[-1] > 1:
        out.append(Row((Split(len(table) - 1), *whole, *(Split(len(r) - 1) for r in given)), (P,)))
    return out
