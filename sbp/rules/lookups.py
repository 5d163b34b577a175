"""Lookups of whole rows, and sums into rows, by key: gather and scatter-add with a sparse exchange.

A pass makes these two ops of the gathers and scatter-adds that read and add rows along dim 0. Their rules say
what those of gather and scatter-add say, and one thing more: a table that is split by its rows serves keys
that are split along the same axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from sbp import compat
from sbp.layout import Layout
from sbp.rules.entry import Op, Row, row_traffic
from sbp.rules.factors import Letters, additive_row, factors
from sbp.rules.index import _fill_value, _signed
from sbp.rules.registry import rule
from sbp.signature import B, P, Split
from sbp.talk.delivery import deliver, sums_apart
from sbp.talk.exchange import (
    NO_KEY,
    deliver_talks,
    lookup,
    lookup_talks,
    places,
    rows_at,
    wire_type,
)
from sbp.talk.halo import extent
from sbp.talk.legs import Route, legs
from sbp.talk.local import Local, Talk, barrier
from sbp.talk.sample import planned

FILL, CLIP = GatherScatterMode.FILL_OR_DROP, GatherScatterMode.CLIP
# Positions are int32, and bounds of buckets lie up to one row per device behind the last one.
MOST_ROWS = int(NO_KEY) - (1 << 16)
# What is known of the places that `deliver` gives.
_IN_ORDER: dict[str, Any] = {"unique_indices": True, "indices_are_sorted": True}


def narrow(ids: Any) -> Any:
    """Ids of 64 bits in 32, which JAX would cut off: those that do not fit stay out of bounds."""
    ids = _signed(ids)
    return ids if ids.dtype.itemsize == 4 else jnp.clip(ids, -1, NO_KEY.astype(ids.dtype)).astype(np.int32)


def _looked_up(
    table: Any,
    ids: Any,
    *,
    mode: Any,
    fill_value: Any,
    capacity: int | None,
    wire_dtype: str | None,
    samples: Sequence[Any] = (),
) -> list[Any]:
    """What a lookup means: `[v, d...]`, `[...]` -> `[..., d...]`; how rows travel changes nothing."""
    dims = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(ids.ndim, ids.ndim + table.ndim - 1)),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
    )
    sizes = (1, *table.shape[1:])
    index = narrow(ids)[..., None]
    return [lax.gather(table, index, dims, sizes, mode=mode, fill_value=fill_value)]


def _added(
    operand: Any,
    ids: Any,
    rows: Any,
    *,
    mode: Any,
    fill_value: Any,
    capacity: int | None,
    wire_dtype: str | None,
    samples: Sequence[Any] = (),
) -> list[Any]:
    """What an addition of rows means: `[v, d...]`, `[...]`, `[..., d...]` -> `[v, d...]`."""
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(ids.ndim, rows.ndim)),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
    )
    return [lax.scatter_add(operand, narrow(ids)[..., None], rows, dims, mode=mode)]


lookup_p = compat.make_op("sbp_lookup", _looked_up)
"""Rows of a table by position along dim 0.

Operands: the table `[v, d...]`, the ids `[...]`; the result is `[..., d...]`. Parameters:

- `mode`: a `GatherScatterMode`. `FILL_OR_DROP` gives `fill_value` for ids out of bounds (None: NaN, or the
  extreme integer), the others the nearest row. Negative ids are out of bounds.
