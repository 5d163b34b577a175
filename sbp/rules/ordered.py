"""Ops along one dim in its order: cumulative ops, arg-extrema, sorting and the largest elements.

A split of that dim needs a word with the other devices: each works on its rows, what it found is gathered
(one row per device, or a few), and every device completes its part from that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import compat
from sbp.limits import identity_of
from sbp.rules.entry import Op, Row
from sbp.rules.factors import Letters, additive_row, factors
from sbp.rules.registry import rule
from sbp.signature import B, Partial, Split
from sbp.talk.local import Local, Talk


def _operand_flops(op: Op) -> float:
    return float(sum(math.prod(s) for s in op.shapes))


def _along(op: Op, dim: int) -> tuple[list[Letters], list[Letters]]:
    """Letters of an op that keeps shapes and needs `dim` whole."""

    def names(shape: tuple[int, ...]) -> Letters:
        return tuple(None if d == dim else f"d{d}" for d in range(len(shape)))

    return [names(s) for s in op.shapes], [names(s) for s in op.results]


def _gather_talk(ctx: Local, dim: int, local_bytes: float, reason: str) -> Iterable[Talk]:
    """The gathering of `local_bytes` from every device that holds a part of `dim`."""
    axes = ctx.operands[0].axes(dim)
    if axes:
        yield Talk("all_gather", axes, (ctx.group(axes) - 1) * local_bytes, 0, f"{reason} over {{axes}}")


def _bytes(ctx: Local, operand: int = 0) -> float:
    layout = ctx.operands[operand]
    return math.prod(layout.local) * compat.itemsize(ctx.dtypes[operand])


@dataclass(frozen=True, slots=True)
class _Accumulation:
    """How a cumulative op goes on from what came before.

    Arguments:
      of: the reduction whose identity padding becomes.
      total: of many rows, along dim 0.
      add: puts what came before in front.
    """

    of: str
    total: Callable[[Any], Any]
    add: Callable[[Any, Any], Any]


_ACCUMULATIONS = {
    "cumsum": _Accumulation("sum", lambda x: jnp.sum(x, 0, dtype=x.dtype), jnp.add),
    "cumprod": _Accumulation("prod", lambda x: jnp.prod(x, 0, dtype=x.dtype), jnp.multiply),
    "cummax": _Accumulation("max", lambda x: jnp.max(x, 0), jnp.maximum),
    "cummin": _Accumulation("min", lambda x: jnp.min(x, 0), jnp.minimum),
    "cumlogsumexp": _Accumulation("max", lambda x: jax.nn.logsumexp(x, 0), jnp.logaddexp),
}


def _cumulative_local(ctx: Local, x: Any) -> list[Any]:
    """A scan of the own rows, and the totals of the devices before."""
    dim, layout = ctx.params["axis"], ctx.operands[0]
    axes = layout.axes(dim)
    if not axes:
        return ctx.bind(x)
    how = _ACCUMULATIONS[ctx.primitive.name]
    empty = identity_of(how.of, x.dtype)
    (scanned,) = ctx.bind(ctx.mask(x, layout, (dim,), empty))
    reverse = ctx.params["reverse"]
    end = 0 if reverse else x.shape[dim] - 1
    totals = ctx.gathered(lax.index_in_dim(scanned, end, dim, keepdims=True), axes)
    places = lax.broadcasted_iota(np.int32, totals.shape, 0)
    before = places > ctx.rank(axes) if reverse else places < ctx.rank(axes)
    return [how.add(how.total(jnp.where(before, totals, empty)), scanned)]


def _cumulative_talks(ctx: Local) -> Iterable[Talk]:
    dim = ctx.params["axis"]
    rows = max(ctx.operands[0].local[dim], 1)
    why = f"the totals along dim {dim} are carried on; it is split"
    return _gather_talk(ctx, dim, _bytes(ctx) / rows, why)


def _cumulative_rows(op: Op) -> list[Row]:
    """Every dim; the accumulated one with a carry."""
    dim = op.params["axis"]
    operands, results = _along(op, dim)
    carried = [Row((Split(dim),), (Split(dim),))] if op.shapes[0][dim] > 1 else []
    return [*factors(op, operands, results), *carried]


@rule("cumsum", local=_cumulative_local, talks=_cumulative_talks)
def cumsum(op: Op) -> list[Row]:
    """Every dim, the accumulated one with a carry; additive."""
    return [*_cumulative_rows(op), additive_row(1, 1, (0,))]


@rule("cumprod", "cumlogsumexp", local=_cumulative_local, talks=_cumulative_talks)
def cumulative(op: Op) -> list[Row]:
    """Every dim, the accumulated one with a carry."""
    return _cumulative_rows(op)


@rule("cummax", "cummin", local=_cumulative_local, talks=_cumulative_talks)
def cumulative_extremum(op: Op) -> list[Row]:
    """Every dim, the accumulated one with a carry; maxima of maxima pass."""
    same = Partial(op.name.removeprefix("cum"))
    return [*_cumulative_rows(op), Row((same,), (same,))]


def _arg_local(ctx: Local, x: Any) -> list[Any]:
    """The best of the own rows, then the best of all devices'; of equal ones the first, NaN before all."""
    (dim,), layout = ctx.params["axes"], ctx.operands[0]
    axes, dtype = layout.axes(dim), ctx.params["index_dtype"]
    if not axes:
        return ctx.bind(x)
    how = "max" if ctx.primitive.name == "argmax" else "min"
    x = ctx.mask(x, layout, (dim,), identity_of(how, x.dtype))
    (at,) = ctx.bind(x)
    best = jnp.squeeze(jnp.take_along_axis(x, jnp.expand_dims(at, dim), dim), dim)
    beyond = np.asarray(np.iinfo(dtype).max, dtype)
    place = at + ctx.offset(layout, dim).astype(dtype)
    place = jnp.where(at < ctx.length(layout, dim).astype(dtype), place, beyond)
    bests, places = ctx.gathered(best, axes), ctx.gathered(place, axes)
    found = (jnp.max if how == "max" else jnp.min)(bests, axis=0)
    equal = (bests == found) | ((bests != bests) & (found != found))
    return [jnp.min(jnp.where(equal, places, beyond), axis=0)]


