"""Bodies of ops along one dim in its order: cumulative ops, arg-extrema, and the largest elements.

Of a split dim each device works on its own rows, what it found is gathered (one row per device, or a few),
and every device completes its part from that. So what is sent does not grow with the rows. Sums before a
device are added up by each for itself: a parallel scan (Blelloch, 1990) would send less to many devices, in
more steps. docs/communication.md says what a body may do.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp.communication.bits import identity_of
from sbp.communication.protocol import Communication, Context
from sbp.compat import core


def _gather_communication(ctx: Context, dim: int, local_bytes: float, reason: str) -> Iterable[Communication]:
    """The gathering of `local_bytes` from every device that holds a part of `dim`."""
    axes = ctx.operands[0].axes(dim)
    if axes:
        yield Communication(
            "all_gather", axes, (ctx.group(axes) - 1) * local_bytes, 0, f"{reason} over {{axes}}"
        )


def _bytes(ctx: Context, operand: int = 0) -> float:
    """Bytes of an operand's shard."""
    layout = ctx.operands[operand]
    return math.prod(layout.local) * core.itemsize(ctx.dtypes[operand])


@dataclass(frozen=True, slots=True)
class _Accumulation:
    """How a cumulative op goes on from what came before.

    Arguments:
      of: the reduction whose identity padding becomes.
      total: of many rows, along dim 0.
      add: puts what came before in front.
    """

    of: str
    total: Callable[[jax.Array], jax.Array]
    add: Callable[[jax.Array, jax.Array], jax.Array]


_ACCUMULATIONS = {
    "cumsum": _Accumulation("sum", lambda x: jnp.sum(x, 0, dtype=x.dtype), jnp.add),
    "cumprod": _Accumulation("prod", lambda x: jnp.prod(x, 0, dtype=x.dtype), jnp.multiply),
    "cummax": _Accumulation("max", lambda x: jnp.max(x, 0), jnp.maximum),
    "cummin": _Accumulation("min", lambda x: jnp.min(x, 0), jnp.minimum),
    "cumlogsumexp": _Accumulation("max", lambda x: jax.nn.logsumexp(x, 0), jnp.logaddexp),
}


def cumulative_local(ctx: Context, x: jax.Array) -> list[jax.Array]:
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
    totals = ctx.gather(lax.index_in_dim(scanned, end, dim, keepdims=True), axes)
    ranks = lax.broadcasted_iota(np.int32, totals.shape, 0)
    before = ranks > ctx.rank(axes) if reverse else ranks < ctx.rank(axes)
    return [how.add(how.total(jnp.where(before, totals, empty)), scanned)]


def cumulative_communication(ctx: Context) -> Iterable[Communication]:
    """What `cumulative_local` sends: one row."""
    dim = ctx.params["axis"]
    rows = max(ctx.operands[0].local[dim], 1)
    why = f"the totals along dim {dim} are carried on; it is split"
    return _gather_communication(ctx, dim, _bytes(ctx) / rows, why)


def arg_local(ctx: Context, x: jax.Array) -> list[jax.Array]:
    """The best of the own rows, then the best of all devices'; of equal ones the first, NaN before all."""
    (dim,), layout = ctx.params["axes"], ctx.operands[0]
    axes, dtype = layout.axes(dim), ctx.params["index_dtype"]
    if not axes:
        return ctx.bind(x)
    how = "max" if ctx.primitive.name == "argmax" else "min"
    x = ctx.mask(x, layout, (dim,), identity_of(how, x.dtype))
    (at,) = ctx.bind(x)
    best = jnp.squeeze(jnp.take_along_axis(x, jnp.expand_dims(at, dim), dim), dim)
    # What masked padding has found is behind every real row: it must not win against a real equal.
    beyond = np.asarray(np.iinfo(dtype).max, dtype)
    position = at + ctx.offset(layout, dim).astype(dtype)
    position = jnp.where(at < ctx.length(layout, dim).astype(dtype), position, beyond)
    bests, positions = ctx.gather(best, axes), ctx.gather(position, axes)
    found = (jnp.max if how == "max" else jnp.min)(bests, axis=0)
    equal = (bests == found) | ((bests != bests) & (found != found))
    return [jnp.min(jnp.where(equal, positions, beyond), axis=0)]


