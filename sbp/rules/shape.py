"""Ops that move elements without changing them."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp.communication.protocol import Context
from sbp.compat.untyped import Position, iinfo
from sbp.rules.entry import Op, Row
from sbp.rules.factors import Letters, factors
from sbp.rules.registry import rule
from sbp.signature import B, P, Split


def _dims(n: int) -> Letters:
    return tuple(f"d{i}" for i in range(n))


def _broadcast_local(ctx: Context, x: jax.Array, *_: jax.Array) -> list[jax.Array]:
    return [lax.broadcast_in_dim(x, ctx.results[0].local, ctx.params["broadcast_dimensions"])]


@rule("broadcast_in_dim", body=_broadcast_local, fused=True, layout=True, flops=lambda op: 0.0)
def broadcast_in_dim(op: Op) -> list[Row]:
    """Every dim of the result; a dim that is new, or repeated from size 1, is made locally."""
    (out,) = op.results
    at = op.params["broadcast_dimensions"]
    result = _dims(len(out))
    operand = tuple(result[d] if n == out[d] else None for d, n in zip(at, op.shapes[0], strict=True))
    rest: list[Letters] = [(None,) * len(s) for s in op.shapes[1:]]
    return factors(op, [operand, *rest], [result], moved=(0,))


@rule("transpose", layout=True, flops=lambda op: 0.0)
def transpose(op: Op) -> list[Row]:
    """Every dim moves with its split."""
    names = _dims(len(op.shapes[0]))
    return factors(op, [names], [tuple(names[d] for d in op.params["permutation"])], moved=(0,))


@rule("squeeze", fused=True, layout=True, flops=lambda op: 0.0)
def squeeze(op: Op) -> list[Row]:
    """Every dim that stays."""
    names = _dims(len(op.shapes[0]))
    gone = [d % len(names) for d in op.params["dimensions"]]
    kept = tuple(n for d, n in enumerate(names) if d not in gone)
    operand = tuple(n if n in kept else None for n in names)
    return factors(op, [operand], [kept], moved=(0,))


def reshape_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The finest pairing of runs of old dims with runs of new dims that hold the same elements.

    >>> reshape_groups((4, 6, 5), (24, 5))
    [([0, 1], [0]), ([2], [1])]
    """
    if math.prod(old) == 0:
        return [([i], [i]) for i in range(len(old))] if tuple(old) == tuple(new) else []
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        a, b = i, j
        left = right = 1
        while True:
            if left == right and (i > a or j > b):
                break
            if left <= right and i < len(old):
                left, i = left * old[i], i + 1
            elif j < len(new):
                right, j = right * new[j], j + 1
            else:
                left, i = left * old[i], i + 1
        groups.append((list(range(a, i)), list(range(b, j))))
    return groups


def _reshape_local(ctx: Context, x: jax.Array, *_: jax.Array) -> list[jax.Array]:
    order = ctx.params.get("dimensions")
    return [jnp.reshape(x if order is None else x.transpose(order), ctx.results[0].local)]


@rule("reshape", body=_reshape_local, fused=True, layout=True, flops=lambda op: 0.0)
def reshape(op: Op) -> list[Row]:
    """A dim that stays, or the major part of dims that merge or split, where the group divides both sides."""
    (shape,), (new,) = op.shapes, op.results
    # The gradient of a product reads the dims in another order: they are transposed first.
    order = op.params.get("dimensions") or tuple(range(len(shape)))
    old = [shape[d] for d in order]
    rows = factors(op, [(None,) * len(old)], [(None,) * len(new)], moved=(0,))
    for before, after in reshape_groups(old, new):
        b = [d for d in before if old[d] > 1]
        a = [d for d in after if new[d] > 1]
        if not a or not b:
            continue
        same = len(a) == len(b) == 1
        if same or (old[b[0]] % op.group == 0 and new[a[0]] % op.group == 0):
            rows.append(Row((Split(order[b[0]]),), (Split(a[0]),)))
    return rows


@rule("stack", note="the new dim is whole")
def stack(op: Op) -> list[Row]:
    """Every old dim; sums and extrema of all operands together."""
    at = op.params.get("axis", op.params.get("dimension", 0)) % len(op.results[0])
    names = _dims(len(op.shapes[0]))
    result = (*names[:at], None, *names[at:])
    every = tuple(range(len(op.shapes)))
    return factors(op, [names] * len(every), [result], moved=every)


@rule("unstack", note="the removed dim is whole")
def unstack(op: Op) -> list[Row]:
    """Every dim that stays; sums and extrema."""
    at = op.params.get("axis", op.params.get("dimension", 0)) % len(op.shapes[0])
    names = _dims(len(op.results[0]))
    return factors(op, [(*names[:at], None, *names[at:])], [names] * len(op.results), moved=(0,))


def _iota_local(ctx: Context, *_: jax.Array) -> list[jax.Array]:
    """Counts on from the logical position of the shard."""
    layout, dim = ctx.results[0], ctx.params["dimension"]
    dtype = ctx.params["dtype"]
    return [(lax.broadcasted_iota(np.int32, layout.local, dim) + ctx.offset(layout, dim)).astype(dtype)]


@rule("iota", body=_iota_local, fused=True)
def iota(op: Op) -> list[Row]:
    """Every dim: it is made locally."""
    rest: list[Letters] = [(None,) * len(s) for s in op.shapes]
    return factors(op, rest, [_dims(len(op.results[0]))])


def _whole_letters(op: Op, whole: Sequence[int], part: Sequence[int]) -> Letters:
    """A letter for every dim that is taken whole, of logical shapes: a part may be as long as a shard."""
    return tuple(f"d{d}" if n == m else None for d, (n, m) in enumerate(zip(whole, part, strict=True)))


