"""Rows that are added to a table that is split by its dim 0: by key, to the devices that own them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import compat
from sbp.talk.exchange import (
    NO_KEY,
    NONE,
    NOTHING,
    OVERFLOW,
    Buckets,
    Tally,
    axes_of,
    bucketed,
    count_of,
    first_round,
    places,
    ranked,
    sized,
    taken,
    travel,
)
from sbp.talk.legs import Leg, Route, cut, legs
from sbp.talk.local import Local, barrier

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
    buckets = bucketed(ctx, ahead[0], keys)
    # The loop reads the rows too: without a barrier XLA computes them for each of the two.
    rows = rows if all(leg.fits for leg in ahead) else barrier(rows)
    came, away, fills, now = given.at_once(ahead, buckets, rows)
    fits = fills <= 1
    tally = Tally(count_of(buckets.keys != NO_KEY), NONE, NONE, fills).after(now & fits)
    if all(leg.fits for leg in ahead):
        ctx.report(tally)
        return given.applied(state, came, away)
    state = given.applied(state, jnp.where(fits, came, NO_KEY), away)
    begin = jnp.zeros_like(buckets.sizes), jnp.logical_not(fits), state, tally
    with jax.named_scope(OVERFLOW):
        state, tally = given.loop(ahead, buckets, rows, begin)
    ctx.report(tally)
    return state


def sums_apart(dtype: Any) -> bool:
    """Whether rows of a dtype may be added one by one; short floats lose too much."""
    return not jnp.issubdtype(dtype, jnp.floating) or compat.itemsize(dtype) >= 4


@dataclass(frozen=True)
class _Given:
    """What is delivered, and how it is applied where it arrives."""

    ctx: Local
    route: Route
    apply: Apply
    additive: bool

    def applied(self, state: Any, keys: Any, rows: Any) -> Any:
        """The state with rows of this device's shard applied; keys of other rows count as none."""
        at = places(self.ctx, self.route, keys)
        if self.additive:
            return self.apply(state, at, rows)
        count, size = at.shape[0], cut(self.route.rows, len(self.route.rows.axes)).local[0]
        ranks = ranked(at, size)[2]
        once = jnp.full(count, np.int32(size)).at[ranks].set(at, wrap_negative_indices=False)
        return self.apply(state, once, _summed(rows, ranks, count))

    def at_once(self, ahead: Sequence[Leg], buckets: Buckets, rows: Any) -> tuple[Any, Any, Any, Any]:
        """The keys and sums that reach this device in one round, how often buckets would fill it, which went.

        One round brings all if no bucket fills it more often than once.
        """
        leg, inner = ahead[0], ahead[1:]
        first = first_round(self.ctx, self.route, leg, buckets)
        came = self.moved(leg, leg.capacity, first.slots, rows)
        fills = first.fills(leg)
        if not inner:
            return first.came, came, fills, first.now
        keys, sums, others, _ = self.at_once(inner, bucketed(self.ctx, inner[0], first.came), came)
        return keys, sums, jnp.maximum(fills, others), first.now

    def moved(self, leg: Leg, room: int, slots: Any, rows: Any) -> Any:
        """The sums of rows that come to this device, [group * room, ...]; `slots` say where they are sent."""
        sums = _summed(rows, slots, leg.group * room)
        came = travel(self.ctx, sums.reshape(leg.group, room, *rows.shape[1:]), leg, self.route.wire_dtype)
        return came.reshape(sums.shape)

    def loop(self, ahead: Sequence[Leg], buckets: Buckets, rows: Any, begin: Any) -> tuple[Any, Tally]:
        """Rounds until no device has a key left: the state and the tally.

        Arguments:
          begin: how many keys of each bucket are done, whether anything is left, the state, and the tally.
        """
        ctx, leg = self.ctx, ahead[0]

        def more(room: int, carry: tuple[Any, Any, Any, Tally]) -> tuple[Any, Any, Any, Tally]:
            done, _, state, tally = carry
            ends, left = _bounds(ctx, self.route, leg, buckets, done, room)
            now, slots = buckets.slots(room, done, ends)
            asked = buckets.asked(slots, room)
            came = ctx.all_to_all(asked, leg.axis).reshape(-1)
            state, inner = self.nested(ahead[1:], came, self.moved(leg, room, slots, rows), state)
            done = done + jnp.sum(asked != NO_KEY, axis=1, dtype=np.int32)
            return done, left, state, tally.after(now, inner)

        one = sized(
            leg, lambda carry: ctx.maximum(jnp.max(buckets.sizes - carry[0]), axes_of(self.route)), more
        )
        _, _, state, tally = lax.while_loop(lambda carry: carry[1], one, begin)
        return state, tally

    def nested(self, ahead: Sequence[Leg], keys: Any, rows: Any, state: Any) -> tuple[Any, Any]:
        """The state after the rounds of the legs that are left, and how many there were."""
        if not ahead:
            return self.applied(state, keys, rows), NONE
        buckets = bucketed(self.ctx, ahead[0], keys)
        begin = jnp.zeros_like(buckets.sizes), jnp.array(True), state, NOTHING
        state, tally = self.loop(ahead, buckets, rows, begin)
        return state, tally.rounds


def _summed(rows: Any, at: Any, count: int) -> Any:
    """The sums [count, ...] of rows at places; those at `count` are dropped."""
    wide = rows.dtype if sums_apart(rows.dtype) else np.dtype(np.float32)
    sums = jnp.zeros((count, *rows.shape[1:]), wide)
    sums = sums.at[at].add(rows.astype(wide), mode="drop", wrap_negative_indices=False)
    return sums.astype(rows.dtype)


def _bounds(ctx: Local, route: Route, leg: Leg, buckets: Buckets, done: Any, room: int) -> tuple[Any, Any]:
    """Below which key of each owner a round ends, [group], and whether another follows on any device.

    Devices that the legs before lead to have keys of their own, and bounds: one reduction is of them all, so
    that all run equally many rounds.
    """
    next_ = (buckets.keys != NO_KEY) & (buckets.inside == taken(done + np.int32(room), buckets.owners))
    at = jnp.where(next_, buckets.owners, np.int32(leg.group))
    ends = jnp.full(leg.group, NO_KEY).at[at].set(buckets.keys, mode="drop", wrap_negative_indices=False)
    own = ctx.rank(leg.before)
    every = jnp.full((ctx.group(leg.before), leg.group), NO_KEY).at[own].set(ends)
    every = ctx.minimum(every, axes_of(route))
    return every[own], jnp.any(every != NO_KEY)
