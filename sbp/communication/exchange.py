"""The sparse exchange: rows of a table that is split by its dim 0, to and from the devices that ask by key.

Each device has keys; the device that has a key's row is its owner. Keys go to their owners by all-to-all,
rows come back by all-to-all (`fetch_rows`), or go with the keys (`deliver_rows`). Equal keys of a device
travel once. Shards are contiguous and in the order of the keys, so sorted keys lie in one bucket per owner. A
table that several axes split is reached axis by axis, outer to inner, and equal keys are merged on the way.

Shapes are static: in one round a device sends at most `capacity` keys to each owner. A fuller bucket takes
more rounds, in a loop that runs until no device has a key left, so that no skew loses one. The plan counts
the first round; how many more there are depends on the data. An example: docs/communication.md.

All devices must run a collective equally often. So the number of rounds is never decided by a device's own
keys: it comes from the fullest bucket of any device, a number that all of them have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp.communication.joint import Sending, agreement, run_alone, to_owners
from sbp.communication.keys import NO_KEY, Buckets, count_of, local_rows, make_buckets, per_row, take_rows
from sbp.communication.legs import Exchange, Leg, exchange_axes, legs
from sbp.communication.protocol import Context
from sbp.communication.wire import send_rows
from sbp.compat.untyped import Position

# What the rounds after the first are called in the names of compiled instructions.
OVERFLOW = "overflow_rounds"

ZERO = np.int32(0)

State = TypeVar("State")

# Gives the rows of a shard by their numbers.
Serve: TypeAlias = Callable[[jax.Array], jax.Array]


class Tally(NamedTuple):
    """What an exchange has done on one device.

    Arguments:
      given_keys, served_keys: how many keys it had, and how many of them have been served.
      rounds: in how many rounds.
      fills: how often the fullest bucket of any device would fill the capacity of the first round.
    """

    given_keys: Position
    served_keys: Position
    rounds: Position
    fills: Position

    def after(self, sent: jax.Array, inner: Position = ZERO) -> Tally:
        """The tally one round later.

        Arguments:
          sent: flags of the keys that the round has sent, [n].
          inner: how many rounds the legs behind took for it.
        """
        rounds = self.rounds + jnp.maximum(inner, np.int32(1))
        return self._replace(served_keys=self.served_keys + count_of(sent), rounds=rounds)


# In a loop of rounds: how many keys of each bucket are done, the rows, and the tally.
_Fetched: TypeAlias = tuple[jax.Array, jax.Array, Tally]

# The tally of an exchange in which no key travels: every device serves its own keys.
NOTHING_SENT = Tally(ZERO, ZERO, ZERO, ZERO)


class SentKeys(NamedTuple):
    """The keys of the first round along a leg.

    All of it comes from keys alone, and not from the table: it may be done a step ahead.

    Arguments:
      buckets: where the keys lie.
      sends, slots: which keys it sends, and where they lie in the message, [n].
      received_keys: the keys that have come to this device, [group * capacity].
      fullest: how many keys the fullest bucket of any device has; None if one round is always enough.
    """

    buckets: Buckets
    sends: jax.Array
    slots: jax.Array
    received_keys: jax.Array
    fullest: jax.Array | None

    def fills(self, leg: Leg) -> Position:
        """How often the fullest bucket would fill the capacity of a leg."""
        return np.int32(1) if self.fullest is None else lax.div(self.fullest - 1, np.int32(leg.capacity)) + 1


def send_keys(ctx: Context, exchange: Exchange, leg: Leg, keys: jax.Array) -> Sending[SentKeys]:
    """Sends the keys of the first round.

    Fetching and delivering rows of the same keys sends the same words, so XLA keeps one of the two messages.
    Where there is one leg, every message announces how many keys the fullest bucket of its sender has: that
    is a word more for each owner, and spares a reduction with its latency.
    """
    buckets = make_buckets(ctx, leg, keys)
    sends, slots = buckets.slots(leg.capacity)
    message, own_fullest = buckets.message(slots, leg.capacity), jnp.max(buckets.sizes)
    if leg.fits:
        received = yield from to_owners(ctx, message, leg.axis)
        return SentKeys(buckets, sends, slots, received.reshape(-1), None)
    if not leg.is_alone:  # only a reduction reaches the devices along the axes of the other legs
        received = yield from to_owners(ctx, message, leg.axis)
        fullest = yield from agreement(ctx, own_fullest, exchange_axes(exchange))
        return SentKeys(buckets, sends, slots, received.reshape(-1), fullest)
    announced = jnp.broadcast_to(own_fullest, (leg.group, 1))
    got = yield from to_owners(ctx, jnp.concatenate([message, announced], axis=1), leg.axis)
    return SentKeys(buckets, sends, slots, got[:, :-1].reshape(-1), jnp.max(got[:, -1]))


def fetch_rows(
    ctx: Context,
    exchange: Exchange,
    keys: jax.Array | SentKeys,
    serve: Serve,
    absent: jax.Array | None = None,
) -> Sending[jax.Array]:
    """The rows of `keys`, `[n, ...]`; zeros where there is no key.

    Along axes that do not split the keys a device gives the rows of its own shard, and zeros for the others:
    the result is a sum along them.

    Arguments:
      keys: `[n]` int32, `NO_KEY` for none; or what came of them along the first leg.
      serve: gives rows for their `local_rows`, `[m]` int32, and zeros for the shard's size.
      absent: `[n]`, what stands in the rows where there is no key; None for zero.
    """
    ahead = legs(exchange)
    if not isinstance(keys, SentKeys) and not ahead:
        ctx.report(NOTHING_SENT)
        rows = serve(local_rows(ctx, exchange, keys))
        if absent is None:
            return rows
        return jnp.where(per_row(keys != NO_KEY, rows), rows, per_row(absent, rows))
    sent = keys if isinstance(keys, SentKeys) else (yield from send_keys(ctx, exchange, ahead[0], keys))
    rows, tally = yield from _along(ctx, exchange, ahead, sent, serve, absent)
    ctx.report(tally)
    return rows


def _fetched(
    ctx: Context, exchange: Exchange, ahead: Sequence[Leg], keys: jax.Array, serve: Serve
) -> Sending[tuple[jax.Array, Tally]]:
    """The rows of `keys` along the legs ahead, and what has been done for them."""
    if not ahead:
        return serve(local_rows(ctx, exchange, keys)), NOTHING_SENT
    sent = yield from send_keys(ctx, exchange, ahead[0], keys)
    return (yield from _along(ctx, exchange, ahead, sent, serve))


def _along(
    ctx: Context,
    exchange: Exchange,
    ahead: Sequence[Leg],
    sent: SentKeys,
    serve: Serve,
    absent: jax.Array | None = None,
) -> Sending[tuple[jax.Array, Tally]]:
    """The rows of keys that were sent along the first of the legs ahead, and what has been done for them.

    An owner of the first leg fetches what it was asked for along the other legs, before it answers: a leg's
    rounds run inside each round of the leg before.
    """
    leg, inner, buckets = ahead[0], ahead[1:], sent.buckets

    def answer(received: jax.Array, capacity: int) -> Sending[tuple[jax.Array, Tally]]:
        """The rows that come back for a message, and what the legs behind have done."""
        found, behind = yield from _fetched(ctx, exchange, inner, received, serve)
        shape = leg.group, capacity, *found.shape[1:]
        back = yield from send_rows(ctx, found.reshape(shape), leg, exchange.wire_dtype)
        return back.reshape(found.shape), behind

    def next_round(capacity: int, state: _Fetched) -> _Fetched:
        done, rows, tally = state
        sends, slots = buckets.slots(capacity, done)
        received = ctx.all_to_all(buckets.message(slots, capacity), leg.axis).reshape(-1)
        found, behind = run_alone(answer(received, capacity))
        some = take_rows(found, slots)
        tally = tally.after(sends, behind.rounds)
        return done + np.int32(capacity), jnp.where(per_row(sends, some), some, rows), tally

    found, behind = yield from answer(sent.received_keys, leg.capacity)
    rows = take_rows(found, sent.slots)
    none = jnp.zeros((), rows.dtype) if absent is None else per_row(absent, rows)
    rows = jnp.where(per_row(sent.sends, rows), rows, none)
    fills = jnp.maximum(sent.fills(leg), behind.fills)
    tally = Tally(count_of(buckets.keys != NO_KEY), ZERO, ZERO, fills).after(sent.sends, behind.rounds)
    fullest = sent.fullest
    if fullest is None:
        return rows, tally
    begin = jnp.int32(leg.capacity), rows, tally
    with jax.named_scope(OVERFLOW):
        step = round_of_fitting_size(leg, lambda state: fullest - state[0], next_round)
        return lax.while_loop(lambda state: state[0] < fullest, step, begin)[1:]


def round_of_fitting_size(
    leg: Leg, left: Callable[[State], jax.Array], next_round: Callable[[int, State], State]
) -> Callable[[State], State]:
    """A later round: of full capacity, or of little where no bucket has more keys left than that.

    Arguments:
      left: of the state, the most keys that are left in any bucket of any device: the same on all devices.
      next_round: a round, of its capacity and the state.
    """
    full = partial(next_round, leg.later_capacity)
    if leg.spill_capacity == leg.later_capacity:
        return full
    small = partial(next_round, leg.spill_capacity)
    return lambda state: lax.cond(left(state) > leg.spill_capacity, full, small, state)
