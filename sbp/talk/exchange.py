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
from sbp.limits import float_limits
from sbp.talk.legs import Leg, Route, cut, legs
from sbp.talk.local import Local, Talk

# In the place of a key where there is none: greater than every key.
NO_KEY = np.int32(np.iinfo(np.int32).max)
KEY_BYTES = 4
# In what rows may travel: floating types with exponents as large as those of float32.
WIRE_TYPES = ("bfloat16", "float32", "float64")
# What the rounds after the first are called in the names of compiled instructions.
OVERFLOW = "overflow_rounds"

NONE = np.int32(0)

Serve: TypeAlias = Callable[[Any], Any]


class Tally(NamedTuple):
    """What an exchange has done on one device.

    Arguments:
      given, served: how many keys it had, and how many of them have been served.
      rounds: in how many rounds.
      fills: how often the fullest bucket of any device would fill the room of the first round.
    """

    given: Any
    served: Any
    rounds: Any
    fills: Any

    def after(self, now: Any, inner: Any = NONE) -> Tally:
        """A round later, in which the keys at `now` were served, after `inner` rounds of the legs behind."""
        rounds = self.rounds + jnp.maximum(inner, np.int32(1))
        return self._replace(served=self.served + count_of(now), rounds=rounds)


# Of keys that do not travel.
NOTHING = Tally(NONE, NONE, NONE, NONE)


def count_of(flags: Any) -> Any:
    """How many flags are set."""
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


def ranked(keys: Any, below: int) -> tuple[Any, Any, Any]:
    """Keys in order, [n], which of them differ from the one before, and the ranks of the given ones, [n].

    Equal keys have one rank, and ranks have no gaps. One number holds key and place where it can: XLA sorts
    single numbers faster than pairs.

    Arguments:
      keys: [n] int32, none negative; those from `below` on come out as `below`.
    """
    count = keys.shape[0]
    keys = jnp.minimum(keys, np.int32(below))
    if (below + 1) * count <= 1 << 32:
        each = np.uint32(max(count, 1))
        pairs = lax.sort(keys.astype(np.uint32) * each + lax.iota(np.uint32, count), is_stable=False)
        ordered, order = (x.astype(np.int32) for x in (lax.div(pairs, each), lax.rem(pairs, each)))
    else:
        ordered, order = lax.sort((keys, lax.iota(np.int32, count)), num_keys=1)
    new = jnp.concatenate([jnp.ones(min(count, 1), bool), ordered[1:] != ordered[:-1]])
    ranks = jnp.cumsum(new, dtype=np.int32) - np.int32(1)
    back = jnp.zeros(count, np.int32).at[order].set(ranks, unique_indices=True, wrap_negative_indices=False)
    return ordered, new, back


@dataclass(frozen=True, slots=True)
class Buckets:
    """Where the keys of a device lie among those that it sends to each owner along a leg.

    Arguments:
      keys: [n], as given; no key in the place of those whose rows lie elsewhere.
      owners: [n], the position of the device that has the row.
      inside: [n], the rank among the distinct keys of that owner.
      sizes: [group], how many distinct keys each owner is asked for.
    """

    keys: Any
    owners: Any
    inside: Any
    sizes: Any

    def slots(self, room: int, done: Any = None, ends: Any = None) -> tuple[Any, Any]:
        """Which keys a round takes, [n], and where each lies in its message, [n]: behind it for others.

        Arguments:
          room: keys for each owner.
          done: how many of each owner's have been taken before, [] or [group].
          ends: keys of each owner from this one on are left for later, [group].
        """
        place, now = self.inside, self.keys != NO_KEY
        if done is not None:
            place = place - (taken(done, self.owners) if done.ndim else done)
            now = now & (place >= 0)
        if ends is not None:
            now = now & (self.keys < taken(ends, self.owners))
        now = now & (place < room)
        return now, jnp.where(now, self.owners * np.int32(room) + place, np.int32(self.group * room))

    @property
    def group(self) -> int:
        """How many owners there are."""
        return int(self.sizes.shape[0])

    def asked(self, slots: Any, room: int) -> Any:
        """The message of a round, [group, room]."""
        flat = jnp.full(self.group * room, NO_KEY)
        return flat.at[slots].set(self.keys, mode="drop", wrap_negative_indices=False).reshape(-1, room)