def _origin(whole: Sequence[int], part: Sequence[int], starts: Sequence[jax.Array]) -> list[Position]:
    """The logical start along each dim, clamped as JAX clamps it, int32: 0 for dims that are taken whole."""

    def clamped(s: jax.Array, most: int) -> jax.Array:
        return jnp.clip(s, 0, min(most, iinfo(s.dtype).max)).astype(np.int32)

    return [np.int32(0) if n == m else clamped(s, n - m) for n, m, s in zip(whole, part, starts, strict=True)]


def _dynamic_slice_local(ctx: Context, x: jax.Array, *starts: jax.Array) -> list[jax.Array]:
    """Each device gives the rows that it has, and zeros for the others'."""
    whole, part = ctx.operands[0], ctx.results[0]
    origin = _origin(whole.shape, part.shape, starts)
    cut = [d for d, (n, m) in enumerate(zip(whole.shape, part.shape, strict=True)) if n != m]
    owned = [d for d in cut if whole.axes(d)]
    sizes = tuple(part.shape[d] if d in cut and d not in owned else n for d, n in enumerate(x.shape))
    start = [np.int32(0) if d in owned else s for d, s in enumerate(origin)]
    x = lax.dynamic_slice(x, start, sizes, allow_negative_indices=False)
    for d in owned:
        at = origin[d] + lax.iota(np.int32, part.shape[d]) - ctx.offset(whole, d)
        mine = (at >= 0) & (at < ctx.length(whole, d))
        x = jnp.take(x, jnp.clip(at, 0, x.shape[d] - 1), axis=d)
        x = jnp.where(lax.broadcast_in_dim(mine, x.shape, (d,)), x, jnp.zeros((), x.dtype))
    return [x]


@rule("dynamic_slice", body=_dynamic_slice_local)
def dynamic_slice(op: Op) -> list[Row]:
    """Every dim that is taken whole; a sliced dim that is split leaves a sum; additive in the operand."""
    names = _whole_letters(op, op.logical[0], op.params["slice_sizes"])
    rest: list[Letters] = [()] * (len(op.shapes) - 1)
    rows = factors(op, [names, *rest], [names], moved=(0,))
    for d, name in enumerate(names):
        if name is None and op.shapes[0][d] > 1 and op.results[0][d] > 0:
            why = f"rows of dim {d} of operand 0 are sliced out here, and it is split over {{axes}}"
            rows.append(Row((Split(d), *(B,) * len(rest)), (P,), reason=why, owned=True))
    return rows


def _dynamic_update_local(
    ctx: Context, x: jax.Array, update: jax.Array, *starts: jax.Array
) -> list[jax.Array]:
    """Each device replaces the rows that it has."""
    whole, part = ctx.operands[0], ctx.operands[1]
    origin = _origin(whole.shape, part.shape, starts)
    cut = [d for d, (n, m) in enumerate(zip(whole.shape, part.shape, strict=True)) if n != m]
    owned = [d for d in cut if whole.axes(d)]
    if not owned:
        return [lax.dynamic_update_slice(x, update, origin, allow_negative_indices=False)]
    if 0 in part.shape:
        return [x]
    ours = jnp.ones((), bool)
    for d in owned:
        at = ctx.positions(whole, d) - origin[d]
        update = jnp.take(update, jnp.clip(at, 0, part.shape[d] - 1), axis=d)
        inside = (at >= 0) & (at < part.shape[d])
        ours = ours & lax.broadcast_in_dim(inside, [n if e == d else 1 for e, n in enumerate(x.shape)], (d,))
    start = [np.int32(0) if d in owned else s for d, s in enumerate(origin)]
    kept = lax.dynamic_slice(x, start, update.shape, allow_negative_indices=False)
    return [lax.dynamic_update_slice(x, jnp.where(ours, update, kept), start, allow_negative_indices=False)]


@rule("dynamic_update_slice", body=_dynamic_update_local)
def dynamic_update_slice(op: Op) -> list[Row]:
    """Every dim; an updated one without moving the update's rows; sums and extrema of both."""
    names = _whole_letters(op, op.logical[0], op.logical[1])
    rest: list[Letters] = [()] * (len(op.shapes) - 2)
    rows = factors(op, [names, names, *rest], [names], moved=(0, 1))
    for d, name in enumerate(names):
        if name is None and op.shapes[0][d] > 1:
            rows.append(Row((Split(d), B, *(B,) * len(rest)), (Split(d),)))
    return rows


def _tile_local(ctx: Context, x: jax.Array, *_: jax.Array) -> list[jax.Array]:
    """Repeats what is whole; of a repeated dim that is split each device makes its own rows."""
    result, reps = ctx.results[0], list(ctx.params["reps"])
    for d, n in enumerate(ctx.operands[0].shape):
        if reps[d] > 1 and result.axes(d):
            x = jnp.take(x, ctx.positions(result, d) % n, axis=d)
            reps[d] = 1
    return [lax.tile(x, reps)]


@rule("tile", body=_tile_local, fused=True, flops=lambda op: 0.0)
def tile(op: Op) -> list[Row]:
    """Every dim that is not repeated; a repeated one is made locally, of the whole; sums and extrema."""
    (shape,), (out,) = op.shapes, op.results
    names = _dims(len(shape))
    repeated = [r != 1 for r in op.params["reps"]]
    ins = tuple(None if again else name for name, again in zip(names, repeated, strict=True))
    rows = factors(op, [ins], [ins], moved=(0,))
    rows += [Row((B,), (Split(d),)) for d, again in enumerate(repeated) if again and out[d] > 1]
    return rows
