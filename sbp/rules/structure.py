"""Ops without arithmetic of their own that are not element-wise."""

from __future__ import annotations

from typing import Any

from jax import lax

from sbp.rules.factors import factors, same_dims
from sbp.rules.local import Local
from sbp.rules.registry import Op, Row, rule


@rule("create_token", note="no tensor")
def nothing(op: Op) -> list[Row]:
    """No tensor to split."""
    return []


def _as_it_is(_: Local, *args: Any) -> list[Any]:
    return list(args)


@rule("device_put", local=_as_it_is, fused=True, flops=lambda op: 0.0, note="the placement decides")
def device_put(op: Op) -> list[Row]:
    """Nothing happens: what was placed by hand lies as the plan says."""
    if len(op.shapes) > 1:
        return []
    operands, results = same_dims(op)
    return factors(op, operands, results, additive=(0,), increasing=(0,))


@rule("rng_bit_generator", note="every device makes the whole")
def generator(op: Op) -> list[Row]:
    """The order of the numbers is the algorithm's own."""
    return []


def _on_the_first(ctx: Local, *args: Any) -> list[Any]:
    """Speaks once: on the first device, which has the whole operands as every other."""
    first = ctx.first(range(len(ctx.coords)))

    def speak() -> None:
        ctx.bind(*args)

    lax.cond(first, speak, lambda: None)
    return []


@rule("debug_print", "debug_callback", local=_on_the_first, note="runs on the first device only")
def debug(op: Op) -> list[Row]:
    """The host sees whole tensors, once."""
    return []
