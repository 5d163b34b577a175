"""Delivery: rows are summed by key, and the sums go to the devices that own the keys' rows in a table.

The other half of the sparse exchange (docs/communication.md). What an owner does with a sum need not be
linear (the step of an optimizer), so it must have all rows of a key before it does it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp.communication.exchange import (
    NOTHING_SENT,
    OVERFLOW,
    ZERO,
    SentKeys,
    Tally,
    round_of_fitting_size,
    send_keys,
)
from sbp.communication.joint import Sending, run_alone
from sbp.communication.keys import NO_KEY, Buckets, count_of, local_rows, make_buckets, rank_keys, take_rows
from sbp.communication.legs import Exchange, Leg, exchange_axes, legs, split_by_outer
from sbp.communication.protocol import Context
from sbp.communication.wire import send_rows
from sbp.compat import core
from sbp.compat.untyped import DType, Position, PyTree, optimization_barrier

ApplyRows: TypeAlias = Callable[[PyTree, jax.Array, jax.Array], PyTree]

# In a loop of rounds: how many keys of each bucket are done, whether any is left, the state, and the tally.
_Delivered: TypeAlias = tuple[jax.Array, jax.Array, PyTree, Tally]


def deliver_rows(
    ctx: Context,
    exchange: Exchange,
    keys: jax.Array | SentKeys,
    rows: jax.Array,
    state: PyTree,
    apply: ApplyRows,
    additive: bool = False,
) -> Sending[PyTree]:
    """The state after the rows of all devices are summed by key and given to the owners of the keys.

    A key is given once, with the sum of all its rows, so `apply` may be any function of it. If all keys fit
    within the capacity, one round brings them, with the message of keys that `fetch_rows` sends for the
    same keys. If not, nothing of that round is applied, and a loop takes the keys below a bound that all
    devices share: a key that several of them have comes from all at once. The bound is the lowest at which
    some device has no more capacity, so each round fills that of at least one, and the loop ends.

    Arguments:
      keys: `[n]` int32, `NO_KEY` for none; or what came of them along the first leg.
      rows: `[n, ...]`. Floats of 16 bits are summed in 32 on each device.
      state: a pytree of arrays.
      apply: from state, `local_rows` `[m]` int32 and sums `[m, ...]` to state. Row numbers are in order, none
        twice; behind them stands the shard's size. It may be called with none at all.
      additive: whether `apply` may be given the addends of a row one by one, in any order.
    """
    ahead = legs(exchange)
    delivery = _Delivery(ctx, exchange, apply, additive)
    if not isinstance(keys, SentKeys) and not ahead:
        ctx.report(NOTHING_SENT)
        return delivery.apply_owned(state, keys, rows)
    sent = keys if isinstance(keys, SentKeys) else (yield from send_keys(ctx, exchange, ahead[0], keys))
    buckets = sent.buckets
    # The loop reads the rows too: without a barrier XLA computes them for each of the two.
    rows = rows if all(leg.fits for leg in ahead) else optimization_barrier(rows)
    received, sums, fills, sends = yield from delivery.in_one_round(ahead, sent, rows)
    enough = fills <= 1
    tally = Tally(count_of(buckets.keys != NO_KEY), ZERO, ZERO, fills).after(sends & enough)
    if all(leg.fits for leg in ahead):
        ctx.report(tally)
        return delivery.apply_owned(state, received, sums)
    state = delivery.apply_owned(state, jnp.where(enough, received, NO_KEY), sums)
    begin = jnp.zeros_like(buckets.sizes), jnp.logical_not(enough), state, tally
    with jax.named_scope(OVERFLOW):
        state, tally = delivery.in_rounds(ahead, buckets, rows, begin)
    ctx.report(tally)
    return state


def may_add_one_by_one(dtype: DType) -> bool:
    """Whether rows of a dtype may be added one by one; short floats lose too much.

    >>> may_add_one_by_one(np.dtype("float32")), may_add_one_by_one(np.dtype("float16"))
    (True, False)
    """
    return not jnp.issubdtype(dtype, jnp.floating) or core.itemsize(dtype) >= 4


@dataclass(frozen=True)
class _Delivery:
    """Along which exchange rows go, and how they are applied where they arrive: see `deliver_rows`."""

    ctx: Context
    exchange: Exchange
    apply: ApplyRows
    additive: bool

    def apply_owned(self, state: PyTree, keys: jax.Array, rows: jax.Array) -> PyTree:
        """The state with rows of this device's shard applied; keys of other rows count as none."""
        at = local_rows(self.ctx, self.exchange, keys)
        if self.additive:
            return self.apply(state, at, rows)
        count, size = at.shape[0], split_by_outer(self.exchange.rows, len(self.exchange.rows.axes)).local[0]
        ranks = rank_keys(at, size)[2]
        once = jnp.full(count, np.int32(size)).at[ranks].set(at, wrap_negative_indices=False)
        return self.apply(state, once, _summed(rows, ranks, count))

    def in_one_round(
        self, ahead: Sequence[Leg], sent: SentKeys, rows: jax.Array
    ) -> Sending[tuple[jax.Array, jax.Array, Position, jax.Array]]:
        """The first round along all legs; the keys were sent along the first.

        Returns the keys and sums that reach this device, how often the fullest bucket of any device would
        fill its capacity (the round brings all if that is once), and which of this device's keys it sends.
        """
        leg, inner = ahead[0], ahead[1:]
        sums = yield from self.sent_sums(leg, leg.capacity, sent.slots, rows)
        fills = sent.fills(leg)
        if not inner:
            return sent.received_keys, sums, fills, sent.sends
        again = yield from send_keys(self.ctx, self.exchange, inner[0], sent.received_keys)
        keys, sums, inner_fills, _ = yield from self.in_one_round(inner, again, sums)
        return keys, sums, jnp.maximum(fills, inner_fills), sent.sends

    def sent_sums(self, leg: Leg, capacity: int, slots: jax.Array, rows: jax.Array) -> Sending[jax.Array]:
        """The sums of rows that come to this device, [group * capacity, ...].

        Rows are added where their keys lie in the message: nothing as long as the batch is put in order.

        Arguments:
          slots: where in the message each row is added, [n]; behind it for rows that are not sent.
        """
        sums = _summed(rows, slots, leg.group * capacity)
        lines = sums.reshape(leg.group, capacity, *rows.shape[1:])
        came = yield from send_rows(self.ctx, lines, leg, self.exchange.wire_dtype)
        return came.reshape(sums.shape)

    def in_rounds(
        self, ahead: Sequence[Leg], buckets: Buckets, rows: jax.Array, begin: _Delivered
    ) -> tuple[PyTree, Tally]:
        """Rounds until no device has a key left: the state and the tally.

        Arguments:
          begin: how many keys of each bucket are done, whether anything is left, the state, and the tally.
        """
        ctx, leg = self.ctx, ahead[0]

        def next_round(capacity: int, carry: _Delivered) -> _Delivered:
            done, _, state, tally = carry
            ends, more = _bounds(ctx, self.exchange, leg, buckets, done, capacity)
            sends, slots = buckets.slots(capacity, done, ends)
            message = buckets.message(slots, capacity)
            received = ctx.all_to_all(message, leg.axis).reshape(-1)
            sums = run_alone(self.sent_sums(leg, capacity, slots, rows))
            state, inner = self.run_legs(ahead[1:], received, sums, state)
            done = done + jnp.sum(message != NO_KEY, axis=1, dtype=np.int32)
            return done, more, state, tally.after(sends, inner)

        def left(carry: _Delivered) -> jax.Array:
            return ctx.maximum(jnp.max(buckets.sizes - carry[0]), exchange_axes(self.exchange))

        step = round_of_fitting_size(leg, left, next_round)
        _, _, state, tally = lax.while_loop(lambda carry: carry[1], step, begin)
        return state, tally

    def run_legs(
        self, ahead: Sequence[Leg], keys: jax.Array, rows: jax.Array, state: PyTree
    ) -> tuple[PyTree, Position]:
        """The state after the rounds of the legs that are left, and how many there were."""
        if not ahead:
            return self.apply_owned(state, keys, rows), ZERO
        buckets = make_buckets(self.ctx, ahead[0], keys)
        begin = jnp.zeros_like(buckets.sizes), jnp.array(True), state, NOTHING_SENT
        state, tally = self.in_rounds(ahead, buckets, rows, begin)
        return state, tally.rounds


