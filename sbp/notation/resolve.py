"""Signatures of arguments and results: pytree prefixes, PartitionSpecs, NamedShardings -> N-D signatures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import keystr, tree_flatten_with_path

from sbp.compat.core import is_key
from sbp.compat.untyped import DType, Prefix, PyTree, TreeDef, partition_spec
from sbp.errors import Problem
from sbp.notation.suggestions import suggestion
from sbp.placement import Placement
from sbp.signature import (
    AUTO,
    AutoSplit,
    B,
    NdSbp,
    Partial,
    Signature,
    Split,
    format_sbp,
    has_partial,
    is_signature,
    normalise,
)

Child: TypeAlias = tuple[Any, PyTree]
"""The key of a child of a container, of one of JAX's classes of keys, and the child."""

MOST_DIMS = 64
"""More than any tensor has."""
MOST_NAMED = 4
"""Entries of a container that a message outlines, and scalars that a remark names."""


def is_leaf(x: Prefix) -> bool:
    """Whether part of a signature tree is one tensor's signature; a tuple is always a container.

    >>> is_leaf([Split(0), B]), is_leaf((Split(0), B)), is_leaf([[Split(0), B]])
    (True, False, False)
    """
    if x is None or x is AUTO or is_signature(x) or isinstance(x, PartitionSpec | NamedSharding):
        return True
    return isinstance(x, list) and len(x) > 0 and all(map(is_signature, x))


@dataclass(frozen=True, slots=True)
class _Given:
    """The signature of a leaf, and whether it was given for a whole subtree around the leaf."""

    signature: Prefix
    for_subtree: bool = False


def resolve(
    prefix: Prefix, tree: PyTree, paths: Sequence[str], placement: Placement, name: str
) -> tuple[list[NdSbp | None], list[Problem]]:
    """One signature (None: AUTO) per leaf of `tree`, and all mistakes in them.

    A signature for a whole subtree leaves its scalars B, for instance an optimizer's step count. Any other
    leaf without the dim that is split is a mistake, and so is a split that is given for a scalar itself.

    Arguments:
      prefix: a pytree prefix of signatures.
      tree: arrays or `ShapeDtypeStruct`s; a leaf without a shape is refused elsewhere, and not checked.
      paths: the name of each leaf.
      name: the argument that holds the signatures, "in_sbp" or "out_sbp".
    """
    given: list[_Given] = []
    problems = list(_spread(prefix, tree, name, given, placement.ndim))
    out: list[NdSbp | None] = []
    for part, leaf, path in zip(given, jax.tree.leaves(tree), paths, strict=True):
        if not hasattr(leaf, "shape"):
            out.append(None)
            continue
        where = f"{path}: {leaf.dtype}{list(leaf.shape)}, {name}"
        nd, found = _one(part, leaf.shape, leaf.dtype, where, placement)
        out.append(nd)
        problems.extend(found)
    return out, problems


def scalar_notes(prefix: Prefix, tree: PyTree, paths: Sequence[str], name: str) -> list[str]:
    """A remark for each signature of a subtree that leaves scalars in it B; arguments as of `resolve`.

    >>> state = {"count": jax.ShapeDtypeStruct((), "int32"), "mu": jax.ShapeDtypeStruct((8,), "float32")}
    >>> scalar_notes(([Split(0)],), (state,), ["s.count", "s.mu"], "in_sbp")
    ['in_sbp: [S(0)] leaves scalars B: s.count']
    """
    given: list[_Given] = []
    list(_spread(prefix, tree, name, given))
    left: dict[str, list[str]] = {}
    for part, leaf, path in zip(given, jax.tree.leaves(tree), paths, strict=True):
        if part.for_subtree and getattr(leaf, "shape", None) == () and _splits(part.signature):
            left.setdefault(_text(part.signature), []).append(path)
    return [
        f"{name}: {signature} leaves scalars B: {', '.join(found[:MOST_NAMED])}"
        + (f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else "")
        for signature, found in left.items()
    ]


