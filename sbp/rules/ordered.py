"""Ops along one dim in its order: cumulative ops, arg-extrema, sorting and the largest elements.

The bodies of those that work along a split dim are in sbp/communication/ordered.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from sbp.communication import ordered
from sbp.rules.entry import Op, Row
from sbp.rules.factors import Letters, additive_row, factors
from sbp.rules.registry import rule
from sbp.signature import B, Partial, Split


def _operand_flops(op: Op) -> float:
    return float(sum(math.prod(s) for s in op.shapes))


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


@rule("cumsum", local=ordered.cumulative_local, communication=ordered.cumulative_communication)
def cumsum(op: Op) -> list[Row]:
    """Every dim, the accumulated one with a carry; additive."""
    return [*_cumulative_rows(op), additive_row(1, 1, (0,))]


@rule(
    "cumprod", "cumlogsumexp", local=ordered.cumulative_local, communication=ordered.cumulative_communication
)
def cumulative(op: Op) -> list[Row]:
    """Every dim, the accumulated one with a carry."""
    return _cumulative_rows(op)


@rule("cummax", "cummin", local=ordered.cumulative_local, communication=ordered.cumulative_communication)
def cumulative_extremum(op: Op) -> list[Row]:
    """Every dim, the accumulated one with a carry; maxima of maxima pass."""
    same = Partial(op.name.removeprefix("cum"))
    return [*_cumulative_rows(op), Row((same,), (same,))]


@rule(
    "argmax", "argmin", flops=_operand_flops, local=ordered.arg_local, communication=ordered.arg_communication
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
    local=ordered.top_k_local,
    communication=ordered.top_k_communication,
)
def top_k(op: Op) -> list[Row]:
    """Every dim; the searched one, if each device has k rows, with a comparison of what the devices found."""
    return _top_rows(op, ordered.top_dim(op.params, len(op.shapes[0])))


@rule(
    "approx_top_k",
    flops=lambda op: 16 * _operand_flops(op),
    local=ordered.approx_local,
    communication=ordered.approx_communication,
)
def approx_top_k(op: Op) -> list[Row]:
    """Every dim; the searched one, if each device has k rows and k are asked for, with a comparison."""
    dim = ordered.approx_dim(op.params, len(op.shapes[0]))
    if op.params["aggregate_to_topk"]:
        # Where NaN stands in an approximate order depends on how many numbers it is among.
        return [replace(row, finite_only=row.operands == (Split(dim),)) for row in _top_rows(op, dim)]
    return factors(op, *_along(op, dim))
