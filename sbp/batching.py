"""`microbatch`: a function of a batch, run on parts of it one after the other, its results combined."""

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp.annotation import MICROBATCH
from sbp.compat import core
from sbp.compat.untyped import DType, Leaf, Prefix, PyTree, TreeDef
from sbp.errors import ArgumentError, Problem, raise_all

LEGAL = ("mean", "sum", "rows")

P = ParamSpec("P")
R = TypeVar("R")

Maybe: TypeAlias = list[jax.Array | None]
"""Per result an array, or None where it is combined in another way."""
Sums: TypeAlias = tuple[Maybe, jax.Array | None]
"""What is added up so far: results, and weights if parts have any."""


def microbatch(
    fn: Callable[P, R],
    n: int,
    *,
    batch_args: int | Sequence[int],
    reduce: Prefix = "mean",
) -> Callable[P, R]:
    """Runs a function on `n` parts of its batch, one after the other, and combines the results.

    Part i has the rows i, n + i, 2n + i, ... of every batch argument. So if the batch is split over devices,
    every part is split in the same way, and nothing moves. A typed PRNG key in a batch argument is folded
    with i.

    If the function's ops run on several placements (`sbp.on`), the compiled program is a pipeline, and the
    parts are its micro-batches. Otherwise this is gradient accumulation. In both cases gradients stay partial
    sums until the last part is done.

    Arguments:
      fn: a function of arrays in pytrees, such as `jax.value_and_grad(loss)`. The function that is returned
        takes the same arguments, by position.
      n: how many parts; it divides the batch.
      batch_args: positions of the arguments that have the batch as dim 0 of every leaf.
      reduce: how results are combined, as a pytree prefix of them: "mean", "sum", or "rows" for results with
        one row per row of the batch, which come back in the batch's order. Or a function with the arguments
        of `fn` that returns the weight of a part in a weighted mean, such as its number of tokens. A part of
        weight zero is left out with its derivatives, even if its results are NaN. 16-bit floats are added
        up in 32 bits.

    Raises:
      ArgumentError: for a number of parts that does not divide the batch, or another `reduce`.

    Source: GPipe (Huang et al., 2019), section 2.2.

    >>> total = microbatch(lambda w, x: {"loss": (w * x).sum()}, 2, batch_args=1, reduce="sum")
    >>> float(total(2.0, jnp.arange(4.0))["loss"])
    12.0
    """
    at = (batch_args,) if isinstance(batch_args, int) else tuple(batch_args)

    @functools.wraps(fn, updated=())
    def run(*args: PyTree) -> PyTree:
        places = _checked(fn, n, at, args, reduce)
        fixed = [a for i, a in enumerate(args) if i not in places]
        with jax.named_scope(MICROBATCH):
            parts = [_parts(args[i], n) for i in places]

            def full(i: jax.Array, part: Sequence[PyTree]) -> list[PyTree]:
                """All arguments of part `i`."""
                given = iter(map(functools.partial(_folded, i), part, (args[j] for j in places)))
                rest = iter(fixed)
                return [next(given) if j in places else next(rest) for j in range(len(args))]

            return _accumulated(fn, n, full, parts, reduce)

    # That arguments are given by position alone cannot be said of a function with defaults.
    return cast("Callable[P, R]", run)


