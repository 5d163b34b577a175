"""Rows that are added to a table that is split by its dim 0: by key, to the devices that own them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import compat
from sbp.rules.exchange import (
    NO_KEY,
    NOTHING,
    OVERFLOW,
    Distinct,
    Tally,
    axes_of,
    beside,
    distinct,
    fullest,
    places,
    sized,
    starts_of,
    taken,
    travel,
    windows,
    within,
)
from sbp.rules.legs import Leg, Route, cut, legs
from sbp.rules.local import Local

Apply: TypeAlias = Callable[[Any, Any, Any], Any]


def deliver(
    ctx: Local, route: Route, keys: Any, rows: Any, state: Any, apply: Apply, additive: bool = False
) -> Any:
    """The state after the rows of all devices are summed by key and given to the owners of the keys.

    A key is given once, with the sum of all its rows, so `apply` may be any function of it. If all keys fit
    in the room that there is, one round brings them, with the words that `lookup` has of the same keys. If
    not, nothing comes of that round, and a loop takes the keys below a bound that all devices share: a key
    that several of them have comes from all at once. The bound is the lowest at which some device has no more
    room, so each round fills the room of at least one.

    Arguments:
      keys: `[n]` int32, `NO_KEY` for none.
      rows: `[n, ...]`. Floats of 16 bits are summed in 32 on each device.
      state: a pytree of arrays.
      apply: from state, places in this device's shard `[m]` int32 and rows `[m, ...]` to state. Places are in
        order, no row twice; behind them stands the shard's size. It may be called with no place at all.
      additive: whether `apply` may be given the addends of a row one by one, in any order.
    """
    ahead = legs(route)
    given = _Given(ctx, route, apply, additive)
    if not ahead:
        ctx.report(NOTHING)
        return given.applied(state, keys, rows)
    buckets = given.bucketed(ahead[0], keys, rows)
    came, away, fits = given.at_once(ahead, buckets)
    total = buckets.starts[-1] - buckets.starts[0]
    if all(leg.fits for leg in ahead):
        ctx.report(Tally(total, total, np.int32(1)))
        return given.applied(state, came, away)
    state = given.applied(state, jnp.where(fits, came, NO_KEY), away)
    tally = Tally(total, jnp.where(fits, total, np.int32(0)), np.int32(1))
    begin = buckets.starts[:-1], jnp.logical_not(fits), state, tally
    with jax.named_scope(OVERFLOW):
        state, tally = given.loop(ahead, buckets, begin)
    ctx.report(tally)
    return state


def sums_apart(dtype: Any) -> bool:
    """Whether rows of a dtype may be added one by one; short floats lose too much."""
    return not jnp.issubdtype(dtype, jnp.floating) or compat.itemsize(dtype) >= 4


class _Buckets(NamedTuple):
    """Distinct keys in order, [n], the sums of their rows, and where each owner's start, [group + 1]."""

    keys: Any
    sums: Any
    starts: Any


@dataclass(frozen=True)
class _Given:
    """What is delivered, and how it is applied where it arrives."""

    ctx: Local
    route: Route
    apply: Apply
    additive: bool

    def applied(self, state: Any, keys: Any, rows: Any) -> Any:
        """The state with rows of this device's shard applied; keys of other rows count as none."""
        if self.additive:
            return self.apply(state, places(self.ctx, self.route, keys), rows)
        found = distinct(within(self.ctx, cut(self.route.rows, len(self.route.rows.axes)), keys))
        return self.apply(state, places(self.ctx, self.route, found.keys), _summed(rows, found))

    def bucketed(self, leg: Leg, keys: Any, rows: Any) -> _Buckets:
        """The buckets that keys and rows make for the owners of a leg."""
        found = distinct(within(self.ctx, leg.outer, keys))
        return _Buckets(found.keys, _summed(rows, found), starts_of(self.ctx, leg, found.keys))

    def at_once(self, ahead: Sequence[Leg], buckets: _Buckets) -> tuple[Any, Any, Any]:
        """The keys and sums that reach this device in one round, and whether that is all on every device."""
        leg, inner, starts = ahead[0], ahead[1:], buckets.starts
        window = windows(starts[:-1], leg.capacity)
        there = window < starts[1:, None]
        came = self.moved(leg, buckets, window, there)
        fits: Any = True if leg.fits else fullest(self.ctx, self.route, starts) <= leg.capacity
        if not inner:
            return *came, fits
        keys, rows, others = self.at_once(inner, self.bucketed(inner[0], *came))
        return keys, rows, fits & others

    def moved(self, leg: Leg, buckets: _Buckets, window: Any, now: Any) -> tuple[Any, Any]:
        """What devices of a leg have sent to this one: keys [m] and rows [m, ...].

        Arguments:
          window: places in the buckets, [group, room].
          now: which of them are sent.
        """
        keys, rows = taken(buckets.keys, window), taken(buckets.sums, window)
        rows = jnp.where(beside(now, rows), rows, jnp.zeros((), rows.dtype))
        got = self.ctx.all_to_all(jnp.where(now, keys, NO_KEY), leg.axis).reshape(-1)
        came = travel(self.ctx, rows, leg, self.route.wire_dtype)
        return got, came.reshape(*got.shape, *rows.shape[2:])

    def loop(self, ahead: Sequence[Leg], buckets: _Buckets, begin: Any) -> tuple[Any, Tally]:
        """Rounds until no device has a key left: the state and the tally.

        Arguments:
          begin: the next places of each bucket, whether anything is left, the state, and the tally.
        """
        ctx, leg, (keys, _, starts) = self.ctx, ahead[0], buckets

        def more(room: int, carry: tuple[Any, Any, Any, Tally]) -> tuple[Any, Any, Any, Tally]:
            at, _, state, tally = carry
            ends, left = _bounds(ctx, self.route, leg, keys, starts, at, room)
            window = windows(at, room)
            now = (window < starts[1:, None]) & (taken(keys, window) < ends[:, None])
            state = self.nested(ahead[1:], *self.moved(leg, buckets, window, now), state)
            return at + jnp.sum(now, axis=1, dtype=np.int32), left, state, tally.after(now)

        one = sized(leg, lambda carry: ctx.maximum(jnp.max(starts[1:] - carry[0]), axes_of(self.route)), more)
        _, _, state, tally = lax.while_loop(lambda carry: carry[1], one, begin)
        return state, tally

    def nested(self, ahead: Sequence[Leg], keys: Any, rows: Any, state: Any) -> Any:
        """The state after the rounds of the legs that are left."""
        if not ahead:
            return self.applied(state, keys, rows)
        buckets = self.bucketed(ahead[0], keys, rows)
        begin = buckets.starts[:-1], jnp.array(True), state, NOTHING
        return self.loop(ahead, buckets, begin)[0]


def _summed(rows: Any, found: Distinct) -> Any:
    """The sum of the rows of each distinct key."""
    wide = taken(rows, found.order).astype(rows.dtype if sums_apart(rows.dtype) else np.float32)
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
    ends = jnp.where(beyond < starts[1:], taken(keys, beyond), NO_KEY)
    own = ctx.rank(leg.before)
    every = jnp.full((ctx.group(leg.before), leg.group), NO_KEY).at[own].set(ends)
    every = ctx.minimum(every, axes_of(route))
    return every[own], jnp.any(every != NO_KEY)
