"""The body of a convolution: local groups of features, and halos along spatial dims that are split.

docs/communication.md has an example.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from sbp.communication.extents import extent
from sbp.communication.halo import Slide, Window, halo_communication, slide, with_halo, without_surplus
from sbp.communication.protocol import Communication, Context


def conv_dims(params: Mapping[str, Any]) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """The dims of input, kernel and output: batch (output features), features, then the spatial ones."""
    numbers = params["dimension_numbers"]
    return numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec


def conv_windows(params: Mapping[str, Any]) -> list[Window]:
    """How the kernel slides, per spatial dim."""
    sides = zip(
        params["window_strides"],
        params["rhs_dilation"],
        params["lhs_dilation"],
        params["padding"],
        strict=True,
    )
    return [Window(s, w, b, low) for s, w, b, (low, _) in sides]


def _conv_slides(ctx: Context) -> dict[int, Slide]:
    """The spatial dims that are split."""
    (ls, rs, os), (lhs, rhs), (out,) = conv_dims(ctx.params), ctx.operands, ctx.results
    found = {}
    for i, window in enumerate(conv_windows(ctx.params)):
        dims = extent(lhs, ls[2 + i]), extent(rhs, rs[2 + i]), extent(out, os[2 + i])
        if any(d.axes for d in dims):
            found[i] = slide(*dims, window)
    return {i: s for i, s in found.items() if s is not None}


def conv_local(ctx: Context, lhs: jax.Array, rhs: jax.Array) -> list[jax.Array]:
    """Local group counts; padding of contracted features must be zero on both sides; halos of the input."""
    ls, rs, os = conv_dims(ctx.params)
    groups, batches = ctx.params["feature_group_count"], ctx.params["batch_group_count"]
    if groups > 1:
        groups = lhs.shape[ls[1]] // rhs.shape[rs[1]]
    if batches > 1:
        batches = lhs.shape[ls[0]] // ctx.results[0].local[os[0]]
    if ctx.params["feature_group_count"] == 1:
        lhs = ctx.mask(lhs, ctx.operands[0], [ls[1]], 0)
        rhs = ctx.mask(rhs, ctx.operands[1], [rs[1]], 0)
    slides, padding = _conv_slides(ctx), list(ctx.params["padding"])
    for i, s in slides.items():
        lhs, padding[i] = with_halo(ctx, lhs, ls[2 + i], s.halo), s.padding
    changed = {"feature_group_count": groups, "batch_group_count": batches, "padding": tuple(padding)}
    (out,) = ctx.bind(lhs, rhs, **changed)
    return [without_surplus(ctx, out, {os[2 + i]: s for i, s in slides.items()})]


def conv_communication(ctx: Context) -> Iterable[Communication]:
    """What `conv_local` sends."""
    ls, _, _ = conv_dims(ctx.params)
    return halo_communication(ctx, 0, {ls[2 + i]: s.halo for i, s in _conv_slides(ctx).items()})