def bucketed(ctx: Local, leg: Leg, keys: Any) -> Buckets:
    """The buckets that keys make for the owners of a leg."""
    keys = within(ctx, leg.outer, keys)
    rows, chunk = leg.outer.local[0], np.int32(leg.chunk)
    at = jnp.where(keys == NO_KEY, np.int32(rows), keys - ctx.offset(leg.outer, 0))
    ordered, new, ranks = ranked(at, rows)
    receivers = jnp.where(new & (ordered < rows), lax.div(ordered, chunk), np.int32(leg.group))
    sizes = jnp.zeros(leg.group, np.int32).at[receivers].add(1, mode="drop", wrap_negative_indices=False)
    owners = jnp.minimum(lax.div(at, chunk), np.int32(leg.group - 1))
    starts = jnp.cumsum(sizes, dtype=np.int32) - sizes
    return Buckets(keys, owners, ranks - taken(starts, owners), sizes)


class First(NamedTuple):
    """The first round along a leg.

    Arguments:
      now, slots: which keys it takes, and where they lie in the message, [n].
      came: the keys that have come to this device, [group * capacity].
      most: how many keys the fullest bucket of any device has; None if one round is always enough.
    """

    now: Any
    slots: Any
    came: Any
    most: Any

    def fills(self, leg: Leg) -> Any:
        """How often the fullest bucket would fill the room."""
        return np.int32(1) if self.most is None else lax.div(self.most - 1, np.int32(leg.capacity)) + 1


def first_round(ctx: Local, route: Route, leg: Leg, buckets: Buckets) -> First:
    """Sends the keys of the first round: lookups and deliveries of the same keys do it in the same words.

    Where there is one leg, every message brings along how many keys the fullest bucket of its sender has.
    """
    now, slots = buckets.slots(leg.capacity)
    asked, most = buckets.asked(slots, leg.capacity), jnp.max(buckets.sizes)
    if leg.fits:
        return First(now, slots, ctx.all_to_all(asked, leg.axis).reshape(-1), None)
    if not leg.alone:
        came = ctx.all_to_all(asked, leg.axis).reshape(-1)
        return First(now, slots, came, ctx.maximum(most, axes_of(route)))
    told = jnp.concatenate([asked, jnp.broadcast_to(most, (leg.group, 1))], axis=1)
    got = ctx.all_to_all(told, leg.axis)
    return First(now, slots, got[:, :-1].reshape(-1), jnp.max(got[:, -1]))


def beside(flags: Any, rows: Any) -> Any:
    """Flags of rows, shaped to select among them."""
    return flags.reshape(flags.shape + (1,) * (rows.ndim - flags.ndim))


def wire_type(dtype: Any, wire: str | None) -> Any:
    """The dtype in which rows travel: narrower ones only, and of floating rows only."""
    if wire is None or not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    narrow = jnp.dtype(wire)
    return narrow if compat.itemsize(narrow) < compat.itemsize(dtype) else dtype


def overflows(dtype: Any, wire: str | None) -> bool:
    """Whether numbers of a dtype can be too large for the one in which they travel.

    >>> overflows(np.dtype("float32"), "bfloat16"), overflows(np.dtype("float64"), "bfloat16")
    (False, True)
    """
    narrow = wire_type(dtype, wire)
    return bool(narrow != dtype and float_limits(narrow).maxexp < float_limits(dtype).maxexp)


