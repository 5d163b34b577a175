"""Keys of a sparse exchange: the numbers of rows of a table, in order, and in one bucket per owner.

Shards are contiguous, so the owner of a key is a division, and sorted keys lie owner by owner. One sort finds
equal keys, the buckets, and the order to come back in. docs/communication.md has an example.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp.communication.legs import Exchange, Leg, split_by_outer
from sbp.communication.protocol import Context
from sbp.layout import Layout

# In the place of a key where there is none: greater than every key, so that it sorts behind them and is out
# of bounds wherever it is used as an index.
NO_KEY = np.int32(np.iinfo(np.int32).max)
KEY_BYTES = 4


def count_of(flags: jax.Array) -> jax.Array:
    """How many flags are set, int32."""
    return jnp.sum(flags, dtype=np.int32)


def per_row(flags: jax.Array, rows: jax.Array) -> jax.Array:
    """Flags `[n]` of rows `[n, ...]`, shaped to select among them."""
    return flags.reshape(flags.shape + (1,) * (rows.ndim - flags.ndim))


def local_rows(ctx: Context, exchange: Exchange, keys: jax.Array) -> jax.Array:
    """The numbers of keys' rows in this device's shard; the shard's size for rows that other devices own."""
    layout = split_by_outer(exchange.rows, len(exchange.rows.axes))
    at = keys - ctx.offset(layout, 0)
    return jnp.where((at >= 0) & (at < ctx.length(layout, 0)), at, np.int32(layout.local[0]))


def owned_here(ctx: Context, layout: Layout, keys: jax.Array) -> jax.Array:
    """The keys whose rows this device has under `layout`; `NO_KEY` in the place of others."""
    at = keys - ctx.offset(layout, 0)
    return jnp.where((at >= 0) & (at < ctx.length(layout, 0)), keys, NO_KEY)


def rows_or_zeros(x: jax.Array, at: jax.Array) -> jax.Array:
    """The rows of a shard by their `local_rows`; zeros for the shard's size."""
    return x.at[at].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def take_rows(x: jax.Array, at: jax.Array) -> jax.Array:
    """The rows of `x` by number, none of which is negative; the last one for numbers beyond, to be masked."""
    return x.at[at].get(mode="clip", wrap_negative_indices=False)


def rank_keys(keys: jax.Array, below: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys in order, [n], which of them differ from the one before, and the ranks of the given ones, [n].

    Equal keys have one rank, and ranks have no gaps. One number holds key and place where it can: XLA sorts
    single numbers faster than pairs.

    Arguments:
      keys: [n] int32, none negative; those from `below` on come out as `below`.

    >>> ordered, new, ranks = rank_keys(jnp.array([7, 2, 7, 9]), 9)
    >>> ordered.tolist(), new.tolist(), ranks.tolist()
    ([2, 7, 7, 9], [True, True, False, True], [1, 0, 1, 2])
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


class Buckets(NamedTuple):
    """Where the keys of a device lie among those that it sends to each owner along a leg.

    Arguments:
      keys: [n], as given; `NO_KEY` in the place of those whose rows are not among the group's.
      owners: [n], the position of the device that has the row.
      ranks: [n], the rank among the distinct keys of that owner: equal keys have one, and travel once.
      sizes: [group], how many distinct keys each owner is asked for.
    """

    keys: jax.Array
    owners: jax.Array
    ranks: jax.Array
    sizes: jax.Array

    def slots(
        self, capacity: int, done: jax.Array | None = None, ends: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Which keys a round sends, [n], and where each lies in the message, [n]: behind it for others.

        Arguments:
          capacity: keys for each owner.
          done: how many of each owner's have been sent before, [] or [group].
          ends: keys of each owner from this one on are left for later, [group].
        """
        place, sends = self.ranks, self.keys != NO_KEY
        if done is not None:
            place = place - (take_rows(done, self.owners) if done.ndim else done)
            sends = sends & (place >= 0)
        if ends is not None:
            sends = sends & (self.keys < take_rows(ends, self.owners))
        sends = sends & (place < capacity)
        behind = np.int32(self.group * capacity)
        return sends, jnp.where(sends, self.owners * np.int32(capacity) + place, behind)

    @property
    def group(self) -> int:
        """How many owners there are."""
        return int(self.sizes.shape[0])

    def message(self, slots: jax.Array, capacity: int) -> jax.Array:
        """The keys of a round, [group, capacity]: line i is for owner i."""
        flat = jnp.full(self.group * capacity, NO_KEY)
        placed = flat.at[slots].set(self.keys, mode="drop", wrap_negative_indices=False)
        return placed.reshape(-1, capacity)


def make_buckets(ctx: Context, leg: Leg, keys: jax.Array) -> Buckets:
    """The buckets that keys make for the owners of a leg."""
    keys = owned_here(ctx, leg.outer, keys)
    rows, chunk = leg.outer.local[0], np.int32(leg.chunk)
    at = jnp.where(keys == NO_KEY, np.int32(rows), keys - ctx.offset(leg.outer, 0))
    ordered, new, ranks = rank_keys(at, rows)
    receivers = jnp.where(new & (ordered < rows), lax.div(ordered, chunk), np.int32(leg.group))
    sizes = jnp.zeros(leg.group, np.int32).at[receivers].add(1, mode="drop", wrap_negative_indices=False)
    owners = jnp.minimum(lax.div(at, chunk), np.int32(leg.group - 1))
    starts = jnp.cumsum(sizes, dtype=np.int32) - sizes
    return Buckets(keys, owners, ranks - take_rows(starts, owners), sizes)