def _splits(s: Prefix) -> bool:
    """Whether a leaf of a signature tree splits anything."""
    if isinstance(s, PartitionSpec | NamedSharding):
        return any((s.spec if isinstance(s, NamedSharding) else s).partitions)
    return any(isinstance(e, Split | AutoSplit) for e in (s if isinstance(s, list | tuple) else (s,)))


def _text(s: Prefix) -> str:
    """A leaf of a signature tree as its user wrote it."""
    return format_sbp(s) if isinstance(s, list | tuple) and not isinstance(s, PartitionSpec) else str(s)


def _spread(prefix: Prefix, tree: PyTree, where: str, out: list[_Given], axes: int = 0) -> Iterator[Problem]:
    """Gives every leaf of `tree` its part of `prefix`; AUTO, and a problem, if their structures differ.

    Arguments:
      axes: the number of axes of the placement; needed for problems.
    """
    n_leaves = len(jax.tree.leaves(tree))
    if is_leaf(prefix):
        out.extend([_Given(prefix, _children(tree) is not None)] * n_leaves)
        return
    ours, theirs = _children(prefix), _children(tree)
    no_container = ours is None or theirs is None or len(ours) != len(theirs)
    near = suggestion(prefix) if no_container or _nearly_one(prefix, axes) else None
    if theirs is None and type(prefix) is tuple and prefix and all(map(is_signature, prefix)):
        near = "a tuple is a container, with an entry per tensor; a list is a signature", format_sbp(prefix)
    if ours is None or near is not None:
        out.extend([_Given(AUTO)] * n_leaves)
        yield _not_a_signature(prefix, where, near)
    elif theirs is None or not _alike(prefix, tree, ours, theirs):
        out.extend([_Given(AUTO)] * n_leaves)
        yield _not_a_prefix(prefix, tree, where)
    else:
        for (key, part), (_, sub) in zip(ours, theirs, strict=True):
            yield from _spread(part, sub, f"{where}{keystr((key,))}", out, axes)


def _nearly_one(prefix: Prefix, axes: int) -> bool:
    """Whether a list is meant as one signature with a wrong entry, and not as a container.

    On several axes the signatures in a container are lists. So a list with one entry per axis, at least one
    of them a signature, is no container.

    >>> _nearly_one([Split(0), "B"], 2), _nearly_one([Split(0), "B"], 1), _nearly_one([[Split(0), B], "B"], 2)
    (True, False, False)
    """
    if not isinstance(prefix, list | tuple) or not 1 < len(prefix) == axes:
        return False
    holes = any(e is None or e is AUTO for e in prefix)
    return (
        not holes and any(map(is_signature, prefix)) and not any(isinstance(e, list | tuple) for e in prefix)
    )


def _children(x: PyTree) -> list[Child] | None:
    """(key, child) of each child of a container; None if `x` is no container."""
    found = tree_flatten_with_path(x, is_leaf=lambda y: y is not x)[0]
    return None if found and not found[0][0] else [(path[0], child) for path, child in found]


def _alike(prefix: Prefix, tree: PyTree, ours: Sequence[Child], theirs: Sequence[Child]) -> bool:
    """Whether two containers have the same children; a list counts as a tuple."""
    plain = (list, tuple)
    if type(prefix) in plain and type(tree) in plain:
        return len(ours) == len(theirs)

    def one_level(x: PyTree) -> TreeDef:
        return jax.tree.structure(x, is_leaf=lambda y: y is not x)

    return bool(one_level(prefix) == one_level(tree))


def _describe(x: PyTree) -> str:
    """A container, described in a few words."""
    children = _children(x)
    if not children:
        return repr(x)
    if isinstance(x, dict):
        return f"a {type(x).__name__} with keys {', '.join(repr(k) for k in x)}"
    return f"a {type(x).__name__} of {len(children)}"


def _not_a_prefix(prefix: Prefix, tree: PyTree, where: str) -> Problem:
    leaf = hasattr(tree, "shape")
    there = f"one tensor, {tree.dtype}{list(tree.shape)}" if leaf else _describe(tree)
    why = f"{_describe(prefix)} stands for {there}: signatures are a pytree prefix, so containers must match"
    if isinstance(prefix, dict) and isinstance(tree, dict):
        odd = [
            *(f"{k!r} is not there" for k in prefix if k not in tree),
            *(f"{k!r} has no entry" for k in tree if k not in prefix),
        ]
        why = ", ".join(odd) or why
    return Problem(
        "signature",
        where,
        _describe(prefix),
        f"{_describe(tree)}, or one signature for all of it" if _children(tree) else "one signature",
        why,
        f"{_outline(tree)}sbp.AUTO (or None) where the compiler may choose",
    )