def _arg_talks(ctx: Local) -> Iterable[Talk]:
    (dim,) = ctx.params["axes"]
    each = compat.itemsize(ctx.dtypes[0]) + np.dtype(ctx.params["index_dtype"]).itemsize
    found = math.prod(ctx.results[0].local) * each
    return _gather_talk(ctx, dim, found, f"the best along dim {dim} of each device are compared; it is split")


@rule("argmax", "argmin", flops=_operand_flops, local=_arg_local, talks=_arg_talks)
def arg_extremum(op: Op) -> list[Row]:
    """Every dim; the searched one with a comparison of what the devices found."""
    (dim,) = op.params["axes"]
    names = tuple(None if d == dim else f"d{d}" for d in range(len(op.shapes[0])))
    rows = factors(op, [names], [tuple(n for n in names if n is not None)])
    enough = np.iinfo(op.params["index_dtype"]).max > op.shapes[0][dim]
    if enough and op.shapes[0][dim] > 1 and not jnp.issubdtype(op.dtypes[0], jnp.complexfloating):
        rows.append(Row((Split(dim),), (B,)))
    return rows


@rule("sort", note="the sorted dim is whole", flops=lambda op: 16 * _operand_flops(op))
def sort(op: Op) -> list[Row]:
    """The sorted dim must be whole; every operand is split alike."""
    operands, results = _along(op, op.params["dimension"])
    return factors(op, operands, results)