def arg_communication(ctx: Context) -> Iterable[Communication]:
    """What `arg_local` sends: values and their positions."""
    (dim,) = ctx.params["axes"]
    each = core.itemsize(ctx.dtypes[0]) + np.dtype(ctx.params["index_dtype"]).itemsize
    found = math.prod(ctx.results[0].local) * each
    return _gather_communication(
        ctx, dim, found, f"the best along dim {dim} of each device are compared; it is split"
    )


def top_dim(params: Mapping[str, Any], ndim: int) -> int:
    """The dim that `top_k` searches; before jax 0.11 always the last."""
    return int(params.get("axis", -1)) % ndim


def top_k_local(ctx: Context, x: jax.Array) -> list[jax.Array]:
    """The largest of the own rows, then the largest of all devices'."""
    dim = top_dim(ctx.params, x.ndim)
    found = ctx.bind(x)
    return _best_of_all(ctx, found, dim, ctx.bind) if ctx.operands[0].axes(dim) else found


def _best_of_all(
    ctx: Context, found: Sequence[jax.Array], dim: int, choose: Callable[[jax.Array], list[jax.Array]]
) -> list[jax.Array]:
    """The values that `choose` picks from what all devices have found, and their logical positions.

    Arguments:
      found: this device's values, and their numbers in its shard.
    """
    layout, (values, at) = ctx.operands[0], found
    at = at + ctx.offset(layout, dim).astype(at.dtype)
    many, positions = (_joined(ctx.gather(y, layout.axes(dim)), dim) for y in (values, at))
    best, chosen = choose(many)
    return [best, jnp.take_along_axis(positions, chosen, dim)]


def _joined(x: jax.Array, dim: int) -> jax.Array:
    """The first dim put before `dim` and merged with it."""
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def top_k_communication(ctx: Context) -> Iterable[Communication]:
    """What `top_k_local` sends."""
    return _best_communication(ctx, top_dim(ctx.params, len(ctx.operands[0].shape)))


def _best_communication(ctx: Context, dim: int) -> Iterable[Communication]:
    """The gathering of every device's best values, and of their positions, four bytes each."""
    found = math.prod(ctx.results[0].local)
    why = f"the largest along dim {dim} of each device are compared; it is split"
    yield from _gather_communication(ctx, dim, found * core.itemsize(ctx.dtypes[0]), why)
    where = f"the positions of the largest along dim {dim} of each device; it is split"
    yield from (replace(t, result=1) for t in _gather_communication(ctx, dim, found * 4.0, where))


def approx_dim(params: Mapping[str, Any], ndim: int) -> int:
    """The dim that `approx_top_k` searches."""
    return int(params["reduction_dimension"]) % ndim


def approx_local(ctx: Context, x: jax.Array) -> list[jax.Array]:
    """The shards look for their best as parts of the whole, whose size decides how closely; then exactly."""
    dim, layout = approx_dim(ctx.params, x.ndim), ctx.operands[0]
    if not layout.axes(dim):
        return ctx.bind(x)
    asked = ctx.params["reduction_input_size_override"]
    found = ctx.bind(x, reduction_input_size_override=asked if asked > 0 else layout.shape[dim])
    exactly = {"recall_target": 1.0, "reduction_input_size_override": -1}
    return _best_of_all(ctx, found, dim, lambda many: ctx.bind(many, **exactly))


def approx_communication(ctx: Context) -> Iterable[Communication]:
    """What `approx_local` sends."""
    return _best_communication(ctx, approx_dim(ctx.params, len(ctx.operands[0].shape)))
