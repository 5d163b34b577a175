"""Bodies on the rows of a gradient: sums by key go to the owners of the rows.

The step of a lazy optimizer updates its rows in place; a sum over the gradient measures them. Operands: the
table, the leaves of the optimizer's state, then ids and rows of each lookup. docs/communication.md has an
example of the exchange.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from sbp.communication.delivery import deliver_rows, may_add_one_by_one
from sbp.communication.exchange import SentKeys, send_keys
from sbp.communication.joint import Sending
from sbp.communication.legs import Exchange, legs
from sbp.communication.lookups import exchange_along, keys_of, kind_of_keys, row_bytes
from sbp.communication.protocol import Communication, Context
from sbp.communication.wire import deliver_communication, deliver_held
from sbp.compat import core
from sbp.compat.untyped import optimization_barrier
from sbp.lazy import by_row

Each = TypeVar("Each")


class StepOnColumns(Protocol):
    """An optimizer's step on some columns of rows, of which it adds up some numbers over devices."""

    @property
    def sums(self) -> int:
        """How many numbers of each row."""

    def __call__(self, ctx: Context, width: int, *args: jax.Array) -> list[jax.Array]:
        """What is added to the rows, and their state; `width` is that of a whole row."""


def split_operands(
    rest: Sequence[Each], lookups: int
) -> tuple[Sequence[Each], Sequence[Each], Sequence[Each]]:
    """Something of each operand of `sbp_update_rows` but the table: of the state, the ids and the rows.

    Arguments:
      lookups: how many there are: each has ids and rows.
    """
    n = len(rest) - 2 * lookups
    return rest[:n], rest[n : n + lookups], rest[n + lookups :]


@dataclass(frozen=True)
class _Step:
    """The optimizer's step on rows that a device has received.

    Arguments:
      ctx: the op.
      old: the leaves of the state.
      lines: which of those have a line per row of the table.
    """

    ctx: Context
    old: Sequence[jax.Array]
    lines: Sequence[bool]

    def __call__(self, state: Sequence[jax.Array], at: jax.Array, grad: jax.Array) -> list[jax.Array]:
        """Table and state with the rows `at` updated; the other leaves are as after one step.

        Arguments:
          state: the table's shard, then the leaves of the state.
          at: numbers of rows in the shard, none twice; its size where there is no row, [m].
          grad: their gradients, [m, ...].
        """
        table, update = state[0], self.ctx.params["update"]
        size, adds = table.shape[0], may_add_one_by_one(table.dtype)
        here = [
            self.rows_of(x, at) if line else o
            for x, o, line in zip(state[1:], self.old, self.lines, strict=True)
        ]
        param = [self.rows_of(table, at)] if update.has_param or not adds else []
        added, *new = self.step_rows(grad, *here, *(param if update.has_param else []))
        # Rows that are left as they are have distinct numbers out of bounds: no two are ever written at once.
        beyond = np.int32(size) + lax.iota(np.int32, at.shape[0])
        written = jnp.where(self.touched_rows(grad) & (at < size), at, beyond)
        flags: dict[str, Any] = {"mode": "drop", "unique_indices": True, "wrap_negative_indices": False}

        def put(x: jax.Array, rows: jax.Array) -> jax.Array:
            return x.at[written].set(rows.astype(x.dtype), **flags)

        added = added.astype(table.dtype)
        # XLA widens a whole table of short floats to add to it.
        table = table.at[written].add(added, **flags) if adds else put(table, param[0] + added)
        kept = [put(x, n) if line else n for x, n, line in zip(state[1:], new, self.lines, strict=True)]
        return [table, *kept]

    def step_rows(self, *args: jax.Array) -> list[jax.Array]:
        """What is added to rows, and their state; arguments as of the optimizer's step."""
        across: StepOnColumns | None = self.ctx.params["column_step"]
        if across is None or not _column_axes(self.ctx):
            return list(self.ctx.params["update"](*args))
        return across(self.ctx, self.ctx.operands[0].shape[-1], *args)

    def add(self, state: Sequence[jax.Array], at: jax.Array, grad: jax.Array) -> list[jax.Array]:
        """Table and state with the steps of addends at rows `at`, which may occur more than once."""
        update = self.ctx.params["update"]
        # A step that adds up does not read the parameter.
        param = [jnp.zeros(grad.shape, state[0].dtype)] if update.has_param else []
        added, *new = update(grad, *self.old, *param)
        return [state[0].at[at].add(added, mode="drop", wrap_negative_indices=False), *new]

    def rows_of(self, x: jax.Array, at: jax.Array) -> jax.Array:
        """The rows of a shard by number; zeros for its size."""
        return x.at[at].get(mode="fill", fill_value=0)

    def touched_rows(self, grad: jax.Array) -> jax.Array:
        """Which rows have a gradient that is not all zero, on any device that has some of their columns."""
        flags = jnp.any(grad != 0, axis=tuple(range(1, grad.ndim)))
        axes = _column_axes(self.ctx)
        return self.ctx.maximum(flags.astype(np.int32), axes) > 0 if axes else flags


