"""Arguments of a call: checked, named, and brought to where the program wants them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from sbp.errors import Problem
from sbp.placement import Placement
from sbp.resolve import is_leaf, resolve
from sbp.signature import NdSbp


def abstract(leaf: Any) -> Any:
    """The shape, dtype and weakness of a leaf, as JAX would trace it.

    Raises:
      TypeError: if JAX cannot take it.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if isinstance(leaf, bool | int | float | complex):
        aval = jax.typeof(leaf)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=True)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TypeError(f"{type(leaf).__name__} is not an array")
    dtype = leaf.dtype
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, weak_type=bool(getattr(leaf, "weak_type", False)))


def check_leaves(leaves: Sequence[Any], paths: Sequence[str]) -> Iterator[Problem]:
    """What keeps the leaves of a call from being taken."""
    for leaf, path in zip(leaves, paths, strict=True):
        try:
            abstract(leaf)
        except TypeError as e:
            yield Problem(
                "argument",
                path,
                f"{leaf!r:.60}",
                "arrays, numbers, and pytrees of them",
                f"JAX cannot trace it: {e}",
                "make it a static argument (static_argnums), or leave it out",
            )
            continue
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            yield Problem(
                "donation",
                path,
                f"an array of shape {list(leaf.shape)} whose buffer was donated to an earlier call",
                "an array that still exists",
                "donate_argnums gave its memory to the results of that call",
                "use the returned value instead: params, ... = step(params, ...)",
            )
        elif isinstance(leaf, np.ndarray | np.generic):
            yield from _check_width(leaf, path)


def _check_width(leaf: Any, path: str) -> Iterator[Problem]:
    """64-bit integers that JAX would silently cut to 32 bits."""
    if leaf.dtype not in (np.int64, np.uint64) or jax.config.read("jax_enable_x64") or not leaf.size:
        return
    narrow = np.iinfo(np.int32 if leaf.dtype == np.int64 else np.uint32)
    low, high = leaf.min(), leaf.max()
    if low < narrow.min or high > narrow.max:
        yield Problem(
            "argument",
            path,
            f"{leaf.dtype}{list(np.shape(leaf))} with values {low}..{high}",
            f"values in {narrow.min}..{narrow.max}, or JAX with 64-bit types",
            "with 64-bit types off, JAX would cut these integers to 32 bits without a word",
            "jax.config.update('jax_enable_x64', True), or map the values to a smaller range first",
        )


def resolve_inputs(
    in_sbp: Any, args: Sequence[Any], kwargs: Any, paths: Sequence[str], placement: Placement
) -> tuple[list[NdSbp | None], list[Problem]]:
    """One signature per argument leaf; keyword arguments are AUTO."""
    n_kwargs = len(jax.tree.leaves(kwargs))
    positional = paths[: len(paths) - n_kwargs]
    prefix = in_sbp if is_leaf(in_sbp) else tuple(in_sbp) if isinstance(in_sbp, list | tuple) else in_sbp
    if isinstance(prefix, tuple) and not is_leaf(prefix) and len(prefix) != len(args):
        problem = Problem(
            "signature",
            "in_sbp",
            f"{len(prefix)} entries",
            f"{len(args)}: one per positional argument that is not static",
            f"the call has {len(args)} such arguments",
            "sbp.AUTO (or None) for an argument leaves it open",
        )
        return [None] * len(paths), [problem]
    sbps, problems = resolve(prefix, tuple(args), positional, placement, "in_sbp")
    return [*sbps, *[None] * n_kwargs], problems


def resolve_outputs(
    out_sbp: Any, tree: Any, paths: Sequence[str], placement: Placement
) -> tuple[list[NdSbp | None], list[Problem]]:
    """One signature per result leaf."""
    prefix = out_sbp
    if isinstance(out_sbp, list) and not is_leaf(out_sbp) and isinstance(tree, tuple):
        prefix = tuple(out_sbp)
    return resolve(prefix, tree, paths, placement, "out_sbp")


def ties(args: Sequence[Any], out: Any, out_sbp: Sequence[NdSbp | None]) -> tuple[int | None, ...]:
    """For each result leaf, the argument leaf that it comes back as.

    A result (or an element of a result tuple) whose tree, shapes and dtypes equal those of an argument is that
    argument's next value, unless its signature was given. Each argument is taken once, in order.
    """
    results = list(out) if isinstance(out, tuple | list) and not hasattr(out, "_fields") else [out]
    start, spans = 0, []
    for arg in args:
        n = len(jax.tree.leaves(arg))
        spans.append((_kind(arg), start, n))
        start += n
    tied: list[int | None] = []
    free = list(spans)
    for result in results:
        kind, n = _kind(result), len(jax.tree.leaves(result))
        open_ = all(s is None for s in out_sbp[len(tied) : len(tied) + n])
        match = next((s for s in free if s[0] == kind), None) if open_ and n else None
        if match is not None:
            free.remove(match)
        tied += [None] * n if match is None else range(match[1], match[1] + n)
    return tuple(tied)


def _kind(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((tuple(x.shape), x.dtype) for x in leaves)