def _outline(tree: PyTree) -> str:
    """How a user writes the signatures of a plain container."""
    if type(tree) not in (dict, list, tuple) or not tree:
        return ""
    entries = [f"{k!r}: ..." for k in tree] if isinstance(tree, dict) else ["..."] * len(tree)
    shown = ", ".join(entries if len(entries) <= MOST_NAMED else [*entries[:MOST_NAMED], "and so on"])
    last = "," if len(tree) == 1 else ""
    outlines: dict[type, str] = {dict: f"{{{shown}}}", list: f"[{shown}]", tuple: f"({shown}{last})"}
    return f"{outlines[type(tree)]} with "


def _not_a_signature(s: object, where: str, near: tuple[str, str] | None = None) -> Problem:
    kind = type(s).__name__
    why, fix = near or (f"a {kind} is none of them", "sbp.AUTO lets the compiler choose")
    if isinstance(s, Sharding):
        fix = f"a {kind} names no axes of the placement: jax.sharding.NamedSharding(placement.mesh, spec)"
    return Problem(
        "signature",
        where,
        repr(s),
        "[S(0), B], a PartitionSpec, a NamedSharding, sbp.AUTO or None",
        why,
        fix,
    )


def _one(
    part: _Given, shape: tuple[int, ...], dtype: DType, where: str, placement: Placement
) -> tuple[NdSbp | None, list[Problem]]:
    """The checked signature of one leaf."""
    s = part.signature
    if part.for_subtree and not shape and _splits(s):
        # Checked as that of a tensor that has the dims.
        nd, problems = _one(_Given(s), (1,) * MOST_DIMS, dtype, where, placement)
        return None if nd is None else (B,) * placement.ndim, problems
    if s is None or s is AUTO:
        return None, []
    if isinstance(s, NamedSharding):
        problem = _foreign_mesh(s, where, placement)
        if problem is not None:
            return None, [problem]
        s = s.spec
    if isinstance(s, PartitionSpec):
        return from_partition_spec(s, shape, where, placement)
    nd = (s,) if is_signature(s) else tuple(s)
    problems = list(check_fit(nd, shape, dtype, where, placement))
    if has_partial(nd):
        problems.append(
            Problem(
                "signature",
                where,
                format_sbp(nd),
                "S(dim) or B",
                "P never crosses the boundary of a program: a jax.Array holds whole values",
                "B, or annotate(x, [P, ...]) inside the model",
            )
        )
    return (None if problems else normalise(nd, len(shape))), problems


def check_fit(
    nd: Sequence[Signature], shape: Sequence[int], dtype: DType, where: str, placement: Placement
) -> Iterator[Problem]:
    """The problems of a signature for a tensor on a placement."""
    axes = ", ".join(placement.axes)
    if len(nd) != placement.ndim:
        yield Problem(
            "signature",
            where,
            f"{format_sbp(nd)}: {len(nd)} signature{'s' * (len(nd) != 1)}",
            f"{placement.ndim}: one per axis of {placement} ({axes})",
            f"the list is {'longer' if len(nd) > placement.ndim else 'shorter'} than the placement",
            f"for one signature per argument write a tuple: ({', '.join(map(str, nd))})"
            if placement.ndim == 1 and len(nd) > 1
            else f"for example {format_sbp([*nd, *[B] * placement.ndim][: placement.ndim])}",
        )
    n = len(shape)
    for s in nd:
        if isinstance(s, Split) and not -n <= s.dim < n:
            yield Problem(
                "signature",
                where,
                format_sbp(nd),
                f"S(0)..S({n - 1}) or B" if n else "B: a scalar has no dims",
                f"{s} splits a dim that a tensor of {n} dim{'s' * (n != 1)} does not have",
                "count dims from 0; sbp.AUTO lets the compiler choose",
            )
        if isinstance(s, Partial) and (dtype == bool or is_key(dtype)):
            kind = "a PRNG key" if is_key(dtype) else "a boolean"
            yield Problem(
                "signature",
                where,
                format_sbp(nd),
                "S(dim) or B",
                f"{s} of {kind} means nothing: it cannot be reduced",
                "B",
            )