- `capacity`: keys that a device can send to one owner in one round; None for an even share and some more.
- `wire_dtype`: the name of the floating type in which rows of a wider one travel; None for their own.
- `samples`: the ids of a first batch, a `Sample`, from which the capacity is planned; empty if not known.
"""

add_rows_p = compat.make_op("sbp_add_rows", _added)
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
    if not _by_rows(op) or empty or compat.is_key(op.dtypes[0]):
        return []
    return [d for d, n in enumerate(op.shapes[1]) if n > 1]


def _route(ctx: Local) -> Route:
    """How keys and rows of an application travel: nothing does unless table and ids are split alike."""
    table, ids = ctx.operands[:2]
    split = {a for d in range(len(ids.shape)) for a in ids.axes(d)}
    return route_along(ctx, [a for a in table.axes(0) if a in split], [ids])


def route_along(ctx: Local, axes: Iterable[int], ids: Sequence[Layout]) -> Route:
    """How keys and rows of the table, operand 0, travel along `axes` of its dim 0.

    Arguments:
      ids: how they lie, of every lookup that takes part.
    """
    keys, asked = sum(math.prod(i.local) for i in ids), ctx.params
    route = Route(extent(ctx.operands[0], 0), tuple(axes), keys, asked["capacity"], asked["wire_dtype"])
    return planned(route, asked.get("samples", ()), ids)


def row_bytes(ctx: Local, dtype: Any) -> float:
    """Bytes of a row of the shard of the table, operand 0, as it travels."""
    wire = wire_type(dtype, ctx.params["wire_dtype"])
    return math.prod(ctx.operands[0].local[1:]) * compat.itemsize(wire)


def keys_of(ctx: Local, ids: Any, layout: Layout, clips: bool) -> tuple[Any, Any]:
    """The keys of the exchange with the table, operand 0, as `ids` in shape, and which ids are in bounds.

    Arguments:
      layout: how the ids lie.
      clips: whether ids out of bounds mean the nearest row; otherwise they are no keys, as padding is.
    """
    ids, last = narrow(ids), np.int32(ctx.operands[0].shape[0] - 1)
    legal = (ids >= 0) & (ids <= last)
    keys = jnp.clip(ids, 0, last) if clips else jnp.where(legal, ids, NO_KEY)
    return ctx.mask(keys, layout, range(ids.ndim), NO_KEY), legal


def keys_as(mode: Any) -> bool:
    """What tells the keys that reading makes of ids from those of another mode, of the same ids."""
    return bool(mode == FILL)


def _lookup_local(ctx: Local, table: Any, ids: Any) -> list[Any]:
    """The sparse exchange; of the devices of a sum one gives what stands for ids out of bounds."""
    layout, fills = ctx.operands[0], ctx.params["mode"] == FILL
    sums = layout.partial_axes("sum")
    if not layout.axes(0) and not sums:
        return ctx.bind(table, ids)
    keys, legal = keys_of(ctx, ids, ctx.operands[1], not fills)
    route = _route(ctx)

    absent = None
    if fills:
        once = ctx.first([*sums, *(a for a in layout.axes(0) if a not in route.axes)])
        fill = _fill_value(ctx.params["fill_value"], table.dtype)
        absent = jnp.where(legal.reshape(-1) | ~once, jnp.zeros((), table.dtype), fill)
    rows = lookup(ctx, route, keys.reshape(-1), lambda at: rows_at(table, at), absent)
    return [rows.reshape(*ids.shape, *table.shape[1:])]


def _lookup_talks(ctx: Local) -> Iterable[Talk]:
    return lookup_talks(_route(ctx), row_bytes(ctx, ctx.dtypes[0]), keys_as(ctx.params["mode"]))


@rule(
    "sbp_lookup",
    local=_lookup_local,
    talks=_lookup_talks,
    traffic=row_traffic(),
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


def _add_rows_local(ctx: Local, x: Any, ids: Any, rows: Any) -> list[Any]:
    """The sparse exchange; without one, each device adds to the rows that it has."""
    layout, mode = ctx.operands[0], ctx.params["mode"]
    if not layout.axes(0) and not any(map(ctx.operands[1].padded, range(ids.ndim))):
        return ctx.bind(x, ids, rows)
    route, count = _route(ctx), math.prod(ids.shape)
    keys = keys_of(ctx, ids, ctx.operands[1], mode == CLIP)[0].reshape(-1)
    rows = rows.reshape(count, *x.shape[1:])
    # XLA of jax 0.10 reads through the slice that made a shard, without clamping to the shard first.
    x = barrier(x)
    if not legs(route):
        return [x.at[places(ctx, route, keys)].add(rows, mode="drop", wrap_negative_indices=False)]

    additive = sums_apart(rows.dtype)
    known = {} if additive else _IN_ORDER

    def apply(x: Any, at: Any, sums: Any) -> Any:
        return x.at[at].add(sums, mode="drop", wrap_negative_indices=False, **known)

    return [deliver(ctx, route, keys, rows, x, apply, additive)]


def _same_keys(mode: Any) -> bool | None:
    """What `keys_as` says, if adding makes the same keys of the ids as reading."""
    return keys_as(mode) if mode in (FILL, CLIP) else None


def _add_rows_talks(ctx: Local) -> Iterable[Talk]:
    return deliver_talks(_route(ctx), row_bytes(ctx, ctx.dtypes[0]), _same_keys(ctx.params["mode"]))


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
    local=_add_rows_local,
    talks=_add_rows_talks,
    traffic=row_traffic(2),
    flops=lambda op: 2 * math.prod(op.shapes[2]),
    note="rows of a scatter-add; ids split with the table's rows: a sparse exchange",
)
def sbp_add_rows(op: Op) -> list[Row]:
    """Columns split; split rows take theirs; ids split into a sum, or into split rows; additive."""
    table, ids, rows = _letters(op)
    columns = factors(op, [table, ids, rows], [table])
    split = [Row((Split(0), B, B), (Split(0),))] if _by_rows(op) else []
    return [*columns, *split, additive_row(3, 1, (0, 2)), *_split_ids(op)]
