"""Signatures of arguments and results: pytree prefixes, PartitionSpecs and NamedShardings -> N-D signatures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from sbp.compat import is_key
from sbp.errors import Problem
from sbp.placement import Placement
from sbp.signature import AUTO, B, NdSbp, Partial, Signature, Split, format_sbp, has_partial, is_signature, normalise


def is_leaf(x: Any) -> bool:
    """Whether part of a signature tree is one tensor's signature."""
    if x is None or x is AUTO or is_signature(x) or isinstance(x, PartitionSpec | NamedSharding):
        return True
    return isinstance(x, list | tuple) and len(x) > 0 and all(map(is_signature, x))


def resolve(
    prefix: Any, tree: Any, paths: Sequence[str], placement: Placement, name: str
) -> tuple[list[NdSbp | None], list[Problem]]:
    """One signature (None: AUTO) per leaf of `tree`, and what is wrong with them.

    Arguments:
      prefix: a pytree prefix of signatures.
      tree: arrays or `ShapeDtypeStruct`s.
      paths: a name per leaf.
      name: the argument that is resolved, "in_sbp" or "out_sbp".
    """
    leaves, treedef = jax.tree.flatten(tree)
    try:
        given: list[Any] = []
        jax.tree.map(
            lambda s, sub: given.extend([s] * len(jax.tree.leaves(sub))), prefix, tree, is_leaf=is_leaf
        )
    except ValueError as e:
        return [None] * len(leaves), [_not_a_prefix(prefix, treedef, name, str(e))]
    out: list[NdSbp | None] = []
    problems: list[Problem] = []
    for s, leaf, path in zip(given, leaves, paths, strict=True):
        where = f"{path}: {leaf.dtype}{list(leaf.shape)}, {name}"
        if not is_leaf(s):
            problems.append(_not_a_signature(s, where))
            out.append(None)
            continue
        nd, found = _one(s, leaf, where, placement)
        out.append(nd)
        problems.extend(found)
    return out, problems


def _not_a_prefix(prefix: Any, treedef: Any, name: str, why: str) -> Problem:
    return Problem(
        "signature",
        f"{name}",
        f"{prefix!r}",
        f"a pytree prefix of {treedef}",
        why.splitlines()[0],
        "give a signature per argument, or AUTO for a whole subtree",
    )


def _not_a_signature(s: Any, where: str) -> Problem:
    return Problem(
        "signature",
        where,
        repr(s),
        "[S(0), B], a PartitionSpec, a NamedSharding, sbp.AUTO or None",
        f"a {type(s).__name__} is none of them",
        "sbp.AUTO lets the compiler choose",
    )


def _one(s: Any, leaf: Any, where: str, placement: Placement) -> tuple[NdSbp | None, list[Problem]]:
    """One leaf's signature, checked."""
    if s is None or s is AUTO:
        return None, []
    if isinstance(s, NamedSharding):
        problem = _foreign_mesh(s, where, placement)
        if problem is not None:
            return None, [problem]
        s = s.spec
    if isinstance(s, PartitionSpec):
        return from_partition_spec(s, where, placement)
    nd: Sequence[Signature] = (s,) if is_signature(s) else tuple(s)
    problems = list(check_fit(nd, leaf.shape, leaf.dtype, where, placement))
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
    return (None if problems else normalise(nd, len(leaf.shape))), problems


def check_fit(
    nd: Sequence[Signature], shape: Sequence[int], dtype: Any, where: str, placement: Placement
) -> Iterator[Problem]:
    """What keeps a signature from fitting a tensor on a placement."""
    axes = ", ".join(placement.axes)
    if len(nd) != placement.ndim:
        per_argument = (
            f"for one signature per argument write ({', '.join(f'[{s}]' for s in nd)})"
            if placement.ndim == 1 and len(nd) > 1
            else f"for example {format_sbp([*nd, *[B] * placement.ndim][: placement.ndim])}"
        )
        yield Problem(
            "signature",
            where,
            f"{format_sbp(nd)}: {len(nd)} signature{'s' * (len(nd) != 1)}",
            f"{placement.ndim}: one per axis of {placement} ({axes})",
            f"the list is {'longer' if len(nd) > placement.ndim else 'shorter'} than the placement",
            per_argument,
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


def from_partition_spec(spec: PartitionSpec, where: str, placement: Placement) -> tuple[NdSbp | None, list[Problem]]:
    """The signature that a PartitionSpec means on a placement."""
    out: list[Signature] = [B] * placement.ndim
    problems: list[Problem] = []
    for dim, entry in enumerate(spec):
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        unknown = [n for n in names if n not in placement.axes]
        if unknown:
            problems.append(
                Problem(
                    "signature",
                    where,
                    str(spec),
                    f"axes {', '.join(placement.axes)}",
                    f"{unknown[0]!r} is not an axis of {placement}",
                    "use the placement's axis names",
                )
            )
            continue
        order = [placement.axes.index(n) for n in names]
        if order != sorted(order):
            problems.append(
                Problem(
                    "signature",
                    where,
                    str(spec),
                    f"dim {dim} split by {tuple(sorted(names, key=placement.axes.index))}",
                    "a signature splits outer axis first; this spec names an inner axis before an outer one",
                    "exchange the names, or make a placement with the axes in that order",
                )
            )
        for axis in order:
            out[axis] = Split(dim)
    return (None if problems else tuple(out)), problems


def _foreign_mesh(sharding: NamedSharding, where: str, placement: Placement) -> Problem | None:
    """The problem with a NamedSharding of other devices than the placement's."""
    mesh = sharding.mesh
    same_axes = tuple(mesh.axis_names) == placement.axes and tuple(mesh.devices.shape) == placement.shape
    if same_axes and mesh.devices.tolist() == placement.mesh.devices.tolist():
        return None
    return Problem(
        "signature",
        where,
        str(sharding),
        f"a sharding on {placement}",
        "the sharding's mesh has other axes, or other devices, or another order",
        "sbp.compile(fn, Placement.from_mesh(mesh), ...)",
    )


def to_partition_spec(nd: Sequence[Signature], ndim: int, placement: Placement) -> PartitionSpec:
    """The PartitionSpec of a P-free signature.

    >>> from sbp.placement import placement
    >>> to_partition_spec((Split(1), Split(1)), 2, placement("cpu", shape=(2, 4)))
    PartitionSpec(None, ('data', 'model'))
    """
    entries: list[Any] = []
    for d in range(ndim):
        names = tuple(placement.axes[a] for a, s in enumerate(nd) if s == Split(d))
        entries.append(names if len(names) > 1 else names[0] if names else None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
