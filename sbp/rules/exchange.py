"""The sparse exchange: rows of a table that is split by its dim 0, to and from the devices that ask by key.

Each device has keys; the device that has a key's row is its owner. Keys go to their owners by all-to-all,
rows come back by all-to-all (`lookup`), or go with the keys (`deliver`). Equal keys of a device travel once.
Shards are contiguous and in the order of the keys, so sorted keys lie in one bucket per owner. A table that
several axes split is reached axis by axis, outer to inner, and equal keys are merged on the way.

Shapes are static: in one round a device has room for `capacity` keys for each owner. A fuller bucket takes
more rounds, in a loop that runs until no device has a key left, so that no skew loses one. The plan counts
the first round; how many more there are depends on the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import compat
from sbp.layout import Layout
from sbp.rules.legs import Leg, Route, cut, legs
from sbp.rules.local import Local
from sbp.rules.registry import Talk

# In the place of a key where there is none: greater than every key.
NO_KEY = np.int32(np.iinfo(np.int32).max)
KEY_BYTES = 4
# What the rounds after the first are called in the names of compiled instructions.
OVERFLOW = "overflow_rounds"

Serve: TypeAlias = Callable[[Any], Any]


class Tally(NamedTuple):
    """How many keys a device had, how many of them have been served, and in how many rounds."""

    given: Any
    served: Any
    rounds: Any

    def after(self, now: Any) -> Tally:
        """One round later, in which the keys at `now` were served."""
        return Tally(self.given, self.served + _count(now), self.rounds + np.int32(1))


# Of keys that do not travel.
NOTHING = Tally(np.int32(0), np.int32(0), np.int32(0))


def _count(flags: Any) -> Any:
    return jnp.sum(flags, dtype=np.int32)


def places(ctx: Local, route: Route, keys: Any) -> Any:
    """Where in this device's shard the rows of `keys` are; the shard's size for rows that are not here."""
    layout = cut(route.rows, len(route.rows.axes))
    at = keys - ctx.offset(layout, 0)
    return jnp.where((at >= 0) & (at < ctx.length(layout, 0)), at, np.int32(layout.local[0]))


def rows_at(x: Any, at: Any) -> Any:
    """The rows of a shard at `places`; zeros for the shard's size."""
    return x.at[at].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def taken(x: Any, at: Any) -> Any:
    """The elements of `x` at places along dim 0, of which none is negative."""
    return x.at[at].get(mode="clip", wrap_negative_indices=False)


def within(ctx: Local, layout: Layout, keys: Any) -> Any:
    """The keys of the rows that this device has under `layout`; no key for others."""
    at = keys - ctx.offset(layout, 0)
    return jnp.where((at >= 0) & (at < ctx.length(layout, 0)), keys, NO_KEY)


@dataclass(frozen=True, slots=True)
class Distinct:
    """Keys in order.

    Arguments:
      keys: [n], each once; behind them no key.
      order: [n], which of the given keys comes first, second, ...
      ranks: [n], where each of those is in `keys`.
    """

    keys: Any
    order: Any
    ranks: Any


def distinct(keys: Any) -> Distinct:
    count = keys.shape[0]
    ordered, order = lax.sort((keys, lax.iota(np.int32, count)), num_keys=1)
    new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    ranks = jnp.cumsum(new, dtype=np.int32) - np.int32(1)
    once = (
        jnp.full(count, NO_KEY).at[ranks].set(ordered, indices_are_sorted=True, wrap_negative_indices=False)
    )
    return Distinct(once, order, ranks)


def starts_of(ctx: Local, leg: Leg, keys: Any) -> Any:
    """Where the bucket of each owner starts among sorted keys, [group + 1]: the last one is where it ends."""
    first = ctx.offset(leg.outer, 0)
    bounds = first + np.arange(leg.group + 1, dtype=np.int32) * np.int32(leg.chunk)
    bounds = jnp.minimum(bounds, first + ctx.length(leg.outer, 0))
    return jnp.sum(keys[None] < bounds[:, None], axis=1, dtype=np.int32)


def windows(starts: Any, room: int) -> Any:
    """The places [group, room] from each of [group] starts on."""
    return starts[:, None] + lax.iota(np.int32, room)


def beside(flags: Any, rows: Any) -> Any:
    """Flags of rows, shaped to select among them."""
    return flags.reshape(flags.shape + (1,) * (rows.ndim - flags.ndim))


def wire_type(dtype: Any, wire: str | None) -> Any:
    """The dtype in which rows travel: narrower ones only, and of floating rows only."""
    if wire is None or not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    narrow = jnp.dtype(wire)
    return narrow if compat.itemsize(narrow) < compat.itemsize(dtype) else dtype


