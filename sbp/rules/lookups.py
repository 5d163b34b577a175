"""Lookups of whole rows, and sums into rows, by key: gather and scatter-add with a sparse exchange.

A pass makes these two ops of the gathers and scatter-adds that read and add rows along dim 0. Their rules say
what those of gather and scatter-add say, and one thing more: a table that is split by its rows serves keys
that are split along the same axes. The bodies are in sbp/communication/lookups.py.
"""

import math
from collections.abc import Iterable, Sequence

import jax
from jax import lax
from jax.lax import GatherScatterMode
from jax.typing import ArrayLike

from sbp.communication.key_samples import KeySample
from sbp.communication.keys import NO_KEY
from sbp.communication.lookups import (
    add_rows_communication,
    add_rows_held,
    add_rows_keys,
    add_rows_local,
    lookup_communication,
    lookup_held,
    lookup_keys,
    lookup_local,
    narrow_ids,
)
from sbp.compat import core
from sbp.rules.entry import Op, Row, row_traffic
from sbp.rules.factors import Letters, additive_row, factors
from sbp.rules.registry import rule
from sbp.signature import B, P, Split

# Positions are int32, and bounds of buckets lie up to one row per device behind the last one.
MOST_ROWS = int(NO_KEY) - (1 << 16)


def _lookup_meaning(
    table: jax.Array,
    ids: jax.Array,
    *,
    mode: GatherScatterMode,
    fill_value: ArrayLike | None,
    capacity: int | None,
    wire_dtype: str | None,
    samples: Sequence[KeySample] = (),
) -> list[jax.Array]:
    """What a lookup means: `[v, d...]`, `[...]` -> `[..., d...]`; how rows travel changes nothing."""
    dims = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(ids.ndim, ids.ndim + table.ndim - 1)),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
    )
    sizes = (1, *table.shape[1:])
    return [lax.gather(table, narrow_ids(ids)[..., None], dims, sizes, mode=mode, fill_value=fill_value)]


def _add_rows_meaning(
    operand: jax.Array,
    ids: jax.Array,
    rows: jax.Array,
    *,
    mode: GatherScatterMode,
    fill_value: ArrayLike | None,
    capacity: int | None,
    wire_dtype: str | None,
    samples: Sequence[KeySample] = (),
) -> list[jax.Array]:
    """What an addition of rows means: `[v, d...]`, `[...]`, `[..., d...]` -> `[v, d...]`."""
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(ids.ndim, rows.ndim)),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
    )
    return [lax.scatter_add(operand, narrow_ids(ids)[..., None], rows, dims, mode=mode)]


lookup_p = core.make_op("sbp_lookup", _lookup_meaning)
"""Rows of a table by position along dim 0.

Operands: the table `[v, d...]`, the ids `[...]`; the result is `[..., d...]`. Parameters:

- `mode`: a `GatherScatterMode`. `FILL_OR_DROP` gives `fill_value` for ids out of bounds (None: NaN, or the
  extreme integer), the others the nearest row. Negative ids are out of bounds.
- `capacity`: keys that a device can send to one owner in one round; None for an even share and some more.
- `wire_dtype`: the name of the floating type in which rows of a wider one travel; None for their own.
- `samples`: the ids of a first batch, a `KeySample`, from which the capacity is planned; empty if not known.
"""

add_rows_p = core.make_op("sbp_add_rows", _add_rows_meaning)
"""Rows added to a table by position along dim 0, duplicates one by one.

Operands: the table `[v, d...]`, the ids `[...]`, the rows `[..., d...]`; the result is `[v, d...]`. The
parameters are those of `lookup_p`; ids out of bounds are dropped, with `CLIP` they mean the nearest row.
"""


def _letters(op: Op) -> tuple[Letters, Letters, Letters]:
    """Of the table, the ids, and the rows; dim 0 of the table must be whole."""
    ids: Letters = tuple(f"i{d}" for d in range(len(op.shapes[1])))
    columns: Letters = tuple(f"w{d}" for d in range(1, len(op.shapes[0])))
    return (None, *columns), ids, (*ids, *columns)


def _by_rows(op: Op) -> bool:
    """Whether the table can be split by its rows."""
    return 1 < op.shapes[0][0] <= MOST_ROWS


def _exchanged_dims(op: Op) -> list[int]:
    """The dims of the ids along which they can be split together with the rows of the table."""
    empty = not math.prod((*op.shapes[0], *op.shapes[1]))
    if not _by_rows(op) or empty or core.is_key(op.dtypes[0]):
        return []
    return [d for d, n in enumerate(op.shapes[1]) if n > 1]


@rule(
    "sbp_lookup",
    body=lookup_local,
    keys=lookup_keys,
    communication=lookup_communication,
    body_bytes=lookup_held,
    traffic=row_traffic(),
    ids=lambda params, n: (1,),
    note="rows of a gather; ids split with the table's rows: a sparse exchange",
)
def sbp_lookup(op: Op) -> list[Row]:
    """Ids and the table's columns split; split rows leave a sum, or serve ids that are split too; linear."""
    table, ids, result = _letters(op)
    rows = [*factors(op, [table, ids], [result]), Row((P, B), (P,), moves=True)]
    if _by_rows(op):
        why = "rows of dim 0 of operand 0 are looked up here, and it is split over {axes}"
        rows.append(Row((Split(0), B), (P,), reason=why, owned=True))
    return [*rows, *(Row((Split(0), Split(d)), (Split(d),)) for d in _exchanged_dims(op))]


def _split_ids(op: Op) -> Iterable[Row]:
    """Ids and rows split: into a table that is a sum, or into one that is split by its rows."""
    exchanged: Sequence[int] = () if op.dtypes[0] == bool else _exchanged_dims(op)
    for d, n in enumerate(op.shapes[1]):
        if n > 1:
            why = f"dim {d} of the indices is added up here and split over {{axes}}"
            yield Row((P, Split(d), Split(d)), (P,), (0,), why)
    yield from (Row((Split(0), Split(d), Split(d)), (Split(0),)) for d in exchanged)


@rule(
    "sbp_add_rows",
    body=add_rows_local,
    keys=add_rows_keys,
    communication=add_rows_communication,
    body_bytes=add_rows_held,
    traffic=row_traffic(2),
    ids=lambda params, n: (1,),
    flops=lambda op: 2 * math.prod(op.shapes[2]),
    note="rows of a scatter-add; ids split with the table's rows: a sparse exchange",
)
def sbp_add_rows(op: Op) -> list[Row]:
    """Columns split; split rows take theirs; ids split into a sum, or into split rows; additive."""
    table, ids, rows = _letters(op)
    columns = factors(op, [table, ids, rows], [table])
    split = [Row((Split(0), B, B), (Split(0),))] if _by_rows(op) else []
    return [*columns, *split, additive_row(3, 1, (0, 2)), *_split_ids(op)]
