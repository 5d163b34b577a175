"""Placements: which devices, in which order, in which hierarchy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sbp.errors import PlacementError, Problem
from sbp.hardware.catalogue import CATALOGUE, PLATFORMS
from sbp.text.notebook import grid_html

if TYPE_CHECKING:
    import jax

AUTO_TYPE, EXPLICIT_TYPE = "Auto", "Explicit"
"""Names of the `jax.sharding.AxisType`s that a mesh of arrays can have."""
AXIS_NAMES = {1: ("x",), 2: ("data", "model"), 3: ("pod", "data", "model")}


def _problem(got: str, legal: str, why: str, fix: str, where: str = "placement(...)") -> PlacementError:
    return PlacementError(Problem("placement", where, got, legal, why, fix))


@dataclass(frozen=True, slots=True)
class Placement:
    """Ordered devices in an N-D hierarchy; make one with `sbp.placement`.

    Arguments:
      kind: a JAX platform ("cpu", "gpu") or a catalogue name ("h100") for planning without the device.
      ranks: positions in `jax.devices(kind)`, row-major over `shape`; their order is kept.
      shape: the hierarchy, outer to inner.
      axes: one name per level.
      axis_types: the types of the axes of results' meshes; placements that differ only in these are equal.
        If empty, the arguments of a program decide.
    """

    kind: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    axis_types: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def _repr_html_(self) -> str:
        return grid_html(str(self), self.ranks, self.shape, self.axes)

    @property
    def ndim(self) -> int:
        """The number of levels of the hierarchy."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.ranks)

    def groups(self, axes: Sequence[int]) -> NDArray[np.integer]:
        """The ranks that exchange data along `axes`: one row per group, row-major over `axes`."""
        grid = np.asarray(self.ranks).reshape(self.shape)
        rest = [a for a in range(self.ndim) if a not in axes]
        return grid.transpose(*rest, *axes).reshape(-1, math.prod(self.shape[a] for a in axes))

    def split(self, axis: int | str) -> list[Placement]:
        """The sub-placements along one axis (pipeline stages).

        Raises:
          PlacementError: if there is no such axis.

        >>> [p.ranks for p in placement("cpu", shape=(2, 2)).split("data")]
        [(0, 1), (2, 3)]
        """
        a = self._position(axis)
        grid = np.asarray(self.ranks).reshape(self.shape)
        rest = [i for i in range(self.ndim) if i != a]
        return [
            placement(
                self.kind,
                np.take(grid, i, axis=a).tolist() if rest else [int(grid[i])],
                axes=tuple(self.axes[j] for j in rest) or (self.axes[a],),
                axis_types=tuple(self.axis_types[j] for j in rest or [a]) if self.axis_types else None,
            )
            for i in range(self.shape[a])
        ]

    def _too_few(self, devices: int) -> PlacementError:
        if self.platform == "cpu":
            fix = f"jax.config.update('jax_num_cpu_devices', {max(self.ranks) + 1}) before any device is used"
        elif devices:
            fix = "a smaller shape, or Program.plan(), which needs no devices"
        else:
            fix = "placement('cpu', ...) to run here; Program.plan() needs no devices"
        return _problem(
            f"rank {max(self.ranks)}",
            f"ranks below {devices}" if devices else f"none here: JAX finds no {self.platform!r} device",
            f"a rank is a position in jax.devices({self.platform!r}), which has {devices}",
            fix,
            where=f"{self}.mesh",
        )

    def _position(self, axis: int | str) -> int:
        if isinstance(axis, str) and axis in self.axes:
            return self.axes.index(axis)
        if isinstance(axis, int) and -self.ndim <= axis < self.ndim:
            return axis % self.ndim
        raise _problem(
            f"axis {axis!r}",
            ", ".join(map(repr, self.axes)) + f", or 0..{self.ndim - 1}",
            "stages lie along one axis of the placement",
            f"split({self.axes[0]!r})",
            where=f"{self}.split(...)",
        )

    @property
    def platform(self) -> str:
        """The JAX platform that runs it."""
        return CATALOGUE[self.kind].platform if self.kind in CATALOGUE else self.kind

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The `jax.sharding.Mesh` of these devices.

        Raises:
          PlacementError: if JAX does not see as many devices.
        """
        import jax
        from jax.sharding import AxisType, Mesh

        try:
            devices: Sequence[jax.Device] = jax.devices(self.platform)
        except RuntimeError:
            devices = ()
        if max(self.ranks) >= len(devices):
            raise self._too_few(len(devices))
        types = tuple(AxisType[name] for name in self.axis_types or (AUTO_TYPE,) * self.ndim)
        grid = np.array([devices[r] for r in self.ranks], dtype=object).reshape(self.shape)
        return Mesh(grid, self.axes, axis_types=types)

    @property
    def abstract_mesh(self) -> jax.sharding.AbstractMesh:
        """The mesh without devices, for lowering only."""
        from jax.sharding import AbstractMesh, AxisType

        return AbstractMesh(self.shape, self.axes, axis_types=(AxisType.Auto,) * self.ndim)

    @staticmethod
    def from_mesh(mesh: jax.sharding.Mesh) -> Placement:
        """The placement of a `jax.sharding.Mesh`: same devices, same order, same names and types of axes.

        Raises:
          PlacementError: for axes that are in manual mode.

        >>> import jax
        >>> mesh = jax.make_mesh((1,), ("d",))
        >>> Placement.from_mesh(mesh).mesh == mesh
        True
        """
        import jax

        platform = mesh.devices.flat[0].platform
        position = {d: i for i, d in enumerate(jax.devices(platform))}
        ranks = np.vectorize(position.__getitem__, otypes=[int])(mesh.devices)
        names = tuple(map(str, mesh.axis_names))
        return placement(platform, ranks.tolist(), axes=names, axis_types=mesh.axis_types)

    def __str__(self) -> str:
        order = "" if self.ranks == tuple(range(self.size)) else f", ranks {list(self.ranks)}"
        levels = " x ".join(f"{a}={n}" for a, n in zip(self.axes, self.shape, strict=True))
        return f"{self.kind}({levels}{order})"


def placement(
    kind: str,
    ranks: ArrayLike | None = None,
    *,
    shape: Sequence[int] | None = None,
    axes: Sequence[str] | None = None,
    axis_types: jax.sharding.AxisType | Sequence[jax.sharding.AxisType | str] | None = None,
) -> Placement:
    """Ordered devices in an N-D hierarchy.

    Arguments:
      kind: a JAX platform ("cpu", "gpu") or a name of `sbp.hardware.CATALOGUE`, such as "h100".
      ranks: nested lists of positions in `jax.devices(kind)`; the nesting is the hierarchy. A flat tuple or
        a lone number is refused, since it reads as a shape: write `shape=(2, 4)`, or the list `[2, 4]`.
      shape: the hierarchy instead, with ranks 0, 1, 2, ...
      axes: a name per level; the default is ("data", "model") in 2-D.
      axis_types: the types of the axes of the results' mesh, one for all levels or one per level:
        `jax.sharding.AxisType.Explicit`, as `jax.make_mesh` makes them, or `AxisType.Auto`. JAX only mixes
        arrays of equal meshes. By default results have explicit axes if an argument has such axes with the
        placement's names, otherwise automatic ones. The numbers are the same.

    Raises:
      PlacementError: for an unknown kind, ragged, negative or repeated ranks, names or types that do not fit,
        or a shape where ranks are expected.

    >>> placement("cpu", shape=(2, 4)).axes
    ('data', 'model')
    """
    known = sorted({*CATALOGUE, *PLATFORMS, "tpu"})
    if not isinstance(kind, str) or kind not in known:
        raise _problem(
            f"kind {kind!r}",
            ", ".join(known),
            "the kind is a JAX platform or a catalogue name",
            "'cpu' or 'gpu' to run, a chip's name to plan for it"
            if isinstance(kind, str)
            else "placement('cpu', ...); a Mesh is taken as it is where a placement is wanted",
        )
    grid = _grid(ranks, shape)
    default = AXIS_NAMES.get(grid.ndim) or tuple(f"x{i}" for i in range(grid.ndim))
    names = default if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    if len(names) != grid.ndim or len(set(names)) != len(names) or not all(isinstance(n, str) for n in names):
        raise _problem(
            f"axes {names!r} for a hierarchy of shape {grid.shape}",
            f"a tuple of {grid.ndim} different names" if grid.ndim > 1 else "a tuple of 1 name",
            "each level of the hierarchy has one name",
            f"axes={default!r}",
        )
    types = _types(axis_types, grid.ndim)
    return Placement(kind, tuple(int(r) for r in grid.flat), tuple(map(int, grid.shape)), names, types)


def _types(
    given: jax.sharding.AxisType | Sequence[jax.sharding.AxisType | str] | None, ndim: int
) -> tuple[str, ...]:
    """Axis types as names, checked; none for the default."""
    if given is None:
        return ()
    each = tuple(given) if isinstance(given, list | tuple) else (given,) * ndim
    names = tuple(str(getattr(t, "name", t)) for t in each)
    if len(names) != ndim or not set(names) <= {AUTO_TYPE, EXPLICIT_TYPE}:
        raise _problem(
            f"axis_types={given!r}",
            f"AxisType.Explicit or AxisType.Auto, one for all levels or a tuple of {ndim}",
            "arrays lie on axes of these two types; axes are manual inside of a shard_map only",
            "leave it out, or axis_types=jax.sharding.AxisType.Auto",
        )
    return names


def with_types_of(p: Placement, axes: Sequence[str], types: Sequence[str]) -> Placement:
    """The placement with the types of axes that have its names, if it leaves them open.

    >>> with_types_of(placement("cpu", shape=(4,)), ("x", "y"), ("Explicit", "Auto")).axis_types
    ('Explicit',)
    """
    known = dict(zip(axes, types, strict=False))
    if p.axis_types or not set(p.axes) <= known.keys():
        return p
    return replace(p, axis_types=tuple(known[a] for a in p.axes))


def as_placement(given: object, where: str) -> Placement:
    """A placement as it is, and a `jax.sharding.Mesh` as the placement of its devices.

    Arguments:
      where: the argument that it was given as, for the message.

    Raises:
      PlacementError: for anything else.

    >>> as_placement(placement("cpu", shape=(2, 4)), "compile(fn, placement)").shape
    (2, 4)
    """
    from jax.sharding import AbstractMesh, Mesh

    if isinstance(given, Placement):
        return given
    if isinstance(given, Mesh):
        return Placement.from_mesh(given)
    fix = "sbp.placement('cpu', shape=(8,))"
    if isinstance(given, AbstractMesh):
        named = f"shape={given.axis_sizes}, axes={given.axis_names}"
        fix = f"sbp.placement('cpu', {named}): that mesh has no devices"
    elif isinstance(given, str) and ":" in given:
        kind, _, shape = given.partition(":")
        sizes = shape.lower().replace("x", ", ")
        fix = f"sbp.placement({kind!r}, shape=({sizes}{',' * ('x' not in shape.lower())}))"
    raise _problem(
        f"{given!r:.80}",
        "an sbp.placement, or a jax.sharding.Mesh",
        "a placement says which devices a program, or a part of it, runs on",
        fix,
        where=where,
    )


def _listed(devices: Sequence[int]) -> str:
    """
    >>> _listed([2, 4]), _listed([8])
    ('2 and 4', '8')
    """
    *most, last = map(str, devices)
    return f"{', '.join(most)} and {last}" if most else last


def _is_shape(ranks: object) -> bool:
    """Whether ranks are written as JAX and NumPy write a shape: a lone integer, or a flat tuple of them."""
    if isinstance(ranks, tuple):
        return bool(ranks) and all(isinstance(n, int | np.integer) for n in ranks)
    return isinstance(ranks, int | np.integer)


def _is_sizes(shape: object) -> bool:
    return isinstance(shape, list | tuple) and all(isinstance(n, int | np.integer) and n >= 1 for n in shape)


def _grid(ranks: ArrayLike | None, shape: Sequence[int] | None) -> NDArray[np.integer]:
    """The ranks as an integer array, checked."""
    if ranks is None and shape is None:
        raise _problem("neither ranks nor shape", "one of them", "the devices must be named", "shape=(8,)")
    if ranks is not None and _is_shape(ranks):
        devices = list(map(int, ranks if isinstance(ranks, tuple) else (ranks,)))
        raise _problem(
            repr(ranks),
            "nested lists of ranks, or shape=",
            f"as ranks it would mean device{'s' * (len(devices) > 1)} {_listed(devices)}, and no others",
            f"did you mean shape={tuple(devices)}? If these are the ranks: ranks={devices}",
        )
    if shape is not None and not _is_sizes(shape):
        raise _problem(
            f"shape={shape!r}",
            "a tuple of sizes of at least 1, outer to inner",
            "every level of the hierarchy has devices",
            "shape=(2, 4)",
        )
    try:
        grid = np.arange(math.prod(shape or ())) if ranks is None else np.asarray(ranks)
    except ValueError:
        raise _problem(
            f"ranks={ranks!r}", "rows of equal length", "the hierarchy is a grid", "ranks=[[0, 1], [2, 3]]"
        ) from None
    if grid.size == 0 or grid.dtype.kind not in "iu" or grid.min() < 0:
        raise _problem(
            f"ranks={ranks!r}",
            "integers >= 0",
            "a rank is a position in jax.devices(kind)",
            "ranks=[[0, 1], [2, 3]]",
        )
    values, counts = np.unique(grid, return_counts=True)
    if (counts > 1).any():
        raise _problem(
            f"ranks={grid.tolist()}",
            "every rank once",
            f"rank {int(values[counts > 1][0])} is repeated: a device has one place in the hierarchy",
            "list each rank once",
        )
    if shape is not None:
        if math.prod(shape) != grid.size:
            raise _problem(
                f"{grid.size} ranks for shape {tuple(shape)}",
                f"{math.prod(shape)} ranks",
                "the shape must hold all ranks",
                "drop ranks= or shape=",
            )
        grid = grid.reshape(tuple(shape))
    return grid.reshape(1) if grid.ndim == 0 else grid


def parse_placement(text: str) -> Placement:
    """Reads the command line's form, `kind:shape`.

    >>> str(parse_placement("h100:16x8"))
    'h100(data=16 x model=8)'
    """
    kind, _, shape = text.partition(":")
    try:
        sizes = tuple(int(n) for n in shape.lower().split("x"))
    except ValueError:
        raise _problem(
            repr(text),
            "KIND:AxBxC",
            "the shape is a product of sizes",
            "cpu:2x4, h100:16x8",
            where="a placement in text form",
        ) from None
    return placement(kind, shape=sizes)


def for_placement(given: Any, on: Placement) -> Any:
    """What holds for any placement as it is; of a function from placements, what it says of this one.

    Only functions are called: nets of some libraries are pytrees, hence prefixes, and callable too.

    >>> two = placement("cpu", shape=(2, 4))
    >>> for_placement(lambda p: p.ndim, two), for_placement(7, two)
    (2, 7)
    """
    return given(on) if isinstance(given, FunctionType | MethodType | partial) else given
