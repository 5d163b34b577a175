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
Apply: TypeAlias = Callable[[Any, Any, Any], Any]


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


def _taken(x: Any, at: Any) -> Any:
    """The elements of `x` at places along dim 0, of which none is negative."""
    return x.at[at].get(mode="clip", wrap_negative_indices=False)


def _within(ctx: Local, layout: Layout, keys: Any) -> Any:
    """The keys of the rows that this device has under `layout`; no key for others."""
    at = keys - ctx.offset(layout, 0)
    return jnp.where((at >= 0) & (at < ctx.length(layout, 0)), keys, NO_KEY)


@dataclass(frozen=True, slots=True)
class _Distinct:
    """Keys in order.

    Arguments:
      keys: [n], each once; behind them no key.
      order: [n], which of the given keys comes first, second, ...
      ranks: [n], where each of those is in `keys`.
    """

    keys: Any
    order: Any
    ranks: Any


def _distinct(keys: Any) -> _Distinct:
    count = keys.shape[0]
    ordered, order = lax.sort((keys, lax.iota(np.int32, count)), num_keys=1)
    new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    ranks = jnp.cumsum(new, dtype=np.int32) - np.int32(1)
    once = (
        jnp.full(count, NO_KEY).at[ranks].set(ordered, indices_are_sorted=True, wrap_negative_indices=False)
    )
    return _Distinct(once, order, ranks)


def _starts(ctx: Local, leg: Leg, keys: Any) -> Any:
    """Where the bucket of each owner starts among sorted keys, [group + 1]: the last one is where it ends."""
    first = ctx.offset(leg.outer, 0)
    bounds = first + np.arange(leg.group + 1, dtype=np.int32) * np.int32(leg.chunk)
    bounds = jnp.minimum(bounds, first + ctx.length(leg.outer, 0))
    return jnp.sum(keys[None] < bounds[:, None], axis=1, dtype=np.int32)


def _windows(starts: Any, room: int) -> Any:
    """The places [group, room] from each of [group] starts on."""
    return starts[:, None] + lax.iota(np.int32, room)


def _beside(flags: Any, rows: Any) -> Any:
    """Flags of rows, shaped to select among them."""
    return flags.reshape(flags.shape + (1,) * (rows.ndim - flags.ndim))


def wire_type(dtype: Any, wire: str | None) -> Any:
    """The dtype in which rows travel: narrower ones only, and of floating rows only."""
    if wire is None or not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    narrow = jnp.dtype(wire)
    return narrow if compat.itemsize(narrow) < compat.itemsize(dtype) else dtype


