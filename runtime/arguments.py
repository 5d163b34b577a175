"""Arguments of a call: checked, named, and brought to where the program wants them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from sbp.errors import Problem
from sbp.placement import Placement
from sbp.resolve import is_leaf, resolve
from sbp.signature import NdSbp

Abstract: TypeAlias = tuple[tuple[int, ...], Any, bool]
"""Shape, dtype and weakness of a leaf: what a compiled program depends on."""

WIDE = {np.dtype(np.int64): np.int32, np.dtype(np.uint64): np.uint32}
NOT_TAKEN = object()  # stands for a leaf that cannot be taken, where the others are still checked


def abstract(leaf: Any) -> Abstract:
    """The shape, dtype and weakness of a leaf, as JAX would trace it.

    Raises:
      TypeError: if JAX cannot take it.

    >>> abstract(np.ones((2, 3)))
    ((2, 3), dtype('float32'), False)
    """
    if isinstance(leaf, jax.Array):
        aval = leaf.aval
        return leaf.shape, leaf.dtype, bool(aval.weak_type)  # type: ignore[attr-defined]
    if isinstance(leaf, jax.ShapeDtypeStruct):
        extended = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
        dtype = leaf.dtype if extended else jax.dtypes.canonicalize_dtype(leaf.dtype)
        return tuple(leaf.shape), dtype, bool(leaf.weak_type)
    aval = jax.typeof(leaf)
    return tuple(aval.shape), jax.dtypes.canonicalize_dtype(aval.dtype), bool(aval.weak_type)


def struct(a: Abstract) -> jax.ShapeDtypeStruct:
    """The same as JAX's own description."""
    return jax.ShapeDtypeStruct(a[0], a[1], weak_type=a[2])


def check_leaf(leaf: Any, path: Callable[[], str], concrete: bool) -> Problem | None:
    """What keeps a leaf of a call from being taken.

    Arguments:
      path: its name, asked for only if there is a problem.
      concrete: whether the program is to run, so that values are needed.
    """
    if isinstance(leaf, jax.core.Tracer):
        return Problem(
            "argument",
            path(),
            f"a value that is being traced, {leaf.aval}",
            "arrays",
            "a Program is the outermost thing: it cannot be called inside jit, grad, vmap or another program",
            "compile the outer function, with this one's function inside: sbp.compile(jax.grad(fn), ...)",
        )
    if isinstance(leaf, jax.Array):
        return _deleted(leaf, path()) if leaf.is_deleted() else None
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return _no_value(leaf, path()) if concrete else None
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        leaf_array = np.asarray(leaf)
        return _too_wide(leaf_array, path) if leaf_array.dtype != object else _no_array(leaf, path(), "too large")
    try:
        jax.typeof(leaf)
    except (TypeError, OverflowError) as e:
        return _no_array(leaf, path(), str(e).splitlines()[0])
    return _too_wide(leaf, path) if isinstance(leaf, np.ndarray | np.generic) else None


def _no_array(leaf: Any, path: str, why: str) -> Problem:
    return Problem(
        "argument",
        path,
        f"{leaf!r:.60}",
        "arrays, numbers, and pytrees of them",
        f"JAX cannot take it: {why}",
        "make it a static argument (static_argnums), or leave it out",
    )


def _no_value(leaf: jax.ShapeDtypeStruct, path: str) -> Problem:
    return Problem(
        "argument",
        path,
        f"ShapeDtypeStruct {leaf.dtype}{list(leaf.shape)}",
        "an array",
        "a shape has no values to run with",
        "Program.plan(...) and Program.lower(...) take shapes",
    )


def _deleted(leaf: jax.Array, path: str) -> Problem:
    return Problem(
        "donation",
        path,
        f"{leaf.dtype}{list(leaf.shape)}, whose memory is gone: it was donated to an earlier call, or deleted",
        "an array that still exists",
        "donate_argnums gives the memory of an argument to the results",
        "use what that call returned: params, ... = step(params, ...); or leave donate_argnums out",
    )