def travel(ctx: Local, rows: Any, leg: Leg, wire: str | None) -> Any:
    """Row i to the device at position i. Short floats travel as integers: XLA would widen them on CPU."""
    sent = rows.astype(wire_type(rows.dtype, wire))
    dtype, size = sent.dtype, compat.itemsize(sent.dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or size not in (1, 2):
        return ctx.all_to_all(sent, leg.axis).astype(rows.dtype)
    bits = lax.bitcast_convert_type(sent, np.dtype(f"uint{8 * int(size)}"))
    return lax.bitcast_convert_type(ctx.all_to_all(bits, leg.axis), dtype).astype(rows.dtype)


def lookup(ctx: Local, route: Route, keys: Any, serve: Serve) -> Any:
    """The rows of `keys`, `[n, ...]`; zeros where there is no key, or where the row is not along the route.

    Arguments:
      keys: `[n]` int32, `NO_KEY` for none.
      serve: gives rows for their places in this device's shard, `[m]` int32, and zeros for the shard's size.
    """
    rows, tally = _looked_up(ctx, route, legs(route), keys, serve)
    ctx.report(tally)
    return rows


def _looked_up(ctx: Local, route: Route, ahead: Sequence[Leg], keys: Any, serve: Serve) -> tuple[Any, Tally]:
    if not ahead:
        return serve(places(ctx, route, keys)), NOTHING
    leg, inner = ahead[0], ahead[1:]
    keys = within(ctx, leg.outer, keys)
    found = distinct(keys)
    starts = starts_of(ctx, leg, found.keys)
    slots = (
        jnp.zeros_like(keys)
        .at[found.order]
        .set(found.ranks, unique_indices=True, wrap_negative_indices=False)
    )
    owners = jnp.clip((keys - ctx.offset(leg.outer, 0)) // np.int32(leg.chunk), 0, leg.group - 1)
    inside = slots - taken(starts, owners)

    def ask(done: Any, room: int) -> tuple[Any, Any]:
        """Which keys are answered in a round, and their rows: zeros for the others."""
        at = windows(starts[:-1] + done, room)
        asked = jnp.where(at < starts[1:, None], taken(found.keys, at), NO_KEY)
        got, _ = _looked_up(ctx, route, inner, ctx.all_to_all(asked, leg.axis).reshape(-1), serve)
        back = travel(ctx, got.reshape(*asked.shape, *got.shape[1:]), leg, route.wire_dtype)
        place = inside - done
        now = (keys != NO_KEY) & (place >= 0) & (place < room)
        place = jnp.where(now, owners * np.int32(room) + place, np.int32(leg.group * room))
        return now, rows_at(back.reshape(got.shape), place)

    def more(room: int, state: tuple[Any, Any, Tally]) -> tuple[Any, Any, Tally]:
        done, rows, tally = state
        now, some = ask(done, room)
        return done + np.int32(room), jnp.where(beside(now, some), some, rows), tally.after(now)

    now, rows = ask(np.int32(0), leg.capacity)
    tally = Tally(_count(keys != NO_KEY), np.int32(0), np.int32(0)).after(now)
    if leg.fits:
        return rows, tally
    most = fullest(ctx, route, starts)
    begin = jnp.int32(leg.capacity), rows, tally
    with jax.named_scope(OVERFLOW):
        one = sized(leg, lambda state: most - state[0], more)
        return lax.while_loop(lambda state: state[0] < most, one, begin)[1:]


def sized(leg: Leg, left: Callable[[Any], Any], more: Callable[[int, Any], Any]) -> Callable[[Any], Any]:
    """A round with full room, or with little where no bucket has more keys left than that.

    Arguments:
      left: the most keys that are left in any bucket of any device, of the state.
      more: a round, of its room and the state.
    """
    full = partial(more, leg.capacity)
    if leg.spill == leg.capacity:
        return full
    small = partial(more, leg.spill)
    return lambda state: lax.cond(left(state) > leg.spill, full, small, state)


def fullest(ctx: Local, route: Route, starts: Any) -> Any:
    """How many keys the fullest bucket of any device has."""
    return ctx.maximum(jnp.max(starts[1:] - starts[:-1]), axes_of(route))


def axes_of(route: Route) -> tuple[int, ...]:
    """The axes along which something travels."""
    return tuple(leg.axis for leg in legs(route))


def lookup_talks(route: Route, row_bytes: float, keys: Hashable = None) -> Iterable[Talk]:
    """The collectives of the first round of `lookup`: operand 0 is the table, operand 1 the keys.

    Arguments:
      row_bytes: of one row of the shard as it travels.
      keys: how the keys come from operand 1 alone: lookups of the same keys in tables that lie alike share
        what is sent of them. None if they come from something else too.
    """
    for leg in legs(route):
        yield from _asked(route, leg, keys)
        why = f"rows of {route.rows.size} travel to the devices that look them up"
        yield _exchange(leg, row_bytes, 0, why)


def deliver_talks(route: Route, row_bytes: float, keys: Hashable = None) -> Iterable[Talk]:
    """The collectives of the first round of `deliver`: operand 1 is the keys, operand 2 the rows.

    Arguments:
      row_bytes: of one row of the shard as it travels.
      keys: as of `lookup_talks`.
    """
    for leg in legs(route):
        yield from _asked(route, leg, keys)
        why = f"sums by key travel to the devices that own the {route.rows.size} rows"
        yield _exchange(leg, row_bytes, 2, why)


def _asked(route: Route, leg: Leg, keys: Hashable) -> Iterable[Talk]:
    """What is sent of the keys: the same for lookups and deliveries of the same keys."""
    size = route.rows.size
    one, two = (None if keys is None else (what, keys, size, leg) for what in ("rounds", "keys"))
    if not leg.fits:
        why = f"the fullest bucket of keys of {size} rows says how many rounds follow"
        yield _agreement(route, why, one)
    yield _exchange(leg, KEY_BYTES, 1, f"keys of {size} rows travel to the devices that own the rows", two)


def _exchange(leg: Leg, each: float, operand: int, why: str, sent: Hashable = None) -> Talk:
    wire_bytes = (leg.group - 1) * leg.capacity * each
    return Talk("all_to_all", (leg.axis,), wire_bytes, operand, f"{why}; dim 0 is split over {{axes}}", sent)


def _agreement(route: Route, why: str, sent: Hashable = None) -> Talk:
    axes = axes_of(route)
    group = math.prod(route.rows.hierarchy[a] for a in axes)
    wire_bytes = 2 * (group - 1) / group * KEY_BYTES
    return Talk("all_reduce", axes, wire_bytes, 1, f"{why}; dim 0 is split over {{axes}}", sent)
