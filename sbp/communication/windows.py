"""Bodies of ops with sliding windows: a shard gets the halo that its windows reach into, and runs the op.

docs/communication.md has an example of a halo.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from numpy.typing import NDArray

from sbp.communication.bits import identity_of
from sbp.communication.extents import Extent, extent, own_entry, slice_rows
from sbp.communication.halo import (
    Slide,
    Window,
    WindowScatter,
    halo_communication,
    scatter_windows,
    slide,
    with_halo,
    without_surplus,
)
from sbp.communication.protocol import Communication, Context


def _window(params: Mapping[str, Any], dim: int) -> Window:
    """How the window slides along a dim."""
    ones = (1,) * (dim + 1)
    kinds = ("window_strides", "window_dilation", "base_dilation")
    stride, dilation, base = ((params.get(k) or ones)[dim] for k in kinds)
    return Window(stride, dilation, base, params["padding"][dim][0])


def window_moves(params: Mapping[str, Any], dim: int) -> bool:
    """Whether the window reaches or moves along a dim."""
    one = params["window_dimensions"][dim] == 1 and _window(params, dim) == Window()
    return not one or tuple(params["padding"][dim]) != (0, 0)


def window_slide(params: Mapping[str, Any], dim: int, base: Extent, out: Extent) -> Slide | None:
    """How the window of a reduction slides along a dim."""
    taps = Extent(params["window_dimensions"][dim], (), base.hierarchy)
    return slide(base, taps, out, _window(params, dim))


def _slides(ctx: Context) -> dict[int, Slide]:
    """The dims that are split and along which windows move."""
    base, out = ctx.operands[0], ctx.results[0]
    every = {
        d: window_slide(ctx.params, d, extent(base, d), extent(out, d))
        for d in range(len(base.shape))
        if base.axes(d) and window_moves(ctx.params, d)
    }
    return {d: s for d, s in every.items() if s is not None}


def with_halos(fills: Callable[..., Sequence[ArrayLike | None]]) -> Callable[..., list[jax.Array]]:
    """A body that extends the operands by their halos.

    Arguments:
      fills: of a `Context` and the operands: what the op pads each of those that are windowed with.
    """

    def body(ctx: Context, *args: jax.Array) -> list[jax.Array]:
        slides, padding, wide = _slides(ctx), list(ctx.params["padding"]), list(args)
        for d, s in slides.items():
            padding[d] = s.padding
            for i, fill in enumerate(fills(ctx, *args)):
                wide[i] = with_halo(ctx, wide[i], d, s.halo, fill)
        return [without_surplus(ctx, y, slides) for y in ctx.bind(*wide, padding=tuple(padding))]

    return body


def window_communication(ctx: Context) -> Iterable[Communication]:
    """What `with_halos` bodies send; the windowed operands are as many as have the shape of the first."""
    halos = {d: s.halo for d, s in _slides(ctx).items()}
    for i, layout in enumerate(ctx.operands):
        if layout.shape == ctx.operands[0].shape:
            yield from halo_communication(ctx, i, halos)


def never_selected(ctx: Context, x: jax.Array) -> NDArray[Any]:
    """The number that a window which selects one of its elements never selects."""
    return identity_of("max" if ctx.params["select_prim"].name == "ge" else "min", x.dtype)


def scatter_along(params: Mapping[str, Any], dim: int, source: Extent, operand: Extent) -> WindowScatter:
    """How windows scatter along a dim."""
    taps, stride = params["window_dimensions"][dim], params["window_strides"][dim]
    return scatter_windows(source, operand, taps, stride, params["padding"][dim][0])


def _scatters(ctx: Context) -> dict[int, WindowScatter]:
    """The dims that are split and along which windows scatter."""
    source, operand = ctx.operands
    return {
        d: scatter_along(ctx.params, d, extent(source, d), extent(operand, d))
        for d in range(len(operand.shape))
        if operand.axes(d) and window_moves(ctx.params, d)
    }


def window_scatter_local(ctx: Context, source: jax.Array, operand: jax.Array) -> list[jax.Array]:
    """Every window that touches the own rows, and of what they scatter the own rows."""
    scatters, padding, never = _scatters(ctx), list(ctx.params["padding"]), never_selected(ctx, operand)
    for d, s in scatters.items():
        source, operand = with_halo(ctx, source, d, s.source), with_halo(ctx, operand, d, s.operand, never)
        padding[d] = (0, 0)
    (out,) = ctx.bind(source, operand, padding=tuple(padding))
    for d, s in scatters.items():
        if any(s.padding):
            widths = [(*s.padding, 0) if e == d else (0, 0, 0) for e in range(out.ndim)]
            out = lax.pad(out, jnp.zeros((), out.dtype), widths)
        out = slice_rows(out, own_entry(ctx, s.operand.axes, s.starts), s.operand.extent.local, d)
    return [out]


def window_scatter_communication(ctx: Context) -> Iterable[Communication]:
    """What `window_scatter_local` sends."""
    scatters = _scatters(ctx)
    yield from halo_communication(ctx, 0, {d: s.source for d, s in scatters.items()})
    yield from halo_communication(ctx, 1, {d: s.operand for d, s in scatters.items()})
