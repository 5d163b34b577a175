"""The mesh that the user has set with `jax.set_mesh`: our code runs without it, the user's function with it.

JAX refuses a program of one mesh under another one, and gives arrays the types of the mesh that is set. A
program of ours depends on neither. So every public entry leaves the mesh, and the user's function, which may
ask for it, is traced under it.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, TypeVar

import jax
from jax._src import config, mesh
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from sbp.compat.untyped import Leaf

P = ParamSpec("P")
R = TypeVar("R")
Meshes = tuple[Any, Any]
"""An abstract mesh, which traces depend on, and one with devices."""

_internal: Any = mesh
_config: Any = config
_ABSTRACT = getattr(_internal, "abstract_mesh_context_manager", None) or _config.abstract_mesh_context_manager
_CONCRETE = getattr(_internal, "device_context", None) or _config.device_context
_UNSET = _config.config_ext.unset
NO_MESH: Meshes = (_internal.empty_abstract_mesh, _internal.empty_concrete_mesh)
_left: ContextVar[Meshes] = ContextVar("the mesh that was left", default=NO_MESH)


def _now() -> Meshes:
    abstract, concrete = _ABSTRACT.value, _CONCRETE.value
    return NO_MESH[0] if abstract is None else abstract, NO_MESH[1] if concrete is None else concrete


class _Changed:
    """A context with another mesh; `left` is the mesh that it remembers as left."""

    __slots__ = ("before", "left", "meshes", "token")

    def __init__(self, meshes: Meshes, left: Meshes) -> None:
        self.meshes, self.left = meshes, left

    def __enter__(self) -> None:
        self.token = _left.set(self.left)
        # Where there is none, as it is where none was ever set: jax 0.10 tells these apart.
        there = (_UNSET, _UNSET) if self.meshes == NO_MESH else self.meshes
        self.before = _ABSTRACT.swap_local(there[0]), _CONCRETE.swap_local(there[1])

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _ABSTRACT.set_local(self.before[0])
        _CONCRETE.set_local(self.before[1])
        _left.reset(self.token)


def meshless(fn: Callable[P, R], refuse: Callable[[Exception], NoReturn] | None = None) -> Callable[P, R]:
    """The function, made to run under no mesh, whichever is set where it is called.

    Arguments:
      refuse: raises the error of the function, or another one for it.

    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("d",))
    >>> with jax.set_mesh(mesh):
    ...     meshless(jax.sharding.get_abstract_mesh)().empty
    True
    """

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        now = _now()
        try:
            if now == NO_MESH:
                return fn(*args, **kwargs)
            with _Changed(NO_MESH, now):
                return fn(*args, **kwargs)
        except Exception as e:
            called = e.__traceback__ is not None and e.__traceback__.tb_next is not None
            if refuse is None or not called:  # the call does not match the signature: Python says how
                raise
            refuse(e)

    return run


def user_mesh(*, to_run: bool = False) -> _Changed:
    """A context with the mesh that the user has set, for a function of the user inside of `meshless`.

    Arguments:
      to_run: whether the function runs and is not only traced: JAX runs nothing under a mesh without devices.
    """
    there = _left.get() if _now() == NO_MESH else _now()
    return _Changed(NO_MESH if to_run and there[1] == NO_MESH[1] else there, NO_MESH)


def mesh_key() -> Hashable:
    """A key of the mesh that the user has set and that was left, as far as a trace depends on it."""
    return _left.get()


def explicit_types(leaves: Sequence[Leaf]) -> tuple[NamedSharding | None, ...]:
    """Per argument the sharding in its type under the user's mesh; all None if types have none.

    JAX gives types shardings only under a mesh with explicit axes, and only of that mesh.
    """
    there = _left.get()[0]
    if AxisType.Explicit not in there.axis_types:
        return (None,) * len(leaves)
    return tuple(_type_on(there, x) for x in leaves)


def _type_on(there: AbstractMesh, x: Leaf) -> NamedSharding | None:
    lies = x.sharding if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else None
    if not isinstance(lies, NamedSharding) or lies.mesh.abstract_mesh != there or not any(lies.spec):
        return None
    return lies


def partial_of(spec: PartitionSpec) -> tuple[tuple[str, ...], str]:
    """The axes along which a spec has unreduced shards, and the reduction; one kind in jax 0.10.

    >>> partial_of(jax.sharding.PartitionSpec("data", unreduced={"model"}))
    (('model',), 'sum')
    """
    return tuple(sorted(spec.unreduced)), getattr(getattr(spec, "unreduced_kind", None), "name", "sum")