def travel(ctx: Local, rows: Any, leg: Leg, wire: str | None) -> Any:
    """Row i to the device at position i. Short floats travel as integers: XLA would widen them on CPU."""
    sent = rows.astype(wire_type(rows.dtype, wire))
    dtype, size = sent.dtype, compat.itemsize(sent.dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or size not in (1, 2):
        return ctx.all_to_all(sent, leg.axis).astype(rows.dtype)
    bits = lax.bitcast_convert_type(sent, np.dtype(f"uint{8 * int(size)}"))
    return lax.bitcast_convert_type(ctx.all_to_all(bits, leg.axis), dtype).astype(rows.dtype)


def lookup(ctx: Local, route: Route, keys: Any, serve: Serve, absent: Any = None) -> Any:
    """The rows of `keys`, `[n, ...]`; zeros where there is no key, or where the row is not along the route.

    Arguments:
      keys: `[n]` int32, `NO_KEY` for none.
      serve: gives rows for their places in this device's shard, `[m]` int32, and zeros for the shard's size.
      absent: `[n]`, what stands in the rows where there is no key; None for zero.
    """
    ahead = legs(route)
    if not ahead:
        ctx.report(NOTHING)
        rows = serve(places(ctx, route, keys))
        return rows if absent is None else jnp.where(beside(keys != NO_KEY, rows), rows, beside(absent, rows))
    rows, tally = _looked_up(ctx, route, ahead, keys, serve, absent)
    ctx.report(tally)
    return rows


def _looked_up(
    ctx: Local, route: Route, ahead: Sequence[Leg], keys: Any, serve: Serve, absent: Any = None
) -> tuple[Any, Tally]:
    if not ahead:
        return serve(places(ctx, route, keys)), NOTHING
    leg, inner = ahead[0], ahead[1:]
    buckets = bucketed(ctx, leg, keys)

    def answered(came: Any, room: int) -> tuple[Any, Tally]:
        """The rows that come back for a message, and what the legs behind have done."""
        got, tally = _looked_up(ctx, route, inner, came, serve)
        back = travel(ctx, got.reshape(leg.group, room, *got.shape[1:]), leg, route.wire_dtype)
        return back.reshape(got.shape), tally

    def more(room: int, state: tuple[Any, Any, Tally]) -> tuple[Any, Any, Tally]:
        done, rows, tally = state
        now, slots = buckets.slots(room, done)
        came = ctx.all_to_all(buckets.asked(slots, room), leg.axis).reshape(-1)
        found, behind = answered(came, room)
        some = taken(found, slots)
        tally = tally.after(now, behind.rounds)
        return done + np.int32(room), jnp.where(beside(now, some), some, rows), tally

    first = first_round(ctx, route, leg, buckets)
    found, behind = answered(first.came, leg.capacity)
    rows = taken(found, first.slots)
    none = jnp.zeros((), rows.dtype) if absent is None else beside(absent, rows)
    rows = jnp.where(beside(first.now, rows), rows, none)
    fills = jnp.maximum(first.fills(leg), behind.fills)
    tally = Tally(count_of(buckets.keys != NO_KEY), NONE, NONE, fills).after(first.now, behind.rounds)
    if leg.fits:
        return rows, tally
    begin = jnp.int32(leg.capacity), rows, tally
    with jax.named_scope(OVERFLOW):
        one = sized(leg, lambda state: first.most - state[0], more)
        return lax.while_loop(lambda state: state[0] < first.most, one, begin)[1:]


def sized(leg: Leg, left: Callable[[Any], Any], more: Callable[[int, Any], Any]) -> Callable[[Any], Any]:
    """A round with full room, or with little where no bucket has more keys left than that.

    Arguments:
      left: the most keys that are left in any bucket of any device, of the state.
      more: a round, of its room and the state.
    """
    full = partial(more, leg.later)
    if leg.spill == leg.later:
        return full
    small = partial(more, leg.spill)
    return lambda state: lax.cond(left(state) > leg.spill, full, small, state)


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
    if not leg.fits and not leg.alone:
        why = f"the fullest bucket of keys of {size} rows says how many rounds follow"
        yield _agreement(route, why, one)
    why = f"keys of {size} rows travel to the devices that own the rows"
    yield _exchange(leg, KEY_BYTES, 1, why, two, told=int(leg.alone and not leg.fits))


def _exchange(leg: Leg, each: float, operand: int, why: str, sent: Hashable = None, told: int = 0) -> Talk:
    wire_bytes = (leg.group - 1) * (leg.capacity + told) * each
    return Talk("all_to_all", (leg.axis,), wire_bytes, operand, f"{why}; dim 0 is split over {{axes}}", sent)


def _agreement(route: Route, why: str, sent: Hashable = None) -> Talk:
    axes = axes_of(route)
    group = math.prod(route.rows.hierarchy[a] for a in axes)
    wire_bytes = 2 * (group - 1) / group * KEY_BYTES
    return Talk("all_reduce", axes, wire_bytes, 1, f"{why}; dim 0 is split over {{axes}}", sent)