def _travel(ctx: Local, rows: Any, leg: Leg, wire: str | None) -> Any:
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
    keys = _within(ctx, leg.outer, keys)
    found = _distinct(keys)
    starts = _starts(ctx, leg, found.keys)
    slots = (
        jnp.zeros_like(keys)
        .at[found.order]
        .set(found.ranks, unique_indices=True, wrap_negative_indices=False)
    )
    owners = jnp.clip((keys - ctx.offset(leg.outer, 0)) // np.int32(leg.chunk), 0, leg.group - 1)
    inside = slots - _taken(starts, owners)

    def ask(done: Any, room: int) -> tuple[Any, Any]:
        """Which keys are answered in a round, and their rows: zeros for the others."""
        at = _windows(starts[:-1] + done, room)
        asked = jnp.where(at < starts[1:, None], _taken(found.keys, at), NO_KEY)
        got, _ = _looked_up(ctx, route, inner, ctx.all_to_all(asked, leg.axis).reshape(-1), serve)
        back = _travel(ctx, got.reshape(*asked.shape, *got.shape[1:]), leg, route.wire_dtype)
        place = inside - done
        now = (keys != NO_KEY) & (place >= 0) & (place < room)
        place = jnp.where(now, owners * np.int32(room) + place, np.int32(leg.group * room))
        return now, rows_at(back.reshape(got.shape), place)

    def more(room: int, state: tuple[Any, Any, Tally]) -> tuple[Any, Any, Tally]:
        done, rows, tally = state
        now, some = ask(done, room)
        return done + np.int32(room), jnp.where(_beside(now, some), some, rows), tally.after(now)

    now, rows = ask(np.int32(0), leg.capacity)
    tally = Tally(_count(keys != NO_KEY), np.int32(0), np.int32(0)).after(now)
    if leg.fits:
        return rows, tally
    fullest = ctx.maximum(jnp.max(starts[1:] - starts[:-1]), _axes(route))
    begin = jnp.int32(leg.capacity), rows, tally
    with jax.named_scope(OVERFLOW):
        one = _sized(leg, lambda state: fullest - state[0], more)
        return lax.while_loop(lambda state: state[0] < fullest, one, begin)[1:]


def _sized(leg: Leg, left: Callable[[Any], Any], more: Callable[[int, Any], Any]) -> Callable[[Any], Any]:
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


def deliver(ctx: Local, route: Route, keys: Any, rows: Any, state: Any, apply: Apply) -> Any:
    """The state after the rows of all devices are summed by key and given to the owners of the keys.

    A key is given once, with the sum of all its rows, so `apply` may be any function of it. A round takes the
    keys below a bound that all devices share: a key that several of them have comes from all at once. The
    bound is the lowest at which some device has no more room, so each round fills the room of at least one.

    Arguments:
      keys: `[n]` int32, `NO_KEY` for none.
      rows: `[n, ...]`. Floats of 16 bits are summed in 32 on each device.
      state: a pytree of arrays.
      apply: from state, places in this device's shard `[m]` int32 and rows `[m, ...]` to state. Places are in
        order, no row twice; behind them stands the shard's size.
    """
    state, tally = _delivered(ctx, route, legs(route), keys, rows, state, apply)
    ctx.report(tally)
    return state


def _delivered(
    ctx: Local, route: Route, ahead: Sequence[Leg], keys: Any, rows: Any, state: Any, apply: Apply
) -> tuple[Any, Tally]:
    depth = len(route.rows.axes)
    found = _distinct(_within(ctx, ahead[0].outer if ahead else cut(route.rows, depth), keys))
    sums = _summed(rows, found)
    if not ahead:
        return apply(state, places(ctx, route, found.keys), sums), NOTHING
    leg, inner = ahead[0], ahead[1:]
    starts = _starts(ctx, leg, found.keys)

    def send(at: Any, ends: Any, room: int, state: Any) -> tuple[Any, Any, Any]:
        """Sends keys below `ends`, from the places `at` on, and their rows.

        What is next, which places were sent, and the state.
        """
        window = _windows(at, room)
        some, away = (_taken(x, window) for x in (found.keys, sums))
        now = (window < starts[1:, None]) & (some < ends[:, None])
        away = jnp.where(_beside(now, away), away, jnp.zeros((), away.dtype))
        got = ctx.all_to_all(jnp.where(now, some, NO_KEY), leg.axis).reshape(-1)
        came = _travel(ctx, away, leg, route.wire_dtype).reshape(leg.group * room, *sums.shape[1:])
        state, _ = _delivered(ctx, route, inner, got, came, state, apply)
        return at + jnp.sum(now, axis=1, dtype=np.int32), now, state

    def more(room: int, carry: tuple[Any, Any, Any, Tally]) -> tuple[Any, Any, Any, Tally]:
        at, _, state, tally = carry
        ends, left = _bounds(ctx, route, leg, found.keys, starts, at, room)
        at, now, state = send(at, ends, room, state)
        return at, left, state, tally.after(now)

    tally = Tally(starts[-1] - starts[0], np.int32(0), np.int32(0))
    if leg.fits:
        _, now, state = send(starts[:-1], jnp.full(leg.group, NO_KEY), leg.capacity, state)
        return state, tally.after(now)
    first = more(leg.capacity, (starts[:-1], None, state, tally))
    with jax.named_scope(OVERFLOW):
        one = _sized(leg, lambda carry: ctx.maximum(jnp.max(starts[1:] - carry[0]), _axes(route)), more)
        return lax.while_loop(lambda carry: carry[1], one, first)[2:]


def _summed(rows: Any, found: _Distinct) -> Any:
    """The sum of the rows of each distinct key."""
    short = jnp.issubdtype(rows.dtype, jnp.floating) and compat.itemsize(rows.dtype) < 4
    wide = _taken(rows, found.order).astype(np.float32 if short else rows.dtype)
    sums = jax.ops.segment_sum(wide, found.ranks, found.keys.shape[0], indices_are_sorted=True)
    return sums.astype(rows.dtype)


def _bounds(
    ctx: Local, route: Route, leg: Leg, keys: Any, starts: Any, at: Any, room: int
) -> tuple[Any, Any]:
    """Below which key of each owner a round ends, [group], and whether another follows on any device.

    Devices that the legs before lead to have keys of their own, and bounds: one reduction is of them all, so
    that all run equally many rounds.
    """
    beyond = at + np.int32(room)
    ends = jnp.where(beyond < starts[1:], _taken(keys, beyond), NO_KEY)
    own = ctx.rank(leg.before)
    every = jnp.full((ctx.group(leg.before), leg.group), NO_KEY).at[own].set(ends)
    every = ctx.minimum(every, _axes(route))
    return every[own], jnp.any(every != NO_KEY)


def _axes(route: Route) -> tuple[int, ...]:
    """The axes along which something travels."""
    return tuple(leg.axis for leg in legs(route))


def lookup_talks(route: Route, row_bytes: float, keys: Hashable = None) -> Iterable[Talk]:
    """The collectives of the first round of `lookup`: operand 0 is the table, operand 1 the keys.

    Arguments:
      row_bytes: of one row of the shard as it travels.
      keys: how the keys come from operand 1 alone: lookups of the same keys in tables that lie alike share
        what is sent of them. None if they come from something else too.
    """
    size = route.rows.size
    for leg in legs(route):
        one, two = (None if keys is None else (what, keys, size, leg) for what in ("rounds", "keys"))
        if not leg.fits:
            why = f"the fullest bucket of keys of {size} rows says how many rounds follow"
            yield _agreement(route, 1, why, one)
        yield _exchange(
            leg, KEY_BYTES, 1, f"keys of {size} rows travel to the devices that own the rows", two
        )
        yield _exchange(leg, row_bytes, 0, f"rows of {size} travel to the devices that look them up")


def deliver_talks(route: Route, row_bytes: float) -> Iterable[Talk]:
    """The collectives of the first round of `deliver`: operand 1 is the keys, operand 2 the rows.

    Arguments:
      row_bytes: of one row of the shard as it travels.
    """
    size = route.rows.size
    for leg in legs(route):
        if not leg.fits:
            numbers = leg.group * math.prod(route.rows.hierarchy[a] for a in leg.before)
            yield _agreement(route, numbers, f"all devices send the same keys of {size} rows in one round")
        yield _exchange(leg, KEY_BYTES, 1, f"keys of {size} rows travel with what is added to the rows")
        yield _exchange(leg, row_bytes, 2, f"sums by key travel to the devices that own the {size} rows")


def _exchange(leg: Leg, each: float, operand: int, why: str, sent: Hashable = None) -> Talk:
    wire_bytes = (leg.group - 1) * leg.capacity * each
    return Talk("all_to_all", (leg.axis,), wire_bytes, operand, f"{why}; dim 0 is split over {{axes}}", sent)


def _agreement(route: Route, numbers: int, why: str, sent: Hashable = None) -> Talk:
    axes = _axes(route)
    group = math.prod(route.rows.hierarchy[a] for a in axes)
    wire_bytes = 2 * (group - 1) / group * KEY_BYTES * numbers
    return Talk("all_reduce", axes, wire_bytes, 1, f"{why}; dim 0 is split over {{axes}}", sent)