def from_partition_spec(
    spec: PartitionSpec, shape: Sequence[int], where: str, placement: Placement
) -> tuple[NdSbp | None, list[Problem]]:
    """The signature of a PartitionSpec for a tensor on a placement, and the problems in it."""

    def problem(legal: str, why: str, fix: str) -> Problem:
        return Problem("signature", where, str(spec), legal, why, fix)

    out: list[Signature] = [B] * placement.ndim
    problems: list[Problem] = []
    used: list[str] = []
    if spec.unreduced:
        why = "unreduced axes are P, which never crosses the boundary: a jax.Array holds whole values"
        fix = "the spec without unreduced=, or annotate(x, spec) inside the model"
        problems.append(problem("axes that split dims", why, fix))
    if len(spec) > len(shape):
        problems.append(
            problem(
                f"at most {len(shape)} entries: one per dim",
                f"the spec has {len(spec)} entries for a tensor of {len(shape)} dims",
                "leave the others out",
            )
        )
    for dim, entry in enumerate(spec.partitions):
        if entry is PartitionSpec.UNCONSTRAINED:
            problems.append(
                problem(
                    "axis names, tuples of them, or None",
                    "a signature is fixed for the whole tensor or chosen for the whole tensor",
                    "sbp.AUTO for this tensor",
                )
            )
            continue
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        for name in names:
            if name not in placement.axes:
                why, fix = f"{name!r} is not an axis of {placement}", "use the placement's axis names"
            elif name in used:
                why, fix = f"{name!r} stands there twice", "an axis splits one dim"
            else:
                out[placement.axes.index(name)] = Split(dim)
                used.append(name)
                continue
            problems.append(problem(f"axes {', '.join(placement.axes)}, each once", why, fix))
        order = [
            a for a in map(placement.axes.index, used) if out[a] == Split(dim) and placement.shape[a] > 1
        ]
        if order != sorted(order):
            problems.append(
                problem(
                    f"dim {dim} split by {tuple(sorted(names, key=placement.axes.index))}",
                    "a signature splits outer axis first; this spec names an inner axis before an outer one",
                    "exchange the names, or make a placement with the axes in that order",
                )
            )
    return (None if problems else tuple(out)), problems


def _foreign_mesh(sharding: NamedSharding, where: str, placement: Placement) -> Problem | None:
    """The problem if a NamedSharding has other devices than the placement; an abstract mesh has none."""
    mesh = sharding.mesh
    same = tuple(mesh.axis_names) == placement.axes and tuple(mesh.axis_sizes) == placement.shape
    if same and isinstance(mesh, Mesh):
        there = Placement.from_mesh(mesh)
        same = (there.platform, there.ranks) == (placement.platform, placement.ranks)
    if same:
        return None
    return Problem(
        "signature",
        where,
        str(sharding),
        f"a sharding on {placement}",
        "the sharding's mesh has other axes, or other devices, or another order",
        "sbp.compile(fn, sbp.Placement.from_mesh(mesh), ...)",
    )


def to_partition_spec(nd: Sequence[Signature], ndim: int, placement: Placement) -> PartitionSpec:
    """The PartitionSpec of a signature without P.

    >>> from sbp.placement import placement
    >>> tuple(to_partition_spec((Split(1), Split(1)), 2, placement("cpu", shape=(2, 4))))
    (None, ('data', 'model'))
    """
    entries: list[str | tuple[str, ...] | None] = []
    for d in range(ndim):
        names = tuple(placement.axes[a] for a, s in enumerate(nd) if s == Split(d))
        entries.append(names if len(names) > 1 else names[0] if names else None)
    while entries and entries[-1] is None:
        entries.pop()
    return partition_spec(*entries)
