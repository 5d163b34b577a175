"""Arguments of a call: checked, named, and moved to the shardings of a program."""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import primitives
from jax.sharding import AxisType, NamedSharding
from numpy.typing import NDArray

from sbp.compat import untyped
from sbp.compat.core import ARRAY, is_key, setting
from sbp.compat.untyped import DType, Leaf
from sbp.errors import PlacementError, Problem
from sbp.options import Options
from sbp.passes.program.effects import OUTER_REF, refuse
from sbp.placement import Placement, as_placement, with_types_of
from sbp.runtime.call.binding import Static
from sbp.runtime.call.usage_errors import check_options

Abstract: TypeAlias = tuple[tuple[int, ...], DType, bool]
"""Shape, dtype and weakness of a leaf: what a compiled program depends on."""

LeafNames: TypeAlias = Callable[[], Sequence[str]]
"""Makes the names of all leaves of a call."""

Host: TypeAlias = NDArray[Any] | np.generic

WIDE: dict[DType, type[np.integer]] = {np.dtype(np.int64): np.int32, np.dtype(np.uint64): np.uint32}
NOT_TAKEN = object()  # stands for a leaf that cannot be taken, where the others are still checked


def abstract(leaf: Leaf) -> Abstract:
    """The shape, dtype and weak type of a leaf, as JAX would trace it.

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


def with_types(placement: Placement, leaves: Sequence[Leaf]) -> Placement:
    """The placement with the axis types of the arguments, where it leaves them open.

    These are the types of the first argument on explicit axes of the same names; results of `jax.jit` have
    those of their mesh.
    """
    if placement.axis_types:
        return placement
    shape = dict(zip(placement.axes, placement.shape, strict=True))
    held = (x.sharding for x in leaves if isinstance(x, jax.Array | jax.ShapeDtypeStruct))
    for mesh in (lies.mesh for lies in held if isinstance(lies, NamedSharding)):
        if AxisType.Explicit in mesh.axis_types and dict(mesh.shape) == shape:
            return with_types_of(placement, mesh.axis_names, [t.name for t in mesh.axis_types])
    return placement


def leaves_key(leaves: Sequence[Leaf]) -> tuple[Any, ...] | None:
    """A key of the leaves that decides which program runs, found quickly; None if a leaf has to be checked.

    Leaves with equal keys have equal `abstract`, and are valid. Whether an array still exists is checked each
    time: JAX 0.10 crashes if it does not.

    >>> a, b = jax.numpy.ones(2), jax.numpy.zeros(2)
    >>> leaves_key([a, np.ones(2), 1.0]) == leaves_key([b, np.zeros(2), 2.0]), leaves_key(["text"])
    (True, None)
    """
    if list(map(type, leaves)).count(ARRAY) == len(leaves):
        return None if any(map(ARRAY.is_deleted, leaves)) else tuple(map(attrgetter("aval"), leaves))
    out = tuple([_seen(x) for x in leaves])
    return None if any(x is None for x in out) else out


def _seen(leaf: Leaf) -> Any:
    """The key of one leaf, as in `leaves_key`."""
    kind = type(leaf)
    if kind is ARRAY:
        return None if leaf.is_deleted() else leaf.aval
    if kind in (bool, float, complex):
        return kind
    if kind is int:
        return kind if -(2**31) <= leaf < 2**31 else None
    if isinstance(leaf, np.ndarray | np.generic):
        return None if _cut(leaf) is not None else (np.ndarray, leaf.shape, leaf.dtype)
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or leaf.is_deleted():
        return None
    return leaf.shape, leaf.dtype


def weaken(x: jax.Array) -> jax.Array:
    """The same value with a weak type: it came from Python scalars, and `shard_map` drops that."""
    weak: jax.Array = primitives.convert_element_type_p.bind(
        x, new_dtype=x.dtype, weak_type=True, sharding=None
    )
    return weak


def is_weak(leaf: Leaf) -> bool:
    """Whether a result has a weak type; False for values that JAX cannot take."""
    try:
        return abstract(leaf)[2]
    except TypeError:
        return False


def struct(a: Abstract, lies: NamedSharding | None = None) -> jax.ShapeDtypeStruct:
    """The argument as a `jax.ShapeDtypeStruct`; `lies` is its sharding, if that is part of its type."""
    return untyped.struct(a[0], a[1], weak_type=a[2], sharding=lies)


def check_leaf(leaf: Leaf, i: int, names: LeafNames, concrete: bool) -> Problem | None:
    """The problem of leaf `i` of a call, or None.

    Arguments:
      names: of all leaves; asked only if there is a problem.
      concrete: whether the program will run, so that values are needed.
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


def _traced(leaf: jax.core.Tracer[Any], path: str) -> Problem:
    return Problem(
        "argument",
        path,
        f"a value that is being traced: {jax.typeof(leaf).str_short()}",
        "arrays",
        "a Program is the outermost thing: it cannot be called inside jit, grad, vmap or another program",
        "compile the outer function instead, which calls the plain one: sbp.compile(jax.grad(fn), ...)",
    )


def _no_array(leaf: object, path: str, why: str) -> Problem:
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


def _too_wide(leaf: Host, i: int, names: LeafNames) -> Problem | None:
    """The problem of 64-bit integers that JAX would silently cut to 32 bits."""
    cut = _cut(leaf)
    if cut is None:
        return None
    low, high, narrow = cut
    return Problem(
        "argument",
        names()[i],
        f"{leaf.dtype}{list(np.shape(leaf))} with values {low}..{high}",
        f"values in {narrow.min}..{narrow.max}, or JAX with 64-bit types",
        "with 64-bit types off, JAX would silently cut these integers to 32 bits",
        "jax.config.update('jax_enable_x64', True), or map the values to a smaller range first",
    )


def _cut(leaf: Host) -> tuple[Any, Any, np.iinfo[Any]] | None:
    """Least and largest value, and the range that JAX would cut them to; None if nothing is cut."""
    if leaf.dtype not in WIDE or not leaf.size or setting("jax_enable_x64"):
        return None
    narrow = np.iinfo(WIDE[leaf.dtype])
    low, high = leaf.min(), leaf.max()
    return None if low >= narrow.min and high <= narrow.max else (low, high, narrow)


def check_static(static: Sequence[Static]) -> Iterator[Problem]:
    """The problems of static arguments that cannot be part of a key."""
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


def check_compile(fn: object, placement: object, options: object) -> Iterator[Problem]:
    """The problems of the arguments of `compile`."""
    if not callable(fn):
        yield Problem(
            "argument",
            "compile(fn, ...)",
            f"{fn!r:.60}",
            "a function",
            "the first argument is the single-device program",
            "sbp.compile(train_step, placement)",
        )
    try:
        as_placement(placement, "compile(fn, placement)")
    except PlacementError as e:
        yield from e.problems
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
