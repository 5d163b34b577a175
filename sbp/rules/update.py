"""The step of a lazy optimizer on the rows of a table that a batch has looked up.

A pass (`passes/rows/tables.py`) makes this op of a gradient by rows, an optimizer and an addition. Operands:
the table, the leaves of the optimizer's state, then ids and rows of each lookup. Results: table and state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from sbp import compat
from sbp.layout import Layout
from sbp.lazy import by_row, dense
from sbp.rules.entry import Op, Row
from sbp.rules.lookups import keys_as, keys_of, route_along, row_bytes
from sbp.rules.registry import rule
from sbp.signature import B, Signature, Split
from sbp.talk.delivery import deliver, sums_apart
from sbp.talk.exchange import deliver_talks
from sbp.talk.legs import Route, legs
from sbp.talk.local import Local, Talk, barrier


def update_rows(
    table: Any,
    *rest: Any,
    update: Any,
    modes: Sequence[Any],
    columns: Any,
    additive: bool,
    grouped: bool,
    capacity: Any,
    wire_dtype: Any,
    samples: Any,
) -> list[Any]:
    """What the op means on one device: a table of zeros with the rows added, and the lazy step with it.

    Arguments:
      table: "v d".
      rest: the state, then the ids of each lookup, "...", then its rows, "... d".
      update: the optimizer's step, an `sbp.lazy.Update`.
      modes: per lookup, what happens to ids that are out of bounds.
      columns: how the state lies where the table is split by columns; None where it may not be.
      additive: whether steps of addends of a gradient add up to the step of their sum.
      grouped: whether dim 0 of the ids counts equal parts of the table, and each has ids of its own part.
      capacity, wire_dtype, samples: of the exchange.
    """
    s, ids, rows = parted(rest, len(modes))
    grad = jnp.zeros(table.shape, rows[0].dtype)
    for i, r, mode in zip(ids, rows, modes, strict=True):
        grad = grad.at[i].add(r, mode=mode, wrap_negative_indices=False)
    param = [table] if update.has_param else []
    added, *state = dense(grad, *s, *param, update=update)
    return [table + added.astype(table.dtype), *state]


def parted(rest: Sequence[Any], lookups: int) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Something of each operand but the table: of the state, the ids and the rows."""
    n = len(rest) - 2 * lookups
    return rest[:n], rest[n : n + lookups], rest[n + lookups :]


update_rows_p = compat.make_op("sbp_update_rows", update_rows)


@dataclass(frozen=True)
class _Step:
    """The optimizer's step on rows that a device has received.

    Arguments:
      ctx: the op.
      old: the leaves of the state.
      lines: which of those have a line per row of the table.
    """

    ctx: Local
    old: Sequence[Any]
    lines: Sequence[bool]

    def __call__(self, state: Sequence[Any], places: Any, grad: Any) -> list[Any]:
        """Table and state with the rows at `places` updated; the other leaves are as after one step."""
        table, update = state[0], self.ctx.params["update"]
        size = table.shape[0]
        here = [
            self.taken(x, places) if line else o
            for x, o, line in zip(state[1:], self.old, self.lines, strict=True)
        ]
        param = [self.taken(table, places)] if update.has_param or not sums_apart(table.dtype) else []
        added, *new = update(grad, *here, *(param if update.has_param else []))
        # Rows that are left as they are have distinct places out of bounds: no two are ever written at once.
        beyond = np.int32(size) + lax.iota(np.int32, places.shape[0])
        at = jnp.where(self.touched(grad) & (places < size), places, beyond)
        flags: dict[str, Any] = {"mode": "drop", "unique_indices": True, "wrap_negative_indices": False}

        def put(x: Any, rows: Any) -> Any:
            return x.at[at].set(rows.astype(x.dtype), **flags)

        added = added.astype(table.dtype)
        # XLA widens a whole table of short floats to add to it.
        table = table.at[at].add(added, **flags) if sums_apart(table.dtype) else put(table, param[0] + added)
        kept = [put(x, n) if line else n for x, n, line in zip(state[1:], new, self.lines, strict=True)]
        return [table, *kept]

    def add(self, state: Sequence[Any], places: Any, grad: Any) -> list[Any]:
        """Table and state with the steps of addends at `places`, which may occur more than once."""
        update = self.ctx.params["update"]
        # A step that adds up does not read the parameter.
        param = [jnp.zeros(grad.shape, state[0].dtype)] if update.has_param else []
        added, *new = update(grad, *self.old, *param)
        return [state[0].at[places].add(added, mode="drop", wrap_negative_indices=False), *new]

    def taken(self, x: Any, places: Any) -> Any:
        """The rows of a shard at `places`."""
        return x.at[places].get(mode="fill", fill_value=0)

    def touched(self, grad: Any) -> Any:
        """Which rows have a gradient that is not all zero, on any device that has some of their columns."""
        flags = jnp.any(grad != 0, axis=tuple(range(1, grad.ndim)))
        axes = _column_axes(self.ctx)
        return self.ctx.maximum(flags.astype(np.int32), axes) > 0 if axes else flags


def _column_axes(ctx: Local) -> tuple[int, ...]:
    """The axes that split the table by columns."""
    table = ctx.operands[0]
    return tuple(sorted({a for d in range(1, len(table.shape)) for a in table.axes(d)}))


