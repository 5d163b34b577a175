"""What a sparse exchange sends: the type in which rows travel, and the bytes, for the plan.

docs/communication.md has an example.
"""

import math
from collections.abc import Hashable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp.communication.joint import Sending, to_owners
from sbp.communication.keys import KEY_BYTES
from sbp.communication.legs import Exchange, Leg, exchange_axes, legs
from sbp.communication.protocol import Communication, Context
from sbp.compat import core
from sbp.compat.untyped import DType, finfo

# In what rows may travel: floating types with exponents as large as those of float32.
WIRE_TYPES = ("bfloat16", "float32", "float64")


def wire_type(dtype: DType, wire: str | None) -> DType:
    """The dtype in which rows travel: narrower ones only, and of floating rows only."""
    if wire is None or not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    narrow = jnp.dtype(wire)
    return narrow if core.itemsize(narrow) < core.itemsize(dtype) else dtype


def overflows(dtype: DType, wire: str | None) -> bool:
    """Whether numbers of a dtype can be too large for the one in which they travel.

    >>> overflows(np.dtype("float32"), "bfloat16"), overflows(np.dtype("float64"), "bfloat16")
    (False, True)
    """
    narrow = wire_type(dtype, wire)
    return bool(narrow != dtype and finfo(narrow).maxexp < finfo(dtype).maxexp)


def send_rows(ctx: Context, rows: jax.Array, leg: Leg, wire: str | None) -> Sending[jax.Array]:
    """Rows `[group, ...]`, line i to the device at position i, whose line for this one becomes line i.

    Short floats travel as integers: XLA would widen them on CPU, and send twice the bytes.
    """
    sent = rows.astype(wire_type(rows.dtype, wire))
    dtype, size = sent.dtype, core.itemsize(sent.dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or size not in (1, 2):
        received = yield from to_owners(ctx, sent, leg.axis)
        return received.astype(rows.dtype)
    bits = lax.bitcast_convert_type(sent, np.dtype(f"uint{8 * int(size)}"))
    received = yield from to_owners(ctx, bits, leg.axis)
    return lax.bitcast_convert_type(received, dtype).astype(rows.dtype)


def fetch_communication(
    exchange: Exchange, row_bytes: float, keys: Hashable = None
) -> Iterable[Communication]:
    """The collectives of the first round of `fetch_rows`: operand 0 is the table, operand 1 the keys.

    Arguments:
      row_bytes: of one row of the shard as it travels.
      keys: how the keys come from operand 1 alone: exchanges of the same keys with tables that lie alike
        share what is sent of them. None if they come from something else too.
    """
    for leg in legs(exchange):
        yield from _key_communication(exchange, leg, keys)
        why = f"rows of {exchange.rows.size} travel to the devices that look them up"
        yield _leg_communication(leg, row_bytes, 0, why)


def deliver_communication(
    exchange: Exchange, row_bytes: float, keys: Hashable = None
) -> Iterable[Communication]:
    """The collectives of the first round of `deliver_rows`: operand 1 is the keys, operand 2 the rows.

    Arguments:
      row_bytes: of one row of the shard as it travels.
      keys: how the keys come from operand 1 alone, as in `fetch_communication`; None if not from it alone.
    """
    for leg in legs(exchange):
        yield from _key_communication(exchange, leg, keys)
        why = f"sums by key travel to the devices that own the {exchange.rows.size} rows"
        yield _leg_communication(leg, row_bytes, 2, why)


def fetch_held(exchange: Exchange, row_bytes: float) -> float:
    """Bytes of rows that a device holds in `fetch_rows` beside its result: what it sends and what it has
    received along the last leg, and the result of that leg for each leg before."""
    return sum(row_bytes * leg.received_keys * (2 if leg.last else 1) for leg in legs(exchange))


def deliver_held(exchange: Exchange, row_bytes: float, additive: bool = False) -> float:
    """Bytes of rows that a device holds in `deliver_rows` beside the state and the rows that it is given.

    What it sends and what it has received; where it sums up both, also the sums of what it has received. What
    came along an earlier leg stays.

    Arguments:
      additive: whether what is received is applied as it is.
    """
    ahead = legs(exchange)
    if not ahead:
        return 0.0 if additive else row_bytes * exchange.keys
    last = 2 if additive else 3
    return sum(row_bytes * leg.received_keys * (last if leg.last else 1) for leg in ahead)


def _key_communication(exchange: Exchange, leg: Leg, keys: Hashable) -> Iterable[Communication]:
    """What is sent of the keys: the same when rows of the same keys are fetched and delivered."""
    size = exchange.rows.size
    one, two = (None if keys is None else (what, keys, size, leg) for what in ("rounds", "keys"))
    if not leg.fits and not leg.is_alone:
        why = f"the fullest bucket of keys of {size} rows says how many rounds follow"
        yield _agreement_communication(exchange, why, one)
    why = f"keys of {size} rows travel to the devices that own the rows"
    yield _leg_communication(leg, KEY_BYTES, 1, why, two, announced=int(leg.is_alone and not leg.fits))


def _leg_communication(
    leg: Leg, each: float, operand: int, why: str, sent: Hashable = None, announced: int = 0
) -> Communication:
    """The all-to-all of a leg.

    Arguments:
      each: bytes of one key or row.
      announced: how many more than the capacity go to each owner: the number that says how full buckets are.
    """
    wire_bytes = (leg.group - 1) * (leg.capacity + announced) * each
    return Communication(
        "all_to_all", (leg.axis,), wire_bytes, operand, f"{why}; dim 0 is split over {{axes}}", sent
    )


def _agreement_communication(exchange: Exchange, why: str, sent: Hashable = None) -> Communication:
    """The all-reduce of one number, by which all devices know how many rounds there are."""
    axes = exchange_axes(exchange)
    group = math.prod(exchange.rows.hierarchy[a] for a in axes)
    wire_bytes = 2 * (group - 1) / group * KEY_BYTES
    return Communication("all_reduce", axes, wire_bytes, 1, f"{why}; dim 0 is split over {{axes}}", sent)
