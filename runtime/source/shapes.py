"""How ops that move, pick and reduce elements are spelled: tables, a row per primitive."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from sbp.compat import core
from sbp.runtime.source.operands import Operands, Spelling
from sbp.runtime.source.text import ATOM, PRODUCT, UNARY, Text, dtype_text, number
from sbp.runtime.source.values import Lit, Term

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_prod": "prod"}
_LOGICAL = {"reduce_and": "all", "reduce_or": "any"}
_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")


def _index(parts: Sequence[str]) -> str:
    """Indices without what is whole at the end."""
    kept = list(parts)
    while kept and kept[-1] == ":":
        kept.pop()
    return f"[{', '.join(kept)}]" if kept else ""


def _broadcast(o: Operands) -> Text | None:
    shape, dims = o.eqn.outs[0].shape, tuple(o.params["broadcast_dimensions"])
    x = o.eqn.ins[0]
    if len(o.texts) != 1:  # sizes that are known when it runs
        return None
    if isinstance(x, Lit):
        code = number(x.value, x.dtype)
        return Text(code, UNARY if code.startswith("-") else ATOM, (), exactly=_full(x, shape), number=True)
    text, own = o.exact(0), o.shape()
    first = dims[0] if dims else len(shape)
    trailing = dims == tuple(range(len(shape) - len(dims), len(shape)))
    if trailing:
        new = ", ".join(["None"] * (len(shape) - len(own)))
        only_new = new and math.prod(shape) == math.prod(own)
        exactly = f"{text.within(ATOM)}[{new}]" if only_new else ""
        return Text(text.code, text.binds, own, exactly=exactly)
    placed = [1] * len(shape)
    for k, d in enumerate(dims):
        placed[d] = own[k]
    inner = o.texts[0]
    if inner.with_kept_dims and tuple(d for d in range(len(shape)) if d not in dims) == inner.axes:
        return Text(inner.with_kept_dims, shape=tuple(placed))
    index = [":" if d in dims else "None" for d in range(first, len(shape))]
    return Text(f"{text.within(ATOM)}[{', '.join(index)}]", shape=tuple(placed[first:]))


def _full(x: Lit, shape: tuple[int, ...]) -> str:
    if core.is_key(x.dtype):
        return f"jnp.full({shape}, {x.value})"
    zero_or_one = {0: "zeros", 1: "ones"}.get(x.value if x.dtype != np.bool_ else 2)
    negative_zero = jnp.issubdtype(x.dtype, jnp.floating) and np.signbit(np.float64(x.value))
    if zero_or_one and not negative_zero:
        return f"jnp.{zero_or_one}({shape}, {dtype_text(x.dtype)})"
    return f"jnp.full({shape}, {number(x.value, x.dtype)}, {dtype_text(x.dtype)})"


def _reshape(o: Operands) -> Text | None:
    if o.params.get("dimensions") is not None or len(o.texts) != 1:
        return None
    shape, inner = o.eqn.outs[0].shape, o.texts[0]
    if inner.with_kept_dims and shape == _kept_shape(o.eqn.ins[0], inner.axes):
        return Text(inner.with_kept_dims)
    sizes = ", ".join(map(str, shape))
    if isinstance(o.eqn.ins[0], Lit):
        return Text(_full(o.eqn.ins[0], o.eqn.outs[0].shape))
    return Text(f"{o.exact(0).within(ATOM)}.reshape({sizes or '()'})")


def _kept_shape(x: Term, axes: Sequence[int]) -> tuple[int, ...]:
    """The shape of a reduction, with its dims kept at size 1."""
    sizes = iter(x.shape)
    return tuple(1 if d in axes else next(sizes) for d in range(len(x.shape) + len(axes)))


def _squeeze(o: Operands) -> Text:
    dims = tuple(o.params["dimensions"])
    base, parts = o.texts[0].index
    if parts:
        picked = [p.partition(":")[0] or "0" if d in dims else p for d, p in enumerate(parts)]
        return Text(f"{base}{_index(picked)}")
    return Text(f"{o.exact(0).within(ATOM)}.squeeze({dims[0] if len(dims) == 1 else dims})")


def _transpose(o: Operands) -> Text:
    order = tuple(o.params["permutation"])
    if (product := o.texts[0].einsum) is not None:
        x, y, out, left, right, extra = product
        return _einsum(x, y, "".join(out[d] for d in order), left, right, extra)
    if order == tuple(reversed(range(len(order)))):
        return Text(f"{o.exact(0).within(ATOM)}.T")
    return Text(f"{o.exact(0).within(ATOM)}.transpose({', '.join(map(str, order))})")


def _slice(o: Operands) -> Text:
    p, shape = o.params, o.shape()
    strides = p["strides"] or (1,) * len(shape)
    parts = []
    for start, stop, stride, size in zip(p["start_indices"], p["limit_indices"], strides, shape, strict=True):
        a, b = str(start) if start else "", str(stop) if stop != size else ""
        parts.append(f"{a}:{b}" + (f":{stride}" if stride != 1 else ""))
    base = o.exact(0).within(ATOM)
    return Text(f"{base}{_index(parts)}", index=(base, tuple(parts)))


def _dynamic_slice(o: Operands) -> Text:
    starts = ", ".join(o.start(i) for i in range(1, len(o.texts)))
    comma = "," if len(o.texts) == 2 else ""
    return Text(f"lax.dynamic_slice({o.arg(0)}, ({starts}{comma}), {tuple(o.params['slice_sizes'])})")


def _dynamic_update_slice(o: Operands) -> Text:
    starts = ", ".join(o.start(i) for i in range(2, len(o.texts)))
    comma = "," if len(o.texts) == 3 else ""
    return Text(f"lax.dynamic_update_slice({o.arg(0)}, {o.arg(1)}, ({starts}{comma}))")


def _pad(o: Operands) -> Text:
    config = tuple((int(lo), int(hi), int(between)) for lo, hi, between in o.params["padding_config"])
    if all(lo >= 0 and hi >= 0 and not between for lo, hi, between in config):
        widths = tuple((lo, hi) for lo, hi, _ in config)
        fill = o.eqn.ins[1]
        if isinstance(fill, Lit) and fill.value == 0:
            return Text(f"jnp.pad({o.arg(0)}, {widths})")
    return Text(f"lax.pad({o.arg(0)}, {o.arg(1)}, {config})")


def _concatenate(o: Operands) -> Text:
    comma = "," if len(o.texts) == 1 else ""
    return Text(f"jnp.concatenate(({o.args()}{comma}), axis={o.params['dimension']})")


def _iota(o: Operands) -> Text | None:
    if o.texts:
        return None
    shape, kind = tuple(o.params["shape"]), dtype_text(o.params["dtype"])
    if len(shape) == 1:
        return Text(f"lax.iota({kind}, {shape[0]})")
    return Text(f"lax.broadcasted_iota({kind}, {shape}, {o.params['dimension']})")


def _reduction(o: Operands) -> Text:
    axes, dtype = tuple(o.params["axes"]), o.eqn.ins[0].dtype
    how = _REDUCTIONS[o.eqn.name]
    # NumPy's sums are of a type of their own for narrow types.
    narrow = how in ("sum", "prod") and (core.itemsize(dtype) < 4 or dtype == np.bool_)
    if narrow or dtype == np.bool_:
        return Text(f"lax.{o.eqn.name}({o.arg(0)}, {axes})")
    return _method(o, how, axes)


def _method(o: Operands, how: str, axes: tuple[int, ...]) -> Text:
    x = o.exact(0).within(ATOM)
    if axes == tuple(range(len(o.shape()))):
        return Text(f"{x}.{how}()", with_kept_dims=f"{x}.{how}(keepdims=True)", axes=axes)
    axis = str(axes[0]) if len(axes) == 1 else str(axes)
    return Text(f"{x}.{how}({axis})", with_kept_dims=f"{x}.{how}({axis}, keepdims=True)", axes=axes)


def _logical(o: Operands) -> Text:
    axes = tuple(o.params["axes"])
    if o.eqn.ins[0].dtype != np.bool_:
        return Text(f"lax.{o.eqn.name}({o.arg(0)}, {axes})")
    return _method(o, _LOGICAL[o.eqn.name], axes)


def _arg_extremum(o: Operands) -> Text | None:
    axes = tuple(o.params["axes"])
    if len(axes) != 1:
        return None
    return Text(f"lax.{o.eqn.name}({o.arg(0)}, {axes[0]}, {dtype_text(o.params['index_dtype'])})")


def _cumulative(o: Operands) -> Text:
    backwards = ", reverse=True" if o.params["reverse"] else ""
    return Text(f"lax.{o.eqn.name}({o.arg(0)}, axis={o.params['axis']}{backwards})")


def _sort(o: Operands) -> Text:
    p = o.params
    many = len(o.texts) > 1
    operands = f"({o.args()})" if many else o.arg(0)
    keys = f", num_keys={p['num_keys']}" if p["num_keys"] != 1 else ""
    return Text(f"lax.sort({operands}, dimension={p['dimension']}, is_stable={p['is_stable']}{keys})")


def _dot(o: Operands) -> Text | None:
    if o.params.get("out_sharding") is not None:
        return None
    (left, right), (left_batch, right_batch) = o.params["dimension_numbers"]
    a, b = o.eqn.ins
    wanted = o.params["preferred_element_type"]
    extra = o.keywords("precision")
    if wanted is not None and not (a.dtype == b.dtype == wanted):
        extra += f", preferred_element_type={dtype_text(wanted)}"
    fresh = iter(_LETTERS)
    x, y = [""] * len(a.shape), [""] * len(b.shape)
    meet = dict(zip((*left_batch, *left), (*right_batch, *right), strict=True))
    for i in range(len(x)):
        x[i] = next(fresh)
        if i in meet:
            y[meet[i]] = x[i]
    y = [letter or next(fresh) for letter in y]
    out = [
        *(x[i] for i in left_batch),
        *(x[i] for i in range(len(x)) if i not in (*left_batch, *left)),
        *(y[i] for i in range(len(y)) if i not in (*right_batch, *right)),
    ]
    return _einsum("".join(x), "".join(y), "".join(out), o.exact(0), o.exact(1), extra)


def _einsum(x: str, y: str, out: str, left: Text, right: Text, extra: str) -> Text:
    """A product by its letters; one of two matrices as such."""
    product = x, y, out, left, right, extra
    shared = set(x) & set(y)
    if len(x) == len(y) == len(out) == 2 and len(shared) == 1 and not extra:
        if out[0] not in x:
            return replace(_einsum(y, x, out, right, left, extra), einsum=product)
        (letter,) = shared
        a = left.within(PRODUCT) if x[1] == letter else f"{left.within(ATOM)}.T"
        b = right.within(PRODUCT + 1) if y[0] == letter else f"{right.within(ATOM)}.T"
        return Text(f"{a} @ {b}", PRODUCT, einsum=product)
    return Text(f'jnp.einsum("{x},{y}->{out}", {left.code}, {right.code}{extra})', einsum=product)


_CONV = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers")


def _convolution(o: Operands) -> Text:
    extra = o.keywords(*_CONV, "feature_group_count", "batch_group_count", "precision")
    wanted = o.params.get("preferred_element_type")
    if wanted is not None and wanted != o.eqn.ins[0].dtype:
        extra += f", preferred_element_type={dtype_text(wanted)}"
    return Text(f"lax.conv_general_dilated({o.args()}{extra})")


def _gather(o: Operands) -> Text:
    p = o.params
    sizes = tuple(p["slice_sizes"])
    extra = o.keywords("mode", "fill_value")
    for key in ("indices_are_sorted", "unique_indices"):
        extra += f", {key}=True" if p[key] else ""
    dims = o.literal("dimension_numbers")
    return Text(f"lax.gather({o.arg(0)}, {o.arg(1)}, {dims}, slice_sizes={sizes}{extra})")


_SCATTERS = {
    "scatter": "scatter",
    "scatter-add": "scatter_add",
    "scatter_add": "scatter_add",
    "scatter-sub": "scatter_sub",
    "scatter_sub": "scatter_sub",
    "scatter-mul": "scatter_mul",
    "scatter_mul": "scatter_mul",
    "scatter-min": "scatter_min",
    "scatter_min": "scatter_min",
    "scatter-max": "scatter_max",
    "scatter_max": "scatter_max",
}


def _replaces(update: Any) -> bool:
    """Whether a scatter puts its updates in the place of what was there, and computes nothing of both."""
    jaxpr = getattr(update, "jaxpr", update)
    return jaxpr is None or (not jaxpr.eqns and jaxpr.outvars[0] is jaxpr.invars[1])


def _scatter(o: Operands) -> Text | None:
    if o.eqn.name == "scatter" and not _replaces(o.params.get("update_jaxpr")):
        return None
    extra = o.keywords("mode")
    for key in ("indices_are_sorted", "unique_indices"):
        extra += f", {key}=True" if o.params[key] else ""
    dims = o.literal("dimension_numbers")
    return Text(f"lax.{_SCATTERS[o.eqn.name]}({o.args()}, {dims}{extra})")


def _unstack(o: Operands) -> Text:
    axis = f", axis={o.params['axis']}" if o.params["axis"] else ""
    return Text(f"jnp.unstack({o.arg(0)}{axis}){_only(o)}")


def _only(o: Operands) -> str:
    """Behind a call that gives a tuple, where that has one element."""
    return "[0]" if len(o.eqn.outs) == 1 else ""


def _random_split(o: Operands) -> Text | None:
    if o.shape():
        return None
    shape = tuple(o.params["shape"])
    return Text(f"jax.random.split({o.arg(0)}, {shape[0] if len(shape) == 1 else shape})")


def _random_bits(o: Operands) -> Text | None:
    if o.shape():  # keys of their own for all elements
        return None
    shape, width = tuple(o.params["shape"]), o.params["bit_width"]
    return Text(f"jax.random.bits({o.arg(0)}, {shape}, jnp.uint{width})")


def _wrap(o: Operands) -> Text | None:
    name = getattr(o.params["impl"], "name", None)
    return name and Text(f'jax.random.wrap_key_data({o.arg(0)}, impl="{name}")')


def _seed(o: Operands) -> Text | None:
    name = getattr(o.params["impl"], "name", None)
    return Text(f'jax.random.key({o.arg(0)}, impl="{name}")') if name and not o.shape() else None


SHAPES: Mapping[str, Spelling] = {
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(_LOGICAL, _logical),
    **dict.fromkeys(_CUMULATIVE, _cumulative),
    **dict.fromkeys(_SCATTERS, _scatter),
    "argmax": _arg_extremum,
    "argmin": _arg_extremum,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "iota": _iota,
    "pad": _pad,
    "random_bits": _random_bits,
    "random_fold_in": lambda o: None if o.shape() or o.shape(1) else Text(f"jax.random.fold_in({o.args()})"),
    "random_seed": _seed,
    "random_split": _random_split,
    "random_unwrap": lambda o: Text(f"jax.random.key_data({o.arg(0)})"),
    "random_wrap": _wrap,
    "reshape": _reshape,
    "rev": lambda o: Text(f"lax.rev({o.arg(0)}, {tuple(o.params['dimensions'])})"),
    "slice": _slice,
    "sort": _sort,
    "split": lambda o: Text(
        f"lax.split({o.arg(0)}, {tuple(o.params['sizes'])}, axis={o.params['axis']}){_only(o)}"
    ),
    "squeeze": _squeeze,
    "transpose": _transpose,
    "unstack": _unstack,
}