def _column_axes(ctx: Context) -> tuple[int, ...]:
    """The axes that split the table by columns."""
    table = ctx.operands[0]
    return tuple(sorted({a for d in range(1, len(table.shape)) for a in table.axes(d)}))


def update_local(ctx: Context, table: jax.Array, *rest: jax.Array) -> Sending[list[jax.Array]]:
    """Sums by key go to the owners of the rows, which update them in place.

    Where devices have the same rows but ids of their own, each first gets the ids and rows of the others, so
    that all take the same step. Where that is more than the shard, they add up a gradient of its size.
    """
    state, ids, rows = split_operands(rest, len(ctx.params["modes"]))
    copied, flat = _copied_axes(ctx), _rows_of_all(ctx, table, ids, rows)
    keys = _update_keys(ctx, ids) if ctx.keys is None else ctx.keys
    if copied and _gathers(ctx):
        flat = ctx.gather(flat, copied).reshape(-1, *flat.shape[1:])
    lines = [by_row(x.shape, ctx.operands[0].shape) for x in ctx.operands[1 : 1 + len(state)]]
    step = _Step(ctx, state, lines)
    if ctx.operands[0].axes(0):
        # XLA of jax 0.10 reads through the slice that made a shard, without clamping to the shard first.
        table, *state = optimization_barrier((table, *state))
    if not copied or _gathers(ctx):
        additive = _additive(ctx)
        apply = step.add if additive else step
        exchange, whole = _update_exchange(ctx), [table, *state]
        return list((yield from deliver_rows(ctx, exchange, keys, flat, whole, apply, additive)))

    def add(grad: jax.Array, at: jax.Array, sums: jax.Array) -> jax.Array:
        return grad.at[at].add(sums, mode="drop")

    grad = yield from deliver_rows(ctx, _exchange(ctx), keys, flat, jnp.zeros(table.shape, flat.dtype), add)
    grad = ctx.total(grad, copied)
    return step([table, *state], lax.iota(np.int32, table.shape[0]), grad)


def sum_rows_local(ctx: Context, table: jax.Array, *rest: jax.Array) -> Sending[list[jax.Array]]:
    """Sums by key go to the owners of the rows, which sum up what these count."""
    measure, (_, ids, rows) = ctx.params["measure"], split_operands(rest, len(ctx.params["modes"]))
    # Columns of padding count for nothing; rows of padding have no key.
    rows = [ctx.mask(r, at, [r.ndim - 1], 0) for r, at in zip(rows, ctx.operands[-len(rows) :], strict=True)]
    flat = _rows_of_all(ctx, table, ids, rows)
    keys = _keys_of_all(ctx, ids) if ctx.keys is None else ctx.keys

    def add(total: jax.Array, at: jax.Array, sums: jax.Array) -> jax.Array:
        # Behind the last row stands what was summed up for no key.
        own = (at < table.shape[0]).reshape(-1, *[1] * (sums.ndim - 1))
        return total + jnp.sum(measure(jnp.where(own, sums, jnp.zeros((), sums.dtype))))

    zero = jnp.zeros((), jax.eval_shape(lambda x: jnp.sum(measure(x)), flat).dtype)
    return [(yield from deliver_rows(ctx, _exchange(ctx), keys, flat, zero, add))]


def sum_rows_communication(ctx: Context) -> Iterable[Communication]:
    """The exchange."""
    return _sent(ctx, _exchange(ctx))


