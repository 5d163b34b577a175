"""Reductions and cumulative ops.

Ops along one dim in its order: cumulative ops, arg-extrema, sorting and the largest elements.

The bodies of those that work along a split dim are in sbp/communication/ordered.py.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from sbp.communication import ordered
from sbp.communication.bits import identity_of
from sbp.communication.protocol import Context
from sbp.rules.entry import Op, Row
from sbp.rules.factors import Letters, additive_row, factors
from sbp.rules.registry import rule
from sbp.signature import B, Partial, Split

OF_BOOLEANS = {"and": "min", "or": "max"}
"""The same reductions of booleans."""


def _operand_flops(op: Op) -> float:
    return float(sum(math.prod(s) for s in op.shapes))


def _letters(op: Op, axes: tuple[int, ...]) -> tuple[Letters, Letters]:
    operand = tuple(f"r{d}" if d in axes else f"d{d}" for d in range(len(op.shapes[0])))
    return operand, tuple(name for name in operand if name.startswith("d"))


def _reduced(operand: Letters, how: str) -> dict[str, str]:
    return {name: how for name in operand if name is not None and name[0] == "r"}


def _masked(ctx: Context, x: jax.Array) -> list[jax.Array]:
    """Padding of a reduced dim becomes the reduction's identity."""
    fill = identity_of(ctx.primitive.name.removeprefix("reduce_"), x.dtype)
    return ctx.bind(ctx.mask(x, ctx.operands[0], ctx.params["axes"], fill))


@rule("reduce_sum", body=_masked, layout=True, flops=_operand_flops)
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
    body=_masked,
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


def _along(op: Op, dim: int) -> tuple[list[Letters], list[Letters]]:
    """Letters of an op that keeps shapes and needs `dim` whole."""

    def names(shape: tuple[int, ...]) -> Letters:
        return tuple(None if d == dim else f"d{d}" for d in range(len(shape)))

    return [names(s) for s in op.shapes], [names(s) for s in op.results]


def _cumulative_rows(op: Op) -> list[Row]:
    """Every dim; the accumulated one with a carry."""
    dim = op.params["axis"]
    operands, results = _along(op, dim)
    carried = [Row((Split(dim),), (Split(dim),))] if op.shapes[0][dim] > 1 else []
    return [*factors(op, operands, results), *carried]


@rule("cumsum", body=ordered.cumulative_local, communication=ordered.cumulative_communication)
def cumsum(op: Op) -> list[Row]:
    """Every dim, the accumulated one with a carry; additive."""
    return [*_cumulative_rows(op), additive_row(1, 1, (0,))]


@rule(
    "cumprod", "cumlogsumexp", body=ordered.cumulative_local, communication=ordered.cumulative_communication
)
def cumulative(op: Op) -> list[Row]:
    """Every dim, the accumulated one with a carry."""
    return _cumulative_rows(op)


@rule("cummax", "cummin", body=ordered.cumulative_local, communication=ordered.cumulative_communication)
def cumulative_extremum(op: Op) -> list[Row]:
    """Every dim, the accumulated one with a carry; maxima of maxima pass."""
    same = Partial(op.name.removeprefix("cum"))
    return [*_cumulative_rows(op), Row((same,), (same,))]


@rule(
    "argmax", "argmin", flops=_operand_flops, body=ordered.arg_local, communication=ordered.arg_communication
)
def arg_extremum(op: Op) -> list[Row]:
    """Every dim; the searched one with a comparison of what the devices found."""
    (dim,) = op.params["axes"]
    names = tuple(None if d == dim else f"d{d}" for d in range(len(op.shapes[0])))
    rows = factors(op, [names], [tuple(n for n in names if n is not None)])
    enough = np.iinfo(op.params["index_dtype"]).max > op.shapes[0][dim]
    if enough and op.shapes[0][dim] > 1 and not jnp.issubdtype(op.dtypes[0], jnp.complexfloating):
        rows.append(Row((Split(dim),), (B,)))
    return rows


@rule("sort", note="the sorted dim is whole", flops=lambda op: 16 * _operand_flops(op))
def sort(op: Op) -> list[Row]:
    """The sorted dim must be whole; every operand is split alike."""
    operands, results = _along(op, op.params["dimension"])
    return factors(op, operands, results)


def _top_rows(op: Op, dim: int) -> list[Row]:
    """Every dim; the searched one if it divides, and each device has more than k rows of it."""
    size, k = op.shapes[0][dim], op.params["k"]
    operands, results = _along(op, dim)
    rows = factors(op, operands, results)
    if size % op.group == 0 and 0 < k < size // op.group:
        rows.append(Row((Split(dim),), (B, B)))
    return rows


@rule(
    "top_k",
    flops=lambda op: 16 * _operand_flops(op),
    body=ordered.top_k_local,
    communication=ordered.top_k_communication,
)
def top_k(op: Op) -> list[Row]:
    """Every dim; the searched one, if each device has k rows, with a comparison of what the devices found."""
    return _top_rows(op, ordered.top_dim(op.params, len(op.shapes[0])))


@rule(
    "approx_top_k",
    flops=lambda op: 16 * _operand_flops(op),
    body=ordered.approx_local,
    communication=ordered.approx_communication,
)
def approx_top_k(op: Op) -> list[Row]:
    """Every dim; the searched one, if each device has k rows and k are asked for, with a comparison."""
    dim = ordered.approx_dim(op.params, len(op.shapes[0]))
    if op.params["aggregate_to_topk"]:
        # Where NaN stands in an approximate order depends on how many numbers it is among.
        return [replace(row, finite_only=row.operands == (Split(dim),)) for row in _top_rows(op, dim)]
    return factors(op, *_along(op, dim))