def _top_dim(params: Any, ndim: int) -> int:
    """The searched dim; before jax 0.11 always the last."""
    return int(params.get("axis", -1)) % ndim


def _top_k_local(ctx: Local, x: Any) -> list[Any]:
    """The largest of the own rows, then the largest of all devices'."""
    dim = _top_dim(ctx.params, x.ndim)
    found = ctx.bind(x)
    return _best_of_all(ctx, found, dim, ctx.bind) if ctx.operands[0].axes(dim) else found


def _best_of_all(ctx: Local, found: Sequence[Any], dim: int, choose: Callable[[Any], Any]) -> list[Any]:
    """Of the values that the devices found, and their places in the shards, those that `choose` finds."""
    layout, (values, at) = ctx.operands[0], found
    at = at + ctx.offset(layout, dim).astype(at.dtype)
    many, places = (_joined(ctx.gathered(y, layout.axes(dim)), dim) for y in (values, at))
    best, chosen = choose(many)
    return [best, jnp.take_along_axis(places, chosen, dim)]


def _joined(x: Any, dim: int) -> Any:
    """The first dim put before `dim` and merged with it."""
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def _top_k_talks(ctx: Local) -> Iterable[Talk]:
    return _best_talk(ctx, _top_dim(ctx.params, len(ctx.operands[0].shape)))


def _best_talk(ctx: Local, dim: int) -> Iterable[Talk]:
    each = compat.itemsize(ctx.dtypes[0]) + 4
    found = math.prod(ctx.results[0].local) * each
    why = f"the largest along dim {dim} of each device are compared; it is split"
    return _gather_talk(ctx, dim, found, why)


def _top_rows(op: Op, dim: int) -> list[Row]:
    """Every dim; the searched one if it divides, and each device has more than k rows of it."""
    size, k = op.shapes[0][dim], op.params["k"]
    operands, results = _along(op, dim)
    rows = factors(op, operands, results)
    if size % op.group == 0 and 0 < k < size // op.group:
        rows.append(Row((Split(dim),), (B, B)))
    return rows


@rule("top_k", flops=lambda op: 16 * _operand_flops(op), local=_top_k_local, talks=_top_k_talks)
def top_k(op: Op) -> list[Row]:
    """Every dim; the searched one, if each device has k rows, with a comparison of what the devices found."""
    return _top_rows(op, _top_dim(op.params, len(op.shapes[0])))


def _approx_dim(params: Any, ndim: int) -> int:
    return int(params["reduction_dimension"]) % ndim


def _approx_local(ctx: Local, x: Any) -> list[Any]:
    """The shards look for their best as parts of the whole, whose size decides how closely; then exactly."""
    dim, layout = _approx_dim(ctx.params, x.ndim), ctx.operands[0]
    if not layout.axes(dim):
        return ctx.bind(x)
    asked = ctx.params["reduction_input_size_override"]
    found = ctx.bind(x, reduction_input_size_override=asked if asked > 0 else layout.shape[dim])
    exactly = {"recall_target": 1.0, "reduction_input_size_override": -1}
    return _best_of_all(ctx, found, dim, lambda many: ctx.bind(many, **exactly))


def _approx_talks(ctx: Local) -> Iterable[Talk]:
    return _best_talk(ctx, _approx_dim(ctx.params, len(ctx.operands[0].shape)))


@rule("approx_top_k", flops=lambda op: 16 * _operand_flops(op), local=_approx_local, talks=_approx_talks)
def approx_top_k(op: Op) -> list[Row]:
    """Every dim; the searched one, if each device has k rows and k are asked for, with a comparison."""
    dim = _approx_dim(op.params, len(op.shapes[0]))
    if op.params["aggregate_to_topk"]:
        # Where NaN stands in an approximate order depends on how many numbers it is among.
        return [replace(row, finite_only=row.operands == (Split(dim),)) for row in _top_rows(op, dim)]
    return factors(op, *_along(op, dim))
