"""Signatures that name axes, as a `PartitionSpec` of JAX does.

They become N-D signatures once a program is planned and its placement is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sbp.compat.mesh import partial_of
from sbp.signature import B, Partial, Signature, Split

AxisNames: TypeAlias = tuple[str, ...]
Levels: TypeAlias = tuple[Signature | None, ...]
"""An entry per axis of a placement; None for an axis of which nothing is said."""


@dataclass(frozen=True, slots=True)
class NamedSignature:
    """How a spec lays out a tensor.

    Arguments:
      dims: for each dim, the axes that split it, outer to inner.
      partial, op: the axes along which the shards must still be reduced, and the reduction.
      sizes: the sizes of the mesh's axes; () without a mesh.
      free: the axes that the spec leaves open.
      open: whether axes that the spec does not name are free too, as a dim is `UNCONSTRAINED`.
    """

    dims: tuple[AxisNames, ...]
    partial: AxisNames = ()
    op: str = "sum"
    sizes: tuple[tuple[str, int], ...] = ()
    free: AxisNames = ()
    open: bool = False

    @property
    def says_nothing(self) -> bool:
        """Whether the mesh has one device, so that nothing is split."""
        return bool(self.sizes) and all(n == 1 for _, n in self.sizes)

    @property
    def names(self) -> AxisNames:
        """The axes that the signature names, without axes of size 1 and free ones."""
        alone = {a for a, n in self.sizes if n == 1}
        found = (*(a for names in self.dims for a in names), *self.partial)
        return tuple(a for a in found if a not in alone and a not in self.free)

    def at(self, dim: int) -> NamedSignature:
        """The signature of the tensor with one more dim, at a position, that is not split."""
        return replace(self, dims=(*self.dims[:dim], (), *self.dims[dim:]))

    def along(self, axes: Sequence[str]) -> Levels:
        """The N-D signature along axes with these names, outer to inner.

        >>> NamedSignature((("model",), ())).along(("data", "model"))
        (B, S(0))
        """

        mesh = dict(self.sizes)

        def one(axis: str) -> Signature | None:
            if axis in self.free or (mesh and axis not in mesh):
                return None
            if axis in self.partial:
                return Partial(self.op)
            dim = next((d for d, names in enumerate(self.dims) if axis in names), None)
            return Split(dim) if dim is not None else None if self.open else B

        return tuple(map(one, axes))

    def wrong(self, axes: Sequence[str], shape: Sequence[int]) -> Iterator[tuple[str, str]]:
        """Each reason why the signature does not fit the axes of a placement, and what to write instead."""
        known = dict(zip(axes, shape, strict=True))
        for name in dict.fromkeys(self.names):
            if name not in known:
                yield f"no axis of the placement is called {name!r}", "the placement's names of axes"
        for name in dict.fromkeys(self.names):
            if self.names.count(name) > 1:
                yield f"{name!r} stands there twice", "each axis in one place"
        other = [f"{a}={n}" for a, n in self.sizes if known.get(a, n) != n]
        if other:
            yield f"its mesh has {', '.join(other)}", "a mesh with the placement's axes: placement.mesh"
        for d, names in enumerate(self.dims):
            order = [axes.index(a) for a in names if a in known]
            if order != sorted(order):
                fix = f"{tuple(sorted(names, key=axes.index))}, or a placement with the axes in that order"
                yield f"dim {d} is split by an inner axis before an outer one", fix

    def __str__(self) -> str:
        dims = ["/".join(names) or "-" for names in self.dims]
        waits = f", {self.op} over {'/'.join(self.partial)}" if self.partial else ""
        return f"({' '.join(dims)}{waits})"


def named_signature(given: PartitionSpec | NamedSharding, ndim: int, *, bound: bool = True) -> NamedSignature:
    """The signature in a spec, or in a sharding of some mesh.

    Arguments:
      ndim: the number of dims of the tensor.
      bound: whether axes of the mesh in JAX's automatic mode count, too.

    >>> print(named_signature(PartitionSpec("data", ("pod", "model")), 3))
    (data pod/model -)
    """
    spec = given.spec if isinstance(given, NamedSharding) else given
    entries = [*spec.partitions, *[None] * (ndim - len(spec.partitions))]
    is_open = PartitionSpec.UNCONSTRAINED in entries
    dims = tuple(
        () if e is None or e is PartitionSpec.UNCONSTRAINED else (e,) if isinstance(e, str) else tuple(e)
        for e in entries
    )
    waiting, op = partial_of(spec)
    sizes, free = _mesh(given.mesh, bound) if isinstance(given, NamedSharding) else ((), ())
    return NamedSignature(dims, waiting, op, sizes, free, is_open)


def _mesh(mesh: Mesh | AbstractMesh, bound: bool) -> tuple[tuple[tuple[str, int], ...], AxisNames]:
    """The sizes of a mesh's axes, and its free axes: manual ones, and automatic ones unless bound."""
    free = (AxisType.Manual,) if bound else (AxisType.Manual, AxisType.Auto)
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(mesh.shape.items()), tuple(a for a, t in types if t in free)
