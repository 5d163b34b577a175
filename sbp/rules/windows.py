"""Sliding windows, and reductions by a function of the user's; the bodies are in communication/windows.py."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from numpy.typing import NDArray

from sbp.communication.bits import identity_of
from sbp.communication.extents import Extent
from sbp.communication.halo import halos_pay
from sbp.communication.protocol import Context
from sbp.communication.windows import (
    never_selected,
    scatter_along,
    window_communication,
    window_moves,
    window_scatter_communication,
    window_scatter_local,
    window_slide,
    with_halos,
)
from sbp.rules.entry import Op, Row
from sbp.rules.factors import Letters, factors
from sbp.rules.registry import rule
from sbp.signature import B, Partial, Split


def _still(op: Op) -> Letters:
    """A letter for every dim along which the window neither reaches nor moves."""
    return tuple(None if window_moves(op.params, d) else f"d{d}" for d in range(len(op.shapes[0])))


def _window_flops(op: Op) -> float:
    return float(math.prod(op.params["window_dimensions"]) * sum(math.prod(s) for s in op.results))


def _moving(op: Op) -> Iterator[tuple[int, Extent, Extent]]:
    """The dims along which windows move and that may be split: of the operands, and of the results."""
    for d, (n, m) in enumerate(zip(op.shapes[0], op.results[0], strict=True)):
        if window_moves(op.params, d) and min(n, m) > 1:
            yield d, Extent(n, (0,), (op.group,)), Extent(m, (0,), (op.group,))


def _halo_rows(op: Op, windowed: int) -> Iterable[Row]:
    """The first `windowed` operands and the results split alike, the halos exchanged."""
    others = (B,) * (len(op.shapes) - windowed)
    for d, base, out in _moving(op):
        found = window_slide(op.params, d, base, out)
        if found is not None and halos_pay([found.halo]):
            yield Row((*[Split(d)] * windowed, *others), (Split(d),) * len(op.results))


def _ignored(ctx: Context, x: jax.Array) -> NDArray[Any]:
    """What a maximum or minimum ignores."""
    return identity_of(ctx.primitive.name.removeprefix("reduce_window_"), x.dtype)


HALOS = "windowed dims with an exchange of halos"


@rule(
    "reduce_window_sum",
    body=with_halos(lambda ctx, x: [None]),
    communication=window_communication,
    flops=_window_flops,
    note=HALOS,
)
def reduce_window_sum(op: Op) -> list[Row]:
    """Every dim; additive."""
    names = _still(op)
    return [*factors(op, [names], [names], additive=(0,)), *_halo_rows(op, 1)]


@rule(
    "reduce_window_max",
    "reduce_window_min",
    body=with_halos(lambda ctx, x: [_ignored(ctx, x)]),
    communication=window_communication,
    flops=_window_flops,
    note=HALOS,
)
def reduce_window_extremum(op: Op) -> list[Row]:
    """Every dim; maxima of maxima pass."""
    names = _still(op)
    same = Partial(op.name.removeprefix("reduce_window_"))
    return [*factors(op, [names], [names]), Row((same,), (same,)), *_halo_rows(op, 1)]


@rule(
    "reduce_window",
    body=with_halos(lambda ctx, *args: args[len(args) // 2 :]),
    communication=window_communication,
    flops=_window_flops,
    functions=("jaxpr",),
    note=HALOS,
)
def reduce_window(op: Op) -> list[Row]:
    """Every dim; the initial values are whole."""
    names = _still(op)
    n = len(op.results)
    rest: list[Letters] = [()] * (len(op.shapes) - n)
    return [*factors(op, [*[names] * n, *rest], [names] * n), *_halo_rows(op, n)]


@rule(
    "select_and_gather_add",
    body=with_halos(lambda ctx, tangents, x: [None, never_selected(ctx, x)]),
    communication=window_communication,
    flops=_window_flops,
    note=HALOS,
)
def select_and_gather_add(op: Op) -> list[Row]:
    """Every dim; additive in what is gathered."""
    names = _still(op)
    return [*factors(op, [names, names], [names], additive=(0,)), *_halo_rows(op, 2)]


@rule(
    "select_and_scatter_add",
    body=window_scatter_local,
    communication=window_scatter_communication,
    flops=_window_flops,
    note=HALOS,
)
def select_and_scatter_add(op: Op) -> list[Row]:
    """Every dim; additive in what is scattered."""
    names = _still(op)
    rows = factors(op, [names, names], [names], additive=(0,))
    for d, (m, n) in enumerate(zip(op.shapes[0], op.shapes[1], strict=True)):
        if window_moves(op.params, d) and min(m, n) > 1:
            extents = (Extent(size, (0,), (op.group,)) for size in (m, n))
            found = scatter_along(op.params, d, *extents)
            if halos_pay([found.source, found.operand]):
                rows.append(Row((Split(d), Split(d)), (Split(d),)))
    return rows


@rule(
    "select_and_scatter",
    flops=_window_flops,
    functions=("select_jaxpr", "scatter_jaxpr"),
    note="windowed dims are whole",
)
def select_and_scatter(op: Op) -> list[Row]:
    """Dims without a window."""
    names = _still(op)
    return factors(op, [names, names, ()], [names])


@rule(
    "reduce",
    flops=lambda op: float(sum(math.prod(s) for s in op.shapes)),
    functions=("computation", "jaxpr"),
    note="reduced dims are whole",
)
def reduce(op: Op) -> list[Row]:
    """The dims that stay: nothing is known of the user's function."""
    n = len(op.results)
    operand = tuple(None if d in op.params["dimensions"] else f"d{d}" for d in range(len(op.shapes[0])))
    result = tuple(name for name in operand if name is not None)
    return factors(op, [*[operand] * n, *[()] * n], [result] * n)
