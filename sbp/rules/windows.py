"""Sliding windows, and reductions by a function of the user's."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sbp.rules.factors import Letters, factors
from sbp.rules.registry import Op, Row, rule
from sbp.signature import Partial


def _still(op: Op, shape: Sequence[int], other: Sequence[int]) -> Letters:
    """A letter for every dim along which the window neither reaches nor moves; the others are whole."""
    n = len(shape)
    ones = (1,) * n
    kinds = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    per_dim = zip(*(op.params.get(k) or ones for k in kinds), strict=True)
    padding = op.params["padding"]
    return tuple(
        f"d{d}" if set(sizes) == {1} and tuple(pad) == (0, 0) and shape[d] == other[d] else None
        for d, (sizes, pad) in enumerate(zip(per_dim, padding, strict=True))
    )


def _window_flops(op: Op) -> float:
    return float(math.prod(op.params["window_dimensions"]) * sum(math.prod(s) for s in op.results))


@rule("reduce_window_sum", flops=_window_flops, note="windowed dims are whole")
def reduce_window_sum(op: Op) -> list[Row]:
    """Dims without a window; additive."""
    names = _still(op, op.shapes[0], op.results[0])
    return factors(op, [names], [names], additive=(0,))


@rule("reduce_window_max", "reduce_window_min", flops=_window_flops, note="windowed dims are whole")
def reduce_window_extremum(op: Op) -> list[Row]:
    """Dims without a window; maxima of maxima pass."""
    names = _still(op, op.shapes[0], op.results[0])
    same = Partial(op.name.removeprefix("reduce_window_"))
    return [*factors(op, [names], [names]), Row((same,), (same,))]


@rule("reduce_window", flops=_window_flops, note="windowed dims are whole")
def reduce_window(op: Op) -> list[Row]:
    """Dims without a window; the initial values are whole."""
    names = _still(op, op.shapes[0], op.results[0])
    n = len(op.results)
    rest: list[Letters] = [()] * (len(op.shapes) - n)
    return factors(op, [*[names] * n, *rest], [names] * n)


@rule("select_and_scatter_add", flops=_window_flops, note="windowed dims are whole")
def select_and_scatter_add(op: Op) -> list[Row]:
    """Dims without a window; linear in what is scattered."""
    names = _still(op, op.shapes[1], op.shapes[0])
    return factors(op, [names, names], [names], linear=(0,))


@rule("select_and_gather_add", flops=_window_flops, note="windowed dims are whole")
def select_and_gather_add(op: Op) -> list[Row]:
    """Dims without a window; linear in what is gathered."""
    names = _still(op, op.shapes[0], op.results[0])
    return factors(op, [names, names], [names], linear=(0,))


@rule("select_and_scatter", flops=_window_flops, note="windowed dims are whole")
def select_and_scatter(op: Op) -> list[Row]:
    """Dims without a window."""
    names = _still(op, op.shapes[0], op.shapes[1])
    return factors(op, [names, names, ()], [names])


@rule("reduce", flops=lambda op: float(sum(math.prod(s) for s in op.shapes)), note="reduced dims are whole")
def reduce(op: Op) -> list[Row]:
    """The dims that stay: nothing is known of the user's function."""
    n = len(op.results)
    operand = tuple(None if d in op.params["dimensions"] else f"d{d}" for d in range(len(op.shapes[0])))
    result = tuple(name for name in operand if name is not None)
    return factors(op, [*[operand] * n, *[()] * n], [result] * n)
