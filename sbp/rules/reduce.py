"""Reductions and cumulative ops."""

from __future__ import annotations

import math

import jax

from sbp.communication.dtype_limits import identity_of
from sbp.communication.protocol import Local
from sbp.rules.entry import Op, Row
from sbp.rules.factors import Letters, factors
from sbp.rules.registry import rule
from sbp.signature import Partial

OF_BOOLEANS = {"and": "min", "or": "max"}
"""The same reductions of booleans."""


def _operand_flops(op: Op) -> float:
    return float(sum(math.prod(s) for s in op.shapes))


def _letters(op: Op, axes: tuple[int, ...]) -> tuple[Letters, Letters]:
    operand = tuple(f"r{d}" if d in axes else f"d{d}" for d in range(len(op.shapes[0])))
    return operand, tuple(name for name in operand if name.startswith("d"))


def _reduced(operand: Letters, how: str) -> dict[str, str]:
    return {name: how for name in operand if name is not None and name[0] == "r"}


def _masked(ctx: Local, x: jax.Array) -> list[jax.Array]:
    """Padding of a reduced dim becomes the reduction's identity."""
    how = ctx.primitive.name.removeprefix("reduce_")
    fill = identity_of(how, x.dtype)
    return ctx.bind(ctx.mask(x, ctx.operands[0], ctx.params["axes"], fill))


@rule("reduce_sum", local=_masked, layout=True, flops=_operand_flops)
def reduce_sum(op: Op) -> list[Row]:
    """A split reduced dim leaves a sum; additive."""
    operand, result = _letters(op, op.params["axes"])
    return factors(op, [operand], [result], reduced=_reduced(operand, "sum"), additive=(0,))


@rule(
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_and",
    "reduce_or",
    "reduce_xor",
    local=_masked,
    flops=_operand_flops,
)
def reduce_joined(op: Op) -> list[Row]:
    """A split reduced dim leaves what is still to be reduced alike; that of all passes, but of no other kind.

    Of booleans, "and" is the minimum and "or" the maximum, which more ops let pass.
    """
    operand, result = _letters(op, op.params["axes"])
    how = op.name.removeprefix("reduce_")
    how = OF_BOOLEANS.get(how, how) if op.dtypes[0] == bool else how
    same = Partial(how)
    return [*factors(op, [operand], [result], reduced=_reduced(operand, how)), Row((same,), (same,))]