def _accumulated(
    fn: Callable[..., PyTree],
    n: int,
    full: Callable[[jax.Array, Sequence[PyTree]], list[PyTree]],
    parts: Sequence[PyTree],
    reduce: Prefix,
) -> PyTree:
    """The combined results of all parts."""

    def one(i: jax.Array, part: Sequence[PyTree]) -> tuple[list[jax.Array], jax.Array | None]:
        """Results of a part, and its weight."""
        args = full(i, part)
        weight = reduce(*args) if callable(reduce) else None
        if weight is not None:
            args = [_unless(weight == 0, a) for a in args]
        leaves, tree = jax.tree.flatten(fn(*args))
        leaves = [jnp.asarray(x) for x in leaves]
        trees.append(tree)
        return leaves, weight

    trees: list[TreeDef] = []
    leaves, weight = jax.eval_shape(one, np.int32(0), jax.tree.map(lambda x: x[0], parts))
    tree = trees[0]
    ways = ["mean"] * len(leaves) if callable(reduce) else _ways(reduce, tree)
    raise_all([p for w, x in zip(ways, leaves, strict=True) if w == "rows" for p in _rowless(x, parts, n)])
    begin = [
        None if w == "rows" else jnp.zeros(x.shape, _wide(x.dtype, w))
        for w, x in zip(ways, leaves, strict=True)
    ]

    def body(carry: Sums, xs: tuple[jax.Array, Sequence[PyTree]]) -> tuple[Sums, Maybe]:
        sums, total = carry
        out, weight = one(*xs)
        if weight is not None and total is not None:
            total = total + weight
            # Selected, not multiplied alone: zero times NaN is NaN.
            out = [jnp.where(weight == 0, jnp.zeros((), x.dtype), x) * weight for x in out]
        added = [None if s is None else s + x.astype(s.dtype) for s, x in zip(sums, out, strict=True)]
        return (added, total), [x if w == "rows" else None for w, x in zip(ways, out, strict=True)]

    zero = None if weight is None else jnp.zeros(weight.shape, weight.dtype)
    (sums, total), rows = lax.scan(body, (begin, zero), (jnp.arange(n, dtype=np.int32), parts))
    count = n if total is None else total

    def ended(way: str, x: jax.ShapeDtypeStruct, s: jax.Array | None, r: jax.Array | None) -> jax.Array:
        if r is not None:
            return jnp.moveaxis(r, 0, 1).reshape(n * r.shape[1], *r.shape[2:])
        assert s is not None
        return (s / count).astype(_result(x.dtype)) if way == "mean" else s.astype(x.dtype)

    return jax.tree.unflatten(tree, [ended(*one) for one in zip(ways, leaves, sums, rows, strict=True)])


def _unless(left_out: jax.Array, arg: PyTree) -> PyTree:
    """An argument of a part of the batch; no gradient flows back into it if the part is left out."""

    def leaf(x: Leaf) -> Leaf:
        taken = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
        return _same(x, left_out) if taken else x

    return jax.tree.map(leaf, arg)


@jax.custom_jvp
def _same(x: jax.Array, left_out: jax.Array) -> jax.Array:
    """Its first argument, with the derivative of a constant where it is left out."""
    return x


@_same.defjvp
def _same_jvp(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    x, left_out = primals
    return x, jnp.where(left_out, jnp.zeros((), x.dtype), tangents[0])


def _wide(dtype: DType, way: str) -> DType:
    """In what a result is added up."""
    if jnp.issubdtype(dtype, jnp.floating) and core.itemsize(dtype) < 4:
        return np.dtype(np.float32)
    if way == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.result_type(float)
    return np.dtype(np.int32) if dtype == bool else dtype


def _result(dtype: DType) -> DType:
    """The dtype of a mean."""
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)