def sum_rows_held(ctx: Context) -> float:
    """What the exchange holds."""
    return deliver_held(_exchange(ctx), row_bytes(ctx, ctx.dtypes[-1]), False)


def update_keys(ctx: Context, table: jax.Array | None, *rest: jax.Array) -> Sending[SentKeys]:
    """The part of `update_local` that sends the keys."""
    keys, exchange = (
        _update_keys(ctx, split_operands(rest, len(ctx.params["modes"]))[1]),
        _update_exchange(ctx),
    )
    return (yield from send_keys(ctx, exchange, legs(exchange)[0], keys))


def sum_rows_keys(ctx: Context, table: jax.Array | None, *rest: jax.Array) -> Sending[SentKeys]:
    """The part of `sum_rows_local` that sends the keys."""
    keys, exchange = _keys_of_all(ctx, split_operands(rest, len(ctx.params["modes"]))[1]), _exchange(ctx)
    return (yield from send_keys(ctx, exchange, legs(exchange)[0], keys))


def _update_keys(ctx: Context, ids: Sequence[jax.Array]) -> jax.Array:
    """The keys of all lookups, of all devices that have the same rows where these gather them."""
    keys, copied = _keys_of_all(ctx, ids), _copied_axes(ctx)
    return ctx.gather(keys, copied).reshape(-1) if copied and _gathers(ctx) else keys


def _keys_of_all(ctx: Context, ids: Sequence[jax.Array]) -> jax.Array:
    """The keys of all lookups, one after the other.

    Where JAX was promised indices in bounds, reading clamps the others, and adding drops them. With the keys
    that reading has, and zeros for what is dropped (`_rows_of_all`), XLA sorts them once for both.
    """
    return jnp.concatenate([keys.reshape(-1) for keys, _ in _keys(ctx, ids)])


