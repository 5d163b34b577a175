"""Reductions and cumulative ops."""

from __future__ import annotations

import math
from typing import Any

from sbp.rules.factors import Letters, factors
from sbp.rules.local import Local, identity_of
from sbp.rules.registry import Op, Row, rule
from sbp.signature import Partial


def _operand_flops(op: Op) -> float:
    return float(sum(math.prod(s) for s in op.shapes))


def _letters(op: Op, axes: tuple[int, ...]) -> tuple[Letters, Letters]:
    operand = tuple(f"r{d}" if d in axes else f"d{d}" for d in range(len(op.shapes[0])))
    return operand, tuple(name for name in operand if name.startswith("d"))


def _reduced(operand: Letters, how: str) -> dict[str, str]:
    return {name: how for name in operand if name is not None and name[0] == "r"}


def _masked(ctx: Local, x: Any) -> list[Any]:
    """Padding of a reduced dim becomes the reduction's identity."""
    how = ctx.primitive.name.removeprefix("reduce_")
    fill = identity_of(how, x.dtype)
    return ctx.bind(ctx.mask(x, ctx.operands[0], ctx.params["axes"], fill))


@rule("reduce_sum", local=_masked, flops=_operand_flops)
def reduce_sum(op: Op) -> list[Row]:
    """A split reduced dim leaves a sum; additive."""
    operand, result = _letters(op, op.params["axes"])
    return factors(op, [operand], [result], reduced=_reduced(operand, "sum"), additive=(0,))


@rule("reduce_max", "reduce_min", local=_masked, flops=_operand_flops)
def reduce_extremum(op: Op) -> list[Row]:
    """A split reduced dim leaves a maximum (minimum); maxima of maxima pass, minima of maxima do not."""
    operand, result = _letters(op, op.params["axes"])
    how = op.name.removeprefix("reduce_")
    same = Partial(how)
    return [*factors(op, [operand], [result], reduced=_reduced(operand, how)), Row((same,), (same,))]


@rule("reduce_prod", "reduce_and", "reduce_or", "reduce_xor", local=_masked, flops=_operand_flops)
def reduce_whole(op: Op) -> list[Row]:
    """The reduced dims must be whole: there is no partial signature for this reduction."""
    operand, result = _letters(op, op.params["axes"])
    return factors(op, [operand], [result])


@rule("argmax", "argmin", flops=_operand_flops, note="the searched dim is whole")
def arg_extremum(op: Op) -> list[Row]:
    """The searched dim must be whole."""
    operand, result = _letters(op, op.params["axes"])
    return factors(op, [operand], [result])


def _along(op: Op, dim: int) -> tuple[list[Letters], list[Letters]]:
    """Letters of an op that keeps shapes and needs `dim` whole."""

    def names(shape: tuple[int, ...]) -> Letters:
        return tuple(None if d == dim else f"d{d}" for d in range(len(shape)))

    return [names(s) for s in op.shapes], [names(s) for s in op.results]


@rule("cumsum", note="the accumulated dim is whole")
def cumsum(op: Op) -> list[Row]:
    """The accumulated dim must be whole; additive."""
    operands, results = _along(op, op.params["axis"])
    return factors(op, operands, results, additive=(0,))


@rule("cumprod", "cumlogsumexp", note="the accumulated dim is whole")
def cumulative(op: Op) -> list[Row]:
    """The accumulated dim must be whole."""
    operands, results = _along(op, op.params["axis"])
    return factors(op, operands, results)


@rule("cummax", "cummin", note="the accumulated dim is whole")
def cumulative_extremum(op: Op) -> list[Row]:
    """The accumulated dim must be whole; maxima of maxima pass."""
    operands, results = _along(op, op.params["axis"])
    same = Partial(op.name.removeprefix("cum"))
    return [*factors(op, operands, results), Row((same,), (same,))]


@rule("sort", note="the sorted dim is whole", flops=lambda op: 16 * _operand_flops(op))
def sort(op: Op) -> list[Row]:
    """The sorted dim must be whole; every operand is split alike."""
    operands, results = _along(op, op.params["dimension"])
    return factors(op, operands, results)


@rule("top_k", "approx_top_k", note="the searched dim is whole", flops=lambda op: 16 * _operand_flops(op))
def top_k(op: Op) -> list[Row]:
    """The searched dim must be whole."""
    dim = op.params.get("axis", op.params.get("reduction_dimension", -1)) % len(op.shapes[0])
    operands, results = _along(op, dim)
    return factors(op, operands, results)