def _too_wide(leaf: Any, path: Callable[[], str]) -> Problem | None:
    """64-bit integers that JAX would silently cut to 32 bits."""
    if leaf.dtype not in WIDE or jax.config.read("jax_enable_x64") or not leaf.size:
        return None
    narrow = np.iinfo(WIDE[leaf.dtype])
    low, high = leaf.min(), leaf.max()
    if low >= narrow.min and high <= narrow.max:
        return None
    return Problem(
        "argument",
        path(),
        f"{leaf.dtype}{list(np.shape(leaf))} with values {low}..{high}",
        f"values in {narrow.min}..{narrow.max}, or JAX with 64-bit types",
        "with 64-bit types off, JAX would cut these integers to 32 bits without a word",
        "jax.config.update('jax_enable_x64', True), or map the values to a smaller range first",
    )


def check_donated(leaves: Sequence[Any], donate: Sequence[int], paths: Callable[[int], str]) -> Iterator[Problem]:
    """Arrays that are donated and used a second time in the same call."""
    first: dict[int, int] = {}
    given = set(donate)
    for i, x in enumerate(leaves):
        if not isinstance(x, jax.Array):
            continue
        j = first.setdefault(id(x), i)
        if j != i and (i in given or j in given):
            yield Problem(
                "donation",
                f"{paths(i)}: {x.dtype}{list(x.shape)}",
                f"the same array as {paths(j)}",
                "an array of its own",
                "one of the two is donated, and its memory can be given away only once",
                "donate neither, or pass a copy: jnp.array(x, copy=True)",
            )


def positions(argnums: int | Sequence[int], fn: Callable[..., Any], name: str) -> tuple[tuple[int, ...], list[Problem]]:
    """Positions of arguments as given, and what is wrong with them; negative ones count from the end of a call."""
    nums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return nums, []
    kinds = [p.kind for p in parameters]
    n = sum(k in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for k in kinds)
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return nums, []
    return nums, [
        Problem(
            "argument",
            f"compile(..., {name}={argnums!r})",
            f"position {i}",
            f"{-n}..{n - 1}" if n else "none",
            f"{getattr(fn, '__name__', 'the function')} takes {n} positional argument{'s' * (n != 1)}",
            "count positions from 0",
        )
        for i in nums
        if not -n <= i < n
    ]


def resolve_inputs(
    in_sbp: Any, args: Sequence[Any], kwargs: Any, paths: Sequence[str], placement: Placement
) -> tuple[list[NdSbp | None], list[Problem]]:
    """One signature per argument leaf; keyword arguments are AUTO."""
    n_kwargs = len(jax.tree.leaves(kwargs))
    positional = paths[: len(paths) - n_kwargs]
    if type(in_sbp) in (list, tuple) and not is_leaf(in_sbp) and len(in_sbp) != len(args):
        by_keyword = "; those given by keyword are AUTO" if kwargs else ""
        problem = Problem(
            "signature",
            "in_sbp",
            f"{len(in_sbp)} entr{'y' if len(in_sbp) == 1 else 'ies'}",
            f"{len(args)}: one per positional argument that is not static",
            f"the call has {len(args)} such argument{'s' * (len(args) != 1)}{by_keyword}",
            "sbp.AUTO (or None) for an argument leaves it open",
        )
        return [None] * len(paths), [problem]
    sbps, problems = resolve(in_sbp, tuple(args), positional, placement, "in_sbp")
    return [*sbps, *[None] * n_kwargs], problems


def ties(args: Sequence[Any], out: Any, out_sbp: Sequence[NdSbp | None]) -> tuple[int | None, ...]:
    """For each result leaf, the argument leaf that it comes back as.

    A result (or an element of a result tuple) whose tree, shapes and dtypes equal those of an argument is that
    argument's next value; a leaf whose signature was given is not tied. Each argument is taken once, in order.
    """
    results = list(out) if isinstance(out, tuple | list) and not hasattr(out, "_fields") else [out]
    start, free = 0, []
    for arg in args:
        n = len(jax.tree.leaves(arg))
        free.append((_kind(arg), start))
        start += n
    tied: list[int | None] = []
    for result in results:
        kind, n = _kind(result), len(jax.tree.leaves(result))
        given = out_sbp[len(tied) : len(tied) + n]
        match = next((f for f in free if f[0] == kind), None) if None in given else None
        if match is None:
            tied += [None] * n
            continue
        free.remove(match)
        tied += [match[1] + k if nd is None else None for k, nd in enumerate(given)]
    return tuple(tied)


def _kind(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((tuple(x.shape), x.dtype) for x in leaves)
