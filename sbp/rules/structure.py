"""Ops without arithmetic of their own that are not element-wise."""

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax

from sbp.communication.protocol import Communication, Context
from sbp.compat import core
from sbp.rules.entry import Op, Row
from sbp.rules.factors import factors, same_dims
from sbp.rules.registry import rule


@rule("create_token", note="no tensor")
def no_rows(op: Op) -> list[Row]:
    """No tensor to split."""
    return []


def _as_it_is(_: Context, *args: jax.Array) -> list[jax.Array]:
    return list(args)


@rule("device_put", body=_as_it_is, fused=True, flops=lambda op: 0.0, note="the placement decides")
def device_put(op: Op) -> list[Row]:
    """Nothing happens: what was placed by hand lies as the plan says."""
    return [] if len(op.shapes) > 1 else factors(op, *same_dims(op), moved=(0,))


@rule("platform_index", note="no tensor")
def platform_index(op: Op) -> list[Row]:
    """Which branch is for this platform: the same on all devices."""
    return []


def _of_the_first(ctx: Context, *args: jax.Array) -> list[jax.Array]:
    """What the first device made: the state of the numbers is each device's own."""
    (x,) = ctx.bind(*args)
    everyone = range(len(ctx.coords))
    return [ctx.total(jnp.where(ctx.is_first(everyone), x, jnp.zeros((), x.dtype)), everyone)]


def _first_communication(ctx: Context) -> Iterable[Communication]:
    (out,), hierarchy = ctx.results, ctx.operands[0].hierarchy
    group = math.prod(hierarchy)
    each = 2 * (group - 1) / group * core.itemsize(ctx.dtypes[0])
    why = "all devices over {axes} take the numbers that the first one drew"
    yield Communication("all_reduce", tuple(range(len(hierarchy))), each * math.prod(out.local), 0, why)


@rule(
    "rng_uniform",
    body=_of_the_first,
    communication=_first_communication,
    note="the first device makes the whole",
)
def rng_uniform(op: Op) -> list[Row]:
    """Numbers without a key have an order on one device only."""
    return []


@rule("rng_bit_generator", note="every device makes the whole")
def generator(op: Op) -> list[Row]:
    """The order of the numbers is the algorithm's own."""
    return []


def _on_the_first(ctx: Context, *args: jax.Array) -> list[jax.Array]:
    """Speaks once: on the first device, which has the whole operands as every other."""
    first = ctx.is_first(range(len(ctx.coords)))

    def speak() -> None:
        ctx.bind(*args)

    lax.cond(first, speak, lambda: None)
    return []


@rule(
    "debug_print",
    "debug_callback",
    body=_on_the_first,
    functions=("callback",),
    note="runs on the first device only",
)
def debug(op: Op) -> list[Row]:
    """The host sees whole tensors, once."""
    return []