def _keys(ctx: Context, ids: Sequence[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    """Of each lookup its keys, and which of its ids are in bounds."""
    n, modes = len(ids), ctx.params["modes"]
    lookups = zip(ids, ctx.operands[-2 * n : -n], modes, strict=True)
    return [keys_of(ctx, i, at, mode != GatherScatterMode.FILL_OR_DROP) for i, at, mode in lookups]


def _rows_of_all(
    ctx: Context, table: jax.Array, ids: Sequence[jax.Array], rows: Sequence[jax.Array]
) -> jax.Array:
    """The rows of all lookups, one after the other; zeros for what adding drops."""
    out = list[jax.Array]()
    for r, (_, legal), mode in zip(rows, _keys(ctx, ids), ctx.params["modes"], strict=True):
        flat = r.reshape(-1, *table.shape[1:])
        if mode == GatherScatterMode.PROMISE_IN_BOUNDS:
            flat = jnp.where(legal.reshape(-1, *[1] * (flat.ndim - 1)), flat, jnp.zeros((), flat.dtype))
        out.append(flat)
    return jnp.concatenate(out)


def _split_axes(ctx: Context) -> set[int]:
    """The axes that split ids of some lookup."""
    n = len(ctx.params["modes"])
    return {a for i in ctx.operands[-2 * n : -n] for d in range(len(i.shape)) for a in i.axes(d)}


def _copied_axes(ctx: Context) -> tuple[int, ...]:
    """The axes along which devices have the same rows, and ids of their own: they add up a gradient."""
    return tuple(sorted(_split_axes(ctx) - set(ctx.operands[0].axes(0))))


def _additive(ctx: Context) -> bool:
    """Whether addends of a row may be applied one by one."""
    apart = may_add_one_by_one(ctx.dtypes[0]) and may_add_one_by_one(ctx.dtypes[-1])
    return bool(ctx.params["additive"]) and apart and (not _copied_axes(ctx) or _gathers(ctx))


def _exchange(ctx: Context) -> Exchange:
    """How keys and rows of all lookups together travel."""
    table, n = ctx.operands[0], len(ctx.params["modes"])
    ids, split = ctx.operands[-2 * n : -n], _split_axes(ctx)
    # Ids of groups lie where the rows of their groups do.
    at_home = ctx.params["grouped"] and all(i.axes(0) == table.axes(0) and not i.has_padding(0) for i in ids)
    return exchange_along(ctx, [] if at_home else [a for a in table.axes(0) if a in split], ids)


def _gathered(ctx: Context) -> tuple[float, float]:
    """Bytes of ids and of rows that a device sends to those that have the same rows of the table."""
    width = math.prod(ctx.operands[0].local[1:]) * core.itemsize(ctx.dtypes[-1])
    keys = (ctx.group(_copied_axes(ctx)) - 1) * _exchange(ctx).keys
    return 4.0 * keys, float(width * keys)


def _gathers(ctx: Context) -> bool:
    """Whether ids and rows travel between devices that have the same rows; not a gradient of these."""
    exchange, group = _exchange(ctx), ctx.group(_copied_axes(ctx))
    again = (group - 1) * sum(c.wire_bytes for c in _sent(ctx, exchange))
    grad = math.prod(ctx.operands[0].local) * core.itemsize(ctx.dtypes[-1])
    return sum(_gathered(ctx)) + again < 2 * (group - 1) / group * grad


def _update_exchange(ctx: Context) -> Exchange:
    """How keys and rows travel to their owners, of all devices that have the same rows of the table."""
    exchange = _exchange(ctx)
    if not (copied := _copied_axes(ctx)) or not _gathers(ctx):
        return exchange
    group = ctx.group(copied)
    planned = exchange.planned and exchange.capacity is not None
    room = exchange.capacity * group if planned and exchange.capacity else exchange.capacity
    return replace(exchange, keys=exchange.keys * group, capacity=room)


def update_communication(ctx: Context) -> Iterable[Communication]:
    """The exchange, and where the table is split by columns a flag per row."""
    exchange, n = _update_exchange(ctx), len(ctx.params["modes"])
    local, dtype = ctx.operands[0].local, ctx.dtypes[-1]
    first = len(ctx.operands) - 2 * n
    yield from _sent(ctx, exchange)
    copied, gathers = _copied_axes(ctx), bool(_copied_axes(ctx)) and _gathers(ctx)
    if gathers:
        why = "every device over {axes} has these rows, and updates them by the ids of all"
        for operand, wire_bytes in zip((first, first + n), _gathered(ctx), strict=True):
            yield Communication("all_gather", copied, wire_bytes, operand, why)
    elif copied:
        group = ctx.group(copied)
        wire_bytes = 2 * (group - 1) / group * local[0] * math.prod(local[1:]) * core.itemsize(dtype)
        why = "every device over {axes} has these rows, and a part of their gradient"
        yield Communication("all_reduce", copied, wire_bytes, first + n, why)
    axes = _column_axes(ctx)
    if axes and not _additive(ctx):
        group, ahead = ctx.group(axes), legs(exchange)
        received = ahead[-1].received_keys if ahead else exchange.keys
        flags = local[0] if copied and not gathers else received
        across: StepOnColumns | None = ctx.params["column_step"]
        sums = 0 if across is None else across.sums * core.itemsize(dtype)
        wire_bytes = 2 * (group - 1) / group * (4 + sums) * flags
        also = ", and its step adds them up" if sums else ""
        why = f"a row is touched if any of its columns is{also}; the columns are split over {{axes}}"
        yield Communication("all_reduce", axes, wire_bytes, first + n, why)


def _sent(ctx: Context, exchange: Exchange) -> Iterator[Communication]:
    """An exchange; only if the keys are those of a lookup alone may it share what is sent of them."""
    n, mode = len(ctx.params["modes"]), ctx.params["modes"][0]
    first, size = len(ctx.operands) - 2 * n, row_bytes(ctx, ctx.dtypes[-1])
    keys = kind_of_keys(mode) if n == 1 and exchange.keys == _exchange(ctx).keys else None
    for communication in deliver_communication(exchange, size, keys):
        yield replace(communication, operand=first + (0 if communication.operand == 1 else n))


def update_held(ctx: Context) -> float:
    """What the exchange holds, and the rows of others, or a gradient of the size of the shard."""
    copied, size = _copied_axes(ctx), row_bytes(ctx, ctx.dtypes[-1])
    held, adds_up = 0.0, bool(copied) and not _gathers(ctx)
    if adds_up:
        held = math.prod(ctx.operands[0].local) * core.itemsize(ctx.dtypes[-1])
    elif copied:
        held = _update_exchange(ctx).keys * size
    return held + deliver_held(_update_exchange(ctx), size, _additive(ctx) or adds_up)