def _summed(rows: jax.Array, at: jax.Array, count: int) -> jax.Array:
    """The sums [count, ...] of rows [n, ...] by number `at`, [n]; those at `count` are dropped."""
    wide = rows.dtype if may_add_one_by_one(rows.dtype) else np.dtype(np.float32)
    # XLA would make zeros once for all sums that begin with them, and copy them for each; these it does not
    # know to be zeros. No number is below zero.
    zero = jnp.minimum(at[:1], 0).sum().astype(wide)
    sums = jnp.full((count, *rows.shape[1:]), zero)
    sums = sums.at[at].add(rows.astype(wide), mode="drop", wrap_negative_indices=False)
    return sums.astype(rows.dtype)


def _bounds(
    ctx: Context, exchange: Exchange, leg: Leg, buckets: Buckets, done: jax.Array, capacity: int
) -> tuple[jax.Array, jax.Array]:
    """Below which key of each owner a round ends, [group], and whether another follows on any device.

    A device proposes, of each owner, its first key beyond the capacity; the least proposal is the bound.
    Devices that the legs before lead to have keys of their own, and bounds: one reduction is of them all, so
    that all run equally many rounds.
    """
    beyond = (buckets.keys != NO_KEY) & (
        buckets.ranks == take_rows(done + np.int32(capacity), buckets.owners)
    )
    at = jnp.where(beyond, buckets.owners, np.int32(leg.group))
    ends = jnp.full(leg.group, NO_KEY).at[at].set(buckets.keys, mode="drop", wrap_negative_indices=False)
    own = ctx.rank(leg.before)
    every = jnp.full((ctx.group(leg.before), leg.group), NO_KEY).at[own].set(ends)
    every = ctx.minimum(every, exchange_axes(exchange))
    return every[own], jnp.any(every != NO_KEY)
