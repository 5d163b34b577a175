"""Arguments of a call: checked, named, and brought to where the program wants them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import primitives

from sbp.compat import is_key
from sbp.errors import Problem
from sbp.layout import at_rest
from sbp.options import Options
from sbp.passes.effects import OUTER_REF, refuse
from sbp.passes.explain import Plan
from sbp.passes.trace import Traced
from sbp.placement import Placement
from sbp.resolve import check_fit, is_leaf, resolve
from sbp.runtime.options import check_options
from sbp.signature import NdSbp, format_sbp

Abstract: TypeAlias = tuple[tuple[int, ...], Any, bool]
"""Shape, dtype and weakness of a leaf: what a compiled program depends on."""

Names: TypeAlias = Callable[[], Sequence[str]]
"""Makes the names of all leaves of a call."""

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
        return leaf.shape, leaf.dtype, bool(aval.weak_type)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        dtype = leaf.dtype if is_key(leaf.dtype) else jax.dtypes.canonicalize_dtype(leaf.dtype)
        return tuple(leaf.shape), dtype, bool(leaf.weak_type)
    aval = jax.typeof(leaf)
    return tuple(aval.shape), jax.dtypes.canonicalize_dtype(aval.dtype), bool(aval.weak_type)


def weaken(x: Any) -> Any:
    """The same value, weakly typed: it came from Python scalars, and `shard_map` forgets that."""
    return primitives.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)


def is_weak(leaf: Any) -> bool:
    """Whether a result is weakly typed; what JAX cannot take is not."""
    try:
        return abstract(leaf)[2]
    except TypeError:
        return False


def struct(a: Abstract) -> jax.ShapeDtypeStruct:
    """The same as JAX's own description."""
    return jax.ShapeDtypeStruct(a[0], a[1], weak_type=a[2])


def check_leaf(leaf: Any, i: int, names: Names, concrete: bool) -> Problem | None:
    """What keeps leaf `i` of a call from being taken.

    Arguments:
      names: of all leaves; asked for only if there is a problem.
      concrete: whether the program is to run, so that values are needed.
    """
    if isinstance(leaf, jax.core.Tracer):
        return _traced(leaf, names()[i])
    if isinstance(leaf, jax.Ref):
        return refuse(f"{names()[i]}: {jax.typeof(leaf).str_short()}", OUTER_REF, "argument")
    if isinstance(leaf, jax.Array):
        return _deleted(leaf, names()[i]) if leaf.is_deleted() else None
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return _no_value(leaf, names()[i]) if concrete else None
    try:
        jax.typeof(leaf)
    except OverflowError as e:
        return _too_wide(np.asarray(leaf), i, names) or _no_array(leaf, names()[i], str(e))
    except TypeError as e:
        return _no_array(leaf, names()[i], str(e).splitlines()[0])
    return _too_wide(leaf, i, names) if isinstance(leaf, np.ndarray | np.generic) else None


def _traced(leaf: Any, path: str) -> Problem:
    return Problem(
        "argument",
        path,
        f"a value that is being traced: {leaf.aval.str_short()}",
        "arrays",
        "a Program is the outermost thing: it cannot be called inside jit, grad, vmap or another program",
        "compile the outer function instead, which calls the plain one: sbp.compile(jax.grad(fn), ...)",
    )


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
        f"{leaf.dtype}{list(leaf.shape)} whose memory is gone: donated to an earlier call, or deleted",
        "an array that still exists",
        "donate_argnums gives the memory of an argument to the results",
        "use what that call returned: params, ... = step(params, ...); or leave donate_argnums out",
    )


def _too_wide(leaf: Any, i: int, names: Names) -> Problem | None:
    """64-bit integers that JAX would silently cut to 32 bits."""
    if leaf.dtype not in WIDE or jax.config.read("jax_enable_x64") or not leaf.size:
        return None
    narrow = np.iinfo(WIDE[leaf.dtype])
    low, high = leaf.min(), leaf.max()
    if low >= narrow.min and high <= narrow.max:
        return None
    return Problem(
        "argument",
        names()[i],
        f"{leaf.dtype}{list(np.shape(leaf))} with values {low}..{high}",
        f"values in {narrow.min}..{narrow.max}, or JAX with 64-bit types",
        "with 64-bit types off, JAX would cut these integers to 32 bits without a word",
        "jax.config.update('jax_enable_x64', True), or map the values to a smaller range first",
    )


def check_donated(leaves: Sequence[Any], donate: Sequence[int], names: Names) -> Iterator[Problem]:
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
                f"{names()[i]}: {x.dtype}{list(x.shape)}",
                f"the same array as {names()[j]}",
                "an array of its own",
                "one of the two is donated, and its memory can be given away only once",
                "donate neither, or pass a copy: jnp.array(x, copy=True)",
            )


def check_static(static: Sequence[tuple[int, type, Any]]) -> Iterator[Problem]:
    """Static arguments that a program cannot be remembered by."""
    for i, kind, value in static:
        try:
            hash(value)
        except TypeError as e:
            yield Problem(
                "argument",
                f"static argument {i}",
                f"{value!r:.60}",
                "a value that can be hashed and compared",
                f"a program is compiled once per value of its static arguments, and {e}",
                f"a tuple or a frozen dataclass instead of a {kind.__name__}",
            )


