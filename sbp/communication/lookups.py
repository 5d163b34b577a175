"""Bodies of lookups of whole rows, and of sums into rows: the ids become keys, the keys a sparse exchange.

A table that is split by its rows serves ids that are split along the same axes. Along other axes every device
has all ids, and gives the rows of its own shard. docs/communication.md has an example.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from sbp.communication.delivery import deliver_rows, may_add_one_by_one
from sbp.communication.exchange import SentKeys, fetch_rows, send_keys
from sbp.communication.extents import extent
from sbp.communication.gather import CLIP, FILL, missing_value, signed_index
from sbp.communication.joint import Sending
from sbp.communication.key_samples import with_planned_capacity
from sbp.communication.keys import NO_KEY, local_rows, rows_or_zeros
from sbp.communication.legs import Exchange, legs
from sbp.communication.protocol import Communication, Context
from sbp.communication.wire import (
    deliver_communication,
    deliver_held,
    fetch_communication,
    fetch_held,
    wire_type,
)
from sbp.compat import core
from sbp.compat.untyped import DType, optimization_barrier
from sbp.layout import Layout

# What is known of the row numbers that `deliver_rows` gives.
_IN_ORDER: dict[str, Any] = {"unique_indices": True, "indices_are_sorted": True}


def narrow_ids(ids: jax.Array) -> jax.Array:
    """Ids of 64 bits in 32, which JAX would cut off: those that do not fit stay out of bounds."""
    ids = signed_index(ids)
    return ids if ids.dtype.itemsize == 4 else jnp.clip(ids, -1, NO_KEY.astype(ids.dtype)).astype(np.int32)


def exchange_along(ctx: Context, axes: Iterable[int], ids: Sequence[Layout]) -> Exchange:
    """How keys and rows of the table, operand 0, travel along `axes` of its dim 0.

    Arguments:
      ids: how they lie, of every lookup that takes part.
    """
    keys, asked = sum(math.prod(i.local) for i in ids), ctx.params
    rows = extent(ctx.operands[0], 0)
    exchange = Exchange(rows, tuple(axes), keys, asked["capacity"], asked["wire_dtype"])
    return with_planned_capacity(exchange, asked.get("samples", ()), ids)


def _exchange(ctx: Context) -> Exchange:
    """How keys and rows of one op travel: nothing does unless table and ids are split along an axis."""
    table, ids = ctx.operands[:2]
    split = {a for d in range(len(ids.shape)) for a in ids.axes(d)}
    return exchange_along(ctx, [a for a in table.axes(0) if a in split], [ids])


def row_bytes(ctx: Context, dtype: DType) -> float:
    """Bytes of a row of the shard of the table, operand 0, as it travels."""
    return math.prod(ctx.operands[0].local[1:]) * core.itemsize(wire_type(dtype, ctx.params["wire_dtype"]))


def keys_of(ctx: Context, ids: jax.Array, layout: Layout, clips: bool) -> tuple[jax.Array, jax.Array]:
    """The keys of the exchange with the table, operand 0, as `ids` in shape, and which ids are in bounds.

    Arguments:
      layout: how the ids lie.
      clips: whether ids out of bounds mean the nearest row; otherwise they are no keys, as padding is.
    """
    ids, last = narrow_ids(ids), np.int32(ctx.operands[0].shape[0] - 1)
    legal = (ids >= 0) & (ids <= last)
    keys = jnp.clip(ids, 0, last) if clips else jnp.where(legal, ids, NO_KEY)
    return ctx.mask(keys, layout, range(ids.ndim), NO_KEY), legal


def kind_of_keys(mode: GatherScatterMode) -> bool:
    """Whether reading makes no keys of ids out of bounds, or keys of the nearest rows."""
    return bool(mode == FILL)


def lookup_local(ctx: Context, table: jax.Array, ids: jax.Array) -> Sending[list[jax.Array]]:
    """The sparse exchange; of the devices of a sum one gives what stands for ids out of bounds."""
    layout, fills = ctx.operands[0], ctx.params["mode"] == FILL
    sums = layout.partial_axes("sum")
    if not layout.axes(0) and not sums:
        return ctx.bind(table, ids)
    keys, legal = keys_of(ctx, ids, ctx.operands[1], not fills)
    exchange = _exchange(ctx)
    given = keys.reshape(-1) if ctx.keys is None else ctx.keys

    absent = None
    if fills:
        once = ctx.is_first([*sums, *(a for a in layout.axes(0) if a not in exchange.axes)])
        missing = missing_value(ctx.params["fill_value"], table.dtype)
        absent = jnp.where(legal.reshape(-1) | ~once, jnp.zeros((), table.dtype), missing)
    rows = yield from fetch_rows(ctx, exchange, given, lambda at: rows_or_zeros(table, at), absent)
    return [rows.reshape(*ids.shape, *table.shape[1:])]


def lookup_keys(ctx: Context, table: jax.Array | None, ids: jax.Array) -> Sending[SentKeys]:
    """The part of `lookup_local` that sends the keys; it needs no table."""
    exchange = _exchange(ctx)
    keys = keys_of(ctx, ids, ctx.operands[1], ctx.params["mode"] != FILL)[0]
    return (yield from send_keys(ctx, exchange, legs(exchange)[0], keys.reshape(-1)))


def lookup_communication(ctx: Context) -> Iterable[Communication]:
    """What `lookup_local` sends in the first round."""
    return fetch_communication(
        _exchange(ctx), row_bytes(ctx, ctx.dtypes[0]), kind_of_keys(ctx.params["mode"])
    )


def lookup_held(ctx: Context) -> float:
    """What `lookup_local` holds in its exchange."""
    return fetch_held(_exchange(ctx), row_bytes(ctx, ctx.dtypes[0]))


def add_rows_local(ctx: Context, x: jax.Array, ids: jax.Array, rows: jax.Array) -> Sending[list[jax.Array]]:
    """The sparse exchange; without one, each device adds to the rows that it has."""
    layout, mode = ctx.operands[0], ctx.params["mode"]
    if not layout.axes(0) and not any(map(ctx.operands[1].has_padding, range(ids.ndim))):
        return ctx.bind(x, ids, rows)
    exchange, count = _exchange(ctx), math.prod(ids.shape)
    keys = keys_of(ctx, ids, ctx.operands[1], mode == CLIP)[0].reshape(-1) if ctx.keys is None else ctx.keys
    rows = rows.reshape(count, *x.shape[1:])
    # XLA of jax 0.10 reads through the slice that made a shard, without clamping to the shard first.
    x = optimization_barrier(x)
    if not legs(exchange):
        at = local_rows(ctx, exchange, keys)
        return [x.at[at].add(rows, mode="drop", wrap_negative_indices=False)]

    additive = may_add_one_by_one(rows.dtype)
    known = {} if additive else _IN_ORDER

    def apply(x: jax.Array, at: jax.Array, sums: jax.Array) -> jax.Array:
        return x.at[at].add(sums, mode="drop", wrap_negative_indices=False, **known)

    return [(yield from deliver_rows(ctx, exchange, keys, rows, x, apply, additive))]


def add_rows_keys(ctx: Context, x: jax.Array | None, ids: jax.Array, *rows: jax.Array) -> Sending[SentKeys]:
    """The part of `add_rows_local` that sends the keys."""
    exchange = _exchange(ctx)
    keys = keys_of(ctx, ids, ctx.operands[1], ctx.params["mode"] == CLIP)[0]
    return (yield from send_keys(ctx, exchange, legs(exchange)[0], keys.reshape(-1)))


def add_rows_communication(ctx: Context) -> Iterable[Communication]:
    """What `add_rows_local` sends in the first round."""
    mode = ctx.params["mode"]
    # With another mode adding makes other keys of the ids than reading.
    keys = kind_of_keys(mode) if mode in (FILL, CLIP) else None
    return deliver_communication(_exchange(ctx), row_bytes(ctx, ctx.dtypes[0]), keys)


def add_rows_held(ctx: Context) -> float:
    """What `add_rows_local` holds in its exchange; without one it adds rows as they come."""
    exchange, additive = _exchange(ctx), may_add_one_by_one(ctx.dtypes[2])
    return deliver_held(exchange, row_bytes(ctx, ctx.dtypes[2]), additive) if legs(exchange) else 0.0