def _parts(arg: PyTree, n: int) -> PyTree:
    """The parts of an argument, stacked: `[b, ...]` -> `[n, b / n, ...]`; `n` copies of a key."""

    def leaf(x: Leaf) -> jax.Array:
        if _single_key(x):
            return jnp.broadcast_to(x, (n,))
        x = jnp.asarray(x)
        return jnp.moveaxis(x.reshape(x.shape[0] // n, n, *x.shape[1:]), 1, 0)

    return jax.tree.map(leaf, arg)


def _folded(i: jax.Array, part: PyTree, arg: PyTree) -> PyTree:
    """A part of an argument with its keys folded."""
    return jax.tree.map(lambda x, whole: jax.random.fold_in(x, i) if _single_key(whole) else x, part, arg)


def _single_key(x: Leaf) -> bool:
    return core.is_key(getattr(x, "dtype", None)) and np.ndim(x) == 0


def _ways(reduce: Prefix, tree: TreeDef) -> list[str]:
    """How each result is combined."""
    results = jax.tree.unflatten(tree, range(tree.num_leaves))
    prefix: list[str] = []
    jax.tree.map(lambda way, sub: prefix.extend([way] * len(jax.tree.leaves(sub))), reduce, results)
    return prefix


def _checked(
    fn: Callable[..., PyTree], n: int, at: Sequence[int], args: Sequence[PyTree], reduce: Prefix
) -> tuple[int, ...]:
    """The positions of batch arguments, from the front.

    Raises:
      ArgumentError: for everything that is wrong with the call.
    """
    where = f"microbatch({getattr(fn, '__name__', fn)}, {n}, ...)"
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
        raise ArgumentError(
            Problem("argument", where, f"n={n!r}", "an integer of at least 1", "a batch has parts", "n=4")
        )
    wrong = [i for i in at if not -len(args) <= i < len(args)]
    if wrong or not at:
        legal = f"positions 0..{len(args) - 1}"
        why = "batch_args are positions of arguments of the call"
        raise ArgumentError(Problem("argument", where, f"batch_args={tuple(at)}", legal, why, "batch_args=1"))
    found = [w for w in jax.tree.leaves(reduce) if not (callable(reduce) or w in LEGAL)]
    problems = [_no_way(where, w) for w in dict.fromkeys(found)]
    places = tuple(i % len(args) for i in at)
    sizes: dict[int, str] = {}
    for i in places:
        for path, x in jax.tree_util.tree_flatten_with_path(args[i])[0]:
            if not _single_key(x):
                name = f"args[{i}]{jax.tree_util.keystr(path)}"
                problems += _indivisible(where, name, np.shape(x), n)
                sizes.setdefault(np.shape(x)[0] if np.ndim(x) else 0, name)
    if not problems and len(sizes) > 1:
        got = ", ".join(f"{name} has {size} rows" for size, name in sizes.items())
        why = "a part has the same rows of every batch argument"
        problems.append(Problem("argument", where, got, "one size of batch", why, "check batch_args"))
    raise_all(problems)
    return places


def _indivisible(where: str, name: str, shape: Sequence[int], n: int) -> list[Problem]:
    if shape and shape[0] % n == 0:
        return []
    got = f"{name} of shape {list(shape)}"
    near = [m for m in range(n, 0, -1) if shape and shape[0] % m == 0][:1]
    fix = (
        f"n={near[0]}, or a batch of {-(-shape[0] // n) * n}"
        if near and shape[0]
        else "drop it from batch_args"
    )
    return [Problem("argument", where, got, f"dim 0 a multiple of {n}", "all parts have the same shape", fix)]


def _no_way(where: str, way: object) -> Problem:
    legal = ", ".join(map(repr, LEGAL)) + ", or a function that gives a part's weight"
    why = "results of the parts are combined"
    return Problem("argument", where, f"reduce={way!r}", legal, why, 'reduce="mean"')


def _rowless(x: jax.ShapeDtypeStruct, parts: Sequence[PyTree], n: int) -> list[Problem]:
    """What is wrong with a result that is to have a row per row of the batch."""
    sizes = {leaf.shape[1] for leaf in jax.tree.leaves(parts) if leaf.ndim > 1}
    if x.ndim and (not sizes or x.shape[0] in sizes):
        return []
    got = f"a result of shape {list(x.shape)} of each of {n} parts"
    legal = f"dim 0 of size {', '.join(map(str, sizes))}"
    why = 'with "rows" a result has a row per row of the batch'
    return [Problem("argument", 'microbatch(..., reduce="rows")', got, legal, why, '"mean" or "sum" for it')]