def check_compile(fn: Any, placement: Any, options: Any, both: Sequence[int]) -> Iterator[Problem]:
    """What is wrong with the arguments of `compile`; `both` are positions that are static and donated."""
    if not callable(fn):
        yield Problem(
            "argument",
            "compile(fn, ...)",
            f"{fn!r:.60}",
            "a function",
            "the first argument is the single-device program",
            "sbp.compile(train_step, placement)",
        )
    if not isinstance(placement, Placement):
        mesh = isinstance(placement, jax.sharding.Mesh)
        yield Problem(
            "placement",
            "compile(fn, placement)",
            f"{placement!r:.80}",
            "an sbp.placement",
            "the second argument says which devices the program runs on",
            "sbp.Placement.from_mesh(mesh)" if mesh else "sbp.placement('cpu', shape=(8,))",
        )
    if options is not None and not isinstance(options, Options):
        yield Problem(
            "argument",
            "compile(..., options=...)",
            f"{options!r:.60}",
            "sbp.Options(...)",
            f"a {type(options).__name__} is none",
            "sbp.Options(memory_limit=16e9)",
        )
    elif options is not None:
        yield from check_options(options)
    for i in both:
        yield Problem(
            "argument",
            "compile(..., static_argnums=..., donate_argnums=...)",
            f"position {i} in both",
            "each position in one of them",
            "a static argument is a Python value: it has no memory to donate",
            f"leave {i} out of donate_argnums",
        )


def positions(
    argnums: int | Sequence[int], fn: Callable[..., Any], name: str
) -> tuple[tuple[int, ...], list[Problem]]:
    """Positions of arguments as given, and what is wrong with them."""
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


def misread(
    in_sbp: Any, args: Sequence[Any], kwargs: Any, paths: Sequence[str], placement: Placement
) -> list[Problem]:
    """What is wrong with signatures of a function that could not be traced, and may have stages."""
    whole = [placement, *(placement.split(a)[0] for a in range(placement.ndim) if placement.ndim > 1)]
    return min((resolve_inputs(in_sbp, args, kwargs, paths, p)[1] for p in whole), key=len)


def adopt(
    plan: Any,
    traced: Traced,
    ins: Sequence[NdSbp | None],
    outs: Sequence[NdSbp | None],
    placement: Placement,
) -> tuple[list[NdSbp | None], list[NdSbp | None], list[Problem]]:
    """The signatures of a plan for every argument and result that has none, and why they do not fit."""

    def problem(got: str, legal: str, why: str, fix: str) -> list[Problem]:
        return [Problem("argument", "Options(plan=...)", got, legal, why, fix)]

    if not isinstance(plan, Plan):
        wrong = problem(
            f"{plan!r:.60}", "a Plan", f"a {type(plan).__name__} is none", "sbp.load_plan('plan.json')"
        )
        return list(ins), list(outs), wrong
    again = "make the plan again with Program.plan(...), or leave the option out"
    if plan.placement.shape != placement.shape:
        wrong = problem(
            f"a plan for {plan.placement}",
            f"a plan for {placement}",
            "a signature has one entry per axis, and its splits fit the axis sizes",
            again,
        )
        return list(ins), list(outs), wrong
    graph = traced.graph
    out: list[list[NdSbp | None]] = []
    problems: list[Problem] = []
    for what, paths, theirs, given, planned, shapes in (
        ("arguments", traced.in_paths, plan.in_paths, ins, plan.in_sbp, graph.inputs),
        ("results", traced.out_paths, plan.out_paths, outs, plan.out_sbp, graph.outputs),
    ):
        if tuple(paths) != tuple(theirs):
            missing = [p for p in paths if p not in theirs]
            unknown = [p for p in theirs if p not in paths]
            odd = [f"no entry for {p}" for p in missing[:3]] + [f"an entry for {p}" for p in unknown[:3]]
            problems += problem(
                f"a plan of {plan.name!r} with {', '.join(odd) or 'another order'}",
                f"a plan with the same {len(paths)} {what}",
                "a plan is for one function and one tree of arguments",
                again,
            )
            out.append(list(given))
            continue
        merged: list[NdSbp | None] = []
        for path, own, nd, x in zip(paths, given, planned, shapes, strict=False):
            value = graph.operand(x)
            if own is None:
                where = f"{path}: {value.dtype}{list(value.shape)}, Options(plan=...)"
                problems += _plan_fit(nd, value, where, placement, again)
            merged.append(nd if own is None else own)
        out.append(merged)
    return out[0], out[1], problems


def _plan_fit(nd: NdSbp, value: Any, where: str, placement: Placement, fix: str) -> Iterator[Problem]:
    """Why a planned signature does not fit a tensor: of other dims, or of a size that does not divide."""
    found = list(check_fit(nd, value.shape, value.dtype, where, placement))
    yield from found
    if not found and at_rest(value.shape, nd, placement.shape) != nd:
        yield Problem(
            "argument",
            where,
            format_sbp(nd),
            format_sbp(at_rest(value.shape, nd, placement.shape)),
            "the plan was made for other sizes: this one does not divide by the axis",
            fix,
        )


def ties(args: Sequence[Any], out: Any, out_sbp: Sequence[NdSbp | None]) -> tuple[int | None, ...]:
    """For each result leaf, the argument leaf that it comes back as.

    A result (or an element of a result tuple) whose tree, shapes and dtypes equal those of an argument is
    that argument's next value; a leaf whose signature was given is not tied. Each argument is taken once.
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
