"""Sliding windows, and reductions by a function of the user's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp.limits import identity_of
from sbp.rules.entry import Op, Row
from sbp.rules.factors import Letters, factors
from sbp.rules.registry import rule
from sbp.signature import B, Partial, Split
from sbp.talk.halo import (
    Extent,
    Scatter,
    Slide,
    Window,
    cropped,
    extent,
    fetched,
    own,
    pays,
    scatter,
    slide,
    taken,
    talks,
)
from sbp.talk.local import Local, Talk


def _window(params: Any, dim: int) -> Window:
    """How the window slides along a dim."""
    ones = (1,) * (dim + 1)
    kinds = ("window_strides", "window_dilation", "base_dilation")
    stride, dilation, base = ((params.get(k) or ones)[dim] for k in kinds)
    return Window(stride, dilation, base, params["padding"][dim][0])


def _moves(params: Any, dim: int) -> bool:
    """Whether the window reaches or moves along a dim."""
    one = params["window_dimensions"][dim] == 1 and _window(params, dim) == Window()
    return not one or tuple(params["padding"][dim]) != (0, 0)


def _still(op: Op) -> Letters:
    """A letter for every dim along which the window neither reaches nor moves."""
    return tuple(None if _moves(op.params, d) else f"d{d}" for d in range(len(op.shapes[0])))


def _window_flops(op: Op) -> float:
    return float(math.prod(op.params["window_dimensions"]) * sum(math.prod(s) for s in op.results))


def _reduced_slide(params: Any, dim: int, base: Extent, out: Extent) -> Slide | None:
    taps = Extent(params["window_dimensions"][dim], (), base.hierarchy)
    return slide(base, taps, out, _window(params, dim))


def _moving(op: Op) -> Iterator[tuple[int, Extent, Extent]]:
    """The dims along which windows move and that may be split: of the operands, and of the results."""
    for d, (n, m) in enumerate(zip(op.shapes[0], op.results[0], strict=True)):
        if _moves(op.params, d) and min(n, m) > 1:
            yield d, Extent(n, (0,), (op.group,)), Extent(m, (0,), (op.group,))


def _halo_rows(op: Op, windowed: int) -> Iterable[Row]:
    """The first `windowed` operands and the results split alike, the halos exchanged."""
    others = (B,) * (len(op.shapes) - windowed)
    for d, base, out in _moving(op):
        found = _reduced_slide(op.params, d, base, out)
        if found is not None and pays([found.halo]):
            yield Row((*[Split(d)] * windowed, *others), (Split(d),) * len(op.results))


def _slides(ctx: Local) -> dict[int, Slide]:
    """The dims that are split and along which windows move."""
    base, out = ctx.operands[0], ctx.results[0]
    every = {
        d: _reduced_slide(ctx.params, d, extent(base, d), extent(out, d))
        for d in range(len(base.shape))
        if base.axes(d) and _moves(ctx.params, d)
    }
    return {d: s for d, s in every.items() if s is not None}


def _local(fills: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
    """A body that extends the operands by their halos.

    Arguments:
      fills: of a `Local` and the operands: what the op pads each of those that are windowed with.
    """

    def body(ctx: Local, *args: Any) -> list[Any]:
        slides, padding, wide = _slides(ctx), list(ctx.params["padding"]), list(args)
        for d, s in slides.items():
            padding[d] = s.padding
            for i, fill in enumerate(fills(ctx, *args)):
                wide[i] = fetched(ctx, wide[i], d, s.halo, fill)
        return [cropped(ctx, y, slides) for y in ctx.bind(*wide, padding=tuple(padding))]

    return body


def _talks(ctx: Local) -> Iterable[Talk]:
    """The windowed operands are as many as have the shape of the first."""
    halos = {d: s.halo for d, s in _slides(ctx).items()}
    for i, layout in enumerate(ctx.operands):
        if layout.shape == ctx.operands[0].shape:
            yield from talks(ctx, i, halos)


def _selected(ctx: Local, x: Any) -> Any:
    """What is never selected."""
    return identity_of("max" if ctx.params["select_prim"].name == "ge" else "min", x.dtype)


def _ignored(ctx: Local, x: Any) -> Any:
    """What a maximum or minimum ignores."""
    return identity_of(ctx.primitive.name.removeprefix("reduce_window_"), x.dtype)


HALOS = "windowed dims with an exchange of halos"


@rule(
    "reduce_window_sum",
    local=_local(lambda ctx, x: [None]),
    talks=_talks,
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
    local=_local(lambda ctx, x: [_ignored(ctx, x)]),
    talks=_talks,
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
    local=_local(lambda ctx, *args: args[len(args) // 2 :]),
    talks=_talks,
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
    local=_local(lambda ctx, tangents, x: [None, _selected(ctx, x)]),
    talks=_talks,
    flops=_window_flops,
    note=HALOS,
)
def select_and_gather_add(op: Op) -> list[Row]:
    """Every dim; additive in what is gathered."""
    names = _still(op)
    return [*factors(op, [names, names], [names], additive=(0,)), *_halo_rows(op, 2)]


def _scatter_of(params: Any, dim: int, source: Extent, operand: Extent) -> Scatter:
    taps, stride = params["window_dimensions"][dim], params["window_strides"][dim]
    return scatter(source, operand, taps, stride, params["padding"][dim][0])


def _scatters(ctx: Local) -> dict[int, Scatter]:
    source, operand = ctx.operands
    return {
        d: _scatter_of(ctx.params, d, extent(source, d), extent(operand, d))
        for d in range(len(operand.shape))
        if operand.axes(d) and _moves(ctx.params, d)
    }


def _scatter_local(ctx: Local, source: Any, operand: Any) -> list[Any]:
    """Every window that touches the own rows, and of what they scatter the own rows."""
    scatters, padding, never = _scatters(ctx), list(ctx.params["padding"]), _selected(ctx, operand)
    for d, s in scatters.items():
        source, operand = fetched(ctx, source, d, s.source), fetched(ctx, operand, d, s.operand, never)
        padding[d] = (0, 0)
    (out,) = ctx.bind(source, operand, padding=tuple(padding))
    for d, s in scatters.items():
        if any(s.padding):
            widths = [(*s.padding, 0) if e == d else (0, 0, 0) for e in range(out.ndim)]
            out = lax.pad(out, jnp.zeros((), out.dtype), widths)
        out = taken(out, own(ctx, s.operand.axes, s.starts), s.operand.extent.local, d)
    return [out]


def _scatter_talks(ctx: Local) -> Iterable[Talk]:
    scatters = _scatters(ctx)
    yield from talks(ctx, 0, {d: s.source for d, s in scatters.items()})
    yield from talks(ctx, 1, {d: s.operand for d, s in scatters.items()})


@rule(
    "select_and_scatter_add",
    local=_scatter_local,
    talks=_scatter_talks,
    flops=_window_flops,
    note=HALOS,
)
def select_and_scatter_add(op: Op) -> list[Row]:
    """Every dim; additive in what is scattered."""
    names = _still(op)
    rows = factors(op, [names, names], [names], additive=(0,))
    for d, (m, n) in enumerate(zip(op.shapes[0], op.shapes[1], strict=True)):
        if _moves(op.params, d) and min(m, n) > 1:
            extents = (Extent(size, (0,), (op.group,)) for size in (m, n))
            found = _scatter_of(op.params, d, *extents)
            if pays([found.source, found.operand]):
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
