"""Ops that move elements without changing them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp.rules.factors import Letters, factors
from sbp.rules.local import Local
from sbp.rules.registry import Op, Row, rule
from sbp.signature import Split


def _dims(n: int) -> Letters:
    return tuple(f"d{i}" for i in range(n))


def _broadcast_local(ctx: Local, x: Any, *_: Any) -> list[Any]:
    return [lax.broadcast_in_dim(x, ctx.results[0].local, ctx.params["broadcast_dimensions"])]


@rule("broadcast_in_dim", local=_broadcast_local, fused=True, flops=lambda op: 0.0)
def broadcast_in_dim(op: Op) -> list[Row]:
    """Every dim of the result; a dim that is new, or repeated from size 1, is made locally."""
    (out,) = op.results
    at = op.params["broadcast_dimensions"]
    result = _dims(len(out))
    operand = tuple(result[d] if n == out[d] else None for d, n in zip(at, op.shapes[0], strict=True))
    rest: list[Letters] = [(None,) * len(s) for s in op.shapes[1:]]
    return factors(op, [operand, *rest], [result], additive=(0,), increasing=(0,))


@rule("transpose", flops=lambda op: 0.0)
def transpose(op: Op) -> list[Row]:
    """Every dim moves with its split."""
    names = _dims(len(op.shapes[0]))
    moved = tuple(names[d] for d in op.params["permutation"])
    return factors(op, [names], [moved], additive=(0,), increasing=(0,))


@rule("squeeze", fused=True, flops=lambda op: 0.0)
def squeeze(op: Op) -> list[Row]:
    """Every dim that stays."""
    names = _dims(len(op.shapes[0]))
    gone = [d % len(names) for d in op.params["dimensions"]]
    kept = tuple(n for d, n in enumerate(names) if d not in gone)
    operand = tuple(n if n in kept else None for n in names)
    return factors(op, [operand], [kept], additive=(0,), increasing=(0,))


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


def _reshape_local(ctx: Local, x: Any, *_: Any) -> list[Any]:
    return [jnp.reshape(x, ctx.results[0].local)]


@rule("reshape", local=_reshape_local, fused=True, flops=lambda op: 0.0)
def reshape(op: Op) -> list[Row]:
    """A dim that stays, or the major part of dims that merge or split, where the group divides both sides."""
    (old,), (new,) = op.shapes, op.results
    rows = factors(op, [(None,) * len(old)], [(None,) * len(new)], additive=(0,), increasing=(0,))
    for before, after in reshape_groups(old, new):
        b = [d for d in before if old[d] > 1]
        a = [d for d in after if new[d] > 1]
        if not a or not b:
            continue
        same = len(a) == len(b) == 1
        if same or (old[b[0]] % op.group == 0 and new[a[0]] % op.group == 0):
            rows.append(Row((Split(b[0]),), (Split(a[0]),)))
    return rows


@rule("concatenate", note="the joined dim is whole")
def concatenate(op: Op) -> list[Row]:
    """Every other dim; additive in all operands together."""
    dim = op.params["dimension"]
    names = tuple(None if d == dim else n for d, n in enumerate(_dims(len(op.results[0]))))
    return factors(op, [names] * len(op.shapes), [names], additive=tuple(range(len(op.shapes))))


@rule("stack", note="the new dim is whole")
def stack(op: Op) -> list[Row]:
    """Every old dim; additive in all operands together."""
    at = op.params.get("axis", op.params.get("dimension", 0)) % len(op.results[0])
    names = _dims(len(op.shapes[0]))
    result = (*names[:at], None, *names[at:])
    return factors(op, [names] * len(op.shapes), [result], additive=tuple(range(len(op.shapes))))


@rule("unstack", note="the removed dim is whole")
def unstack(op: Op) -> list[Row]:
    """Every dim that stays; additive."""
    at = op.params.get("axis", op.params.get("dimension", 0)) % len(op.shapes[0])
    names = _dims(len(op.results[0]))
    operand = (*names[:at], None, *names[at:])
    return factors(op, [operand], [names] * len(op.results), additive=(0,))


@rule("split", note="the cut dim is whole")
def split(op: Op) -> list[Row]:
    """Every other dim; additive."""
    dim = op.params["axis"]
    names = tuple(None if d == dim else n for d, n in enumerate(_dims(len(op.shapes[0]))))
    return factors(op, [names], [names] * len(op.results), additive=(0,))


@rule("pad", fused=True, note="padded dims are whole")
def pad(op: Op) -> list[Row]:
    """Every dim that gets no padding; additive in operand and padding value together."""
    config = op.params["padding_config"]
    names = tuple(None if any(c) else n for c, n in zip(config, _dims(len(config)), strict=True))
    return factors(op, [names, ()], [names], additive=(0, 1))


def _full(op: Op) -> Letters:
    """A letter for every dim that a slice takes whole."""
    starts, strides = op.params["start_indices"], op.params["strides"] or (1,) * len(op.shapes[0])
    return tuple(
        f"d{d}" if a == 0 and s == 1 and n == m else None
        for d, (a, s, n, m) in enumerate(zip(starts, strides, op.shapes[0], op.results[0], strict=True))
    )


def _slice_local(ctx: Local, x: Any) -> list[Any]:
    """A dim that is taken whole keeps its local size."""
    whole = [n == m for n, m in zip(ctx.operands[0].shape, ctx.results[0].shape, strict=True)]
    limits = tuple(
        n if full else stop for n, full, stop in zip(x.shape, whole, ctx.params["limit_indices"], strict=True)
    )
    return ctx.bind(x, limit_indices=limits)


@rule("slice", local=_slice_local, fused=True, note="sliced dims are whole")
def slice_(op: Op) -> list[Row]:
    """Every dim that is taken whole."""
    names = _full(op)
    return factors(op, [names], [names], additive=(0,), increasing=(0,))


@rule("rev", note="reversed dims are whole")
def rev(op: Op) -> list[Row]:
    """Every dim that is not reversed."""
    gone = op.params["dimensions"]
    names = tuple(None if d in gone else n for d, n in enumerate(_dims(len(op.shapes[0]))))
    return factors(op, [names], [names], additive=(0,), increasing=(0,))


def _iota_local(ctx: Local, *_: Any) -> list[Any]:
    """Counts on from the logical position of the shard."""
    layout, dim = ctx.results[0], ctx.params["dimension"]
    dtype = ctx.params["dtype"]
    rows = lax.broadcasted_iota(np.int32, layout.local, dim) + ctx.offset(layout, dim)
    return [rows.astype(dtype)]


@rule("iota", local=_iota_local, fused=True)
def iota(op: Op) -> list[Row]:
    """Every dim: it is made locally."""
    rest: list[Letters] = [(None,) * len(s) for s in op.shapes]
    return factors(op, rest, [_dims(len(op.results[0]))])


def _taken(op: Op) -> Letters:
    return tuple(
        f"d{d}" if n == m else None for d, (n, m) in enumerate(zip(op.shapes[0], op.results[0], strict=True))
    )


def _dynamic_slice_local(ctx: Local, x: Any, *starts: Any) -> list[Any]:
    sizes = tuple(
        local if n == m else m
        for local, n, m in zip(x.shape, ctx.operands[0].shape, ctx.results[0].shape, strict=True)
    )
    return [lax.dynamic_slice(x, _origin(ctx.operands[0].shape, ctx.results[0].shape, starts), sizes)]


def _origin(whole: Sequence[int], part: Sequence[int], starts: Sequence[Any]) -> list[Any]:
    """Start indices, 0 for dims that are taken whole (where JAX clamps any start to 0)."""
    return [jnp.zeros_like(s) if n == m else s for n, m, s in zip(whole, part, starts, strict=True)]


@rule("dynamic_slice", local=_dynamic_slice_local, note="sliced dims are whole")
def dynamic_slice(op: Op) -> list[Row]:
    """Every dim that is taken whole; additive in the operand."""
    names = _taken(op)
    rest: list[Letters] = [()] * (len(op.shapes) - 1)
    return factors(op, [names, *rest], [names], additive=(0,), increasing=(0,))


def _dynamic_update_local(ctx: Local, x: Any, update: Any, *starts: Any) -> list[Any]:
    return [
        lax.dynamic_update_slice(x, update, _origin(ctx.operands[0].shape, ctx.operands[1].shape, starts))
    ]


@rule("dynamic_update_slice", local=_dynamic_update_local, note="updated dims are whole")
def dynamic_update_slice(op: Op) -> list[Row]:
    """Every dim that is updated whole; additive in operand and update together."""
    names: Letters = tuple(
        f"d{d}" if n == m else None for d, (n, m) in enumerate(zip(op.shapes[0], op.shapes[1], strict=True))
    )
    rest: list[Letters] = [()] * (len(op.shapes) - 2)
    return factors(op, [names, names, *rest], [names], additive=(0, 1))