def _local(ctx: Local, table: Any, *rest: Any) -> list[Any]:
    """Sums by key go to the owners of the rows, which update them in place."""
    modes = ctx.params["modes"]
    state, ids, rows = parted(rest, len(modes))
    lookups = zip(ids, ctx.operands[1 + len(state) :], rows, modes, strict=False)
    found = [_keyed(ctx, i, at, r.reshape(-1, *table.shape[1:]), mode) for i, at, r, mode in lookups]
    keys, flat = (jnp.concatenate([pair[k] for pair in found]) for k in (0, 1))
    lines = [by_row(x.shape, ctx.operands[0].shape) for x in ctx.operands[1 : 1 + len(state)]]
    step = _Step(ctx, state, lines)
    if ctx.operands[0].axes(0):
        # XLA of jax 0.10 reads through the slice that made a shard, without clamping to the shard first.
        table, *state = barrier((table, *state))
    if not _copied_axes(ctx):
        additive = _additive(ctx)
        apply = step.add if additive else step
        return list(deliver(ctx, _route(ctx), keys, flat, [table, *state], apply, additive))

    def add(grad: Any, at: Any, sums: Any) -> Any:
        return grad.at[at].add(sums, mode="drop")

    grad = deliver(ctx, _route(ctx), keys, flat, jnp.zeros(table.shape, flat.dtype), add)
    grad = ctx.total(grad, _copied_axes(ctx))
    return step([table, *state], lax.iota(np.int32, table.shape[0]), grad)


def _keyed(ctx: Local, ids: Any, layout: Layout, rows: Any, mode: Any) -> tuple[Any, Any]:
    """The keys of a lookup, and its rows.

    Where JAX was promised indices in bounds, reading clamps the others, and adding drops them. With the keys
    that reading has, and zeros for what is dropped, XLA sorts them once for both.
    """
    keys, legal = keys_of(ctx, ids, layout, mode != GatherScatterMode.FILL_OR_DROP)
    if mode == GatherScatterMode.PROMISE_IN_BOUNDS:
        flags = legal.reshape(-1, *[1] * (rows.ndim - 1))
        rows = jnp.where(flags, rows, jnp.zeros((), rows.dtype))
    return keys.reshape(-1), rows


def _split_axes(ctx: Local) -> set[int]:
    """The axes that split ids of some lookup."""
    n = len(ctx.params["modes"])
    return {a for i in ctx.operands[-2 * n : -n] for d in range(len(i.shape)) for a in i.axes(d)}


def _copied_axes(ctx: Local) -> tuple[int, ...]:
    """The axes along which devices have the same rows, and ids of their own: they add up a gradient."""
    return tuple(sorted(_split_axes(ctx) - set(ctx.operands[0].axes(0))))


def _additive(ctx: Local) -> bool:
    """Whether addends of a row may be applied one by one."""
    apart = sums_apart(ctx.dtypes[0]) and sums_apart(ctx.dtypes[-1])
    return bool(ctx.params["additive"]) and apart and not _copied_axes(ctx)


def _route(ctx: Local) -> Route:
    table, n = ctx.operands[0], len(ctx.params["modes"])
    ids, split = ctx.operands[-2 * n : -n], _split_axes(ctx)
    # Ids of groups lie where the rows of their groups do.
    at_home = ctx.params["grouped"] and all(i.axes(0) == table.axes(0) and not i.padded(0) for i in ids)
    return route_along(ctx, [] if at_home else [a for a in table.axes(0) if a in split], ids)


def _talks(ctx: Local) -> Iterable[Talk]:
    """The exchange, and where the table is split by columns a flag per row."""
    route, n = _route(ctx), len(ctx.params["modes"])
    local, dtype = ctx.operands[0].local, ctx.dtypes[-1]
    first = len(ctx.operands) - 2 * n
    mode = ctx.params["modes"][0]
    for talk in deliver_talks(route, row_bytes(ctx, dtype), keys_as(mode) if n == 1 else None):
        operand = first + (0 if talk.operand == 1 else n)
        yield replace(talk, operand=operand)
    copied = _copied_axes(ctx)
    if copied:
        group = ctx.group(copied)
        wire_bytes = 2 * (group - 1) / group * local[0] * math.prod(local[1:]) * compat.itemsize(dtype)
        why = "every device over {axes} has these rows, and a part of their gradient"
        yield Talk("all_reduce", copied, wire_bytes, first + n, why)
    axes = _column_axes(ctx)
    if axes and not _additive(ctx):
        group = ctx.group(axes)
        places = local[0] if copied else legs(route)[-1].room if legs(route) else route.keys
        wire_bytes = 2 * (group - 1) / group * 4 * places
        why = "a row is touched if any of its columns is; the columns are split over {axes}"
        yield Talk("all_reduce", axes, wire_bytes, first + n, why)


def _flops(op: Op) -> float:
    """Some tens of operations for every number that comes back; the table itself is not read."""
    n = len(op.params["modes"])
    return 20.0 * sum(math.prod(s) for s in op.shapes[-n:])


def _traffic(op: Op) -> float:
    """The rows as they come, and those of the table and of its state read and written."""
    n = len(op.params["modes"])
    rows = sum(math.prod(s) for s in op.shapes[-n:]) * compat.itemsize(op.dtypes[0])
    lines = 1 + sum(by_row(s, op.shapes[0]) for s in op.shapes[1 : -2 * n])
    return rows * (1 + 2 * lines)


@rule(
    "sbp_update_rows",
    local=_local,
    talks=_talks,
    flops=_flops,
    traffic=_traffic,
    functions=("update",),
    note="rows by a sparse exchange",
)
def rows(op: Op) -> list[Row]:
    """Rows, by an exchange with ids that are split too; a copied table; columns that are kept apart."""
    n, (table, *_) = len(op.params["modes"]), op.shapes
    state, ids, given = parted(op.shapes[1:], n)
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
