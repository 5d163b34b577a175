"""Checks a state before it is saved: which leaves are not finite, and which are all zero.

The arrays are checked on their devices, in one fused reduction of three flags a leaf; only the flags come to
the host. They are compared with the last good state: masks with -inf, and optimizers that keep an inf, had
them before.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sbp.compat.forks import check_not_forked
from sbp.compat.untyped import Leaf, PyTree, partition_spec, pmax
from sbp.errors import NonFiniteError, Problem
from sbp.runtime.processes.addressable import takes_part

NAN, INFINITE, ZERO = "nan", "inf", "zero"
"""What is said of a leaf: it has elements that are NaN, or infinite; or all are zero."""
MOST_SHOWN = 4
Traits = Mapping[str, frozenset[str]]
"""What is said of the leaves of a state, by path; leaves of which nothing is said are left out."""
_NAMES = (NAN, INFINITE, ZERO)


def traits_of(state: PyTree) -> dict[str, frozenset[str]]:
    """The traits of a state that this process sees; all processes that have some of an array call this.

    >>> sorted(traits_of({"w": np.array([1.0, np.inf])})["['w']"])
    ['inf']
    """
    check_not_forked("looking at a state")
    leaves = [(jax.tree_util.keystr(p), x) for p, x in jax.tree.leaves_with_path(state) if _is_inexact(x)]
    groups = dict[Any, list[tuple[str, jax.Array]]]()
    found = dict[str, frozenset[str]]()
    for path, x in leaves:
        if not isinstance(x, jax.Array):
            found[path] = _named(np.asarray(_flags(np.asarray(x), np)))
        elif takes_part(x.sharding):
            groups.setdefault(_devices_of(x), []).append((path, x))
    flags = [(group, _flags_of_all(tuple(x for _, x in group))) for group in groups.values()]
    for group, of_all in flags:  # the host waits once all devices have begun
        found |= {path: _named(row) for (path, _), row in zip(group, np.asarray(of_all), strict=True)}
    return {path: traits for path, traits in found.items() if traits}


@dataclass(frozen=True)
class Verdict:
    """The result of a check.

    Arguments:
      bad: paths of leaves that are not finite, and were; with their values.
      zero_paths: paths of parameters that are all zero, and were not.
    """

    bad: tuple[tuple[str, str], ...]
    zero_paths: tuple[str, ...]

    def enforce(self, where: str) -> None:
        """Raises for a bad state.

        Arguments:
          where: what was to be saved, for the message.

        Raises:
          NonFiniteError: naming the leaves.
        """
        if self.bad:
            raise NonFiniteError(_not_finite(where, self.bad))


def verdict(state: PyTree, now: Traits, good: Traits, exempt: Sequence[str]) -> Verdict:
    """Compares a state with the last good one.

    Arguments:
      now, good: the traits of the state, and of the last good one.
      exempt: patterns of paths, such as "opt_state/*", whose leaves are not checked.
    """
    names = {jax.tree_util.keystr(p): simple_path(p) for p, _ in jax.tree.leaves_with_path(state)}
    nothing = frozenset[str]()
    new = {p: t - good.get(p, nothing) for p, t in now.items() if not _is_exempt(names.get(p, p), exempt)}
    bad = tuple((p, " and ".join(sorted(t - {ZERO}))) for p, t in new.items() if t - {ZERO})
    return Verdict(bad, tuple(p for p, t in new.items() if ZERO in t and _is_parameter(p)))


def simple_path(path: Sequence[Any]) -> str:
    """The path of a leaf in the form of patterns.

    >>> simple_path(jax.tree.leaves_with_path({"a": [1]})[0][0])
    'a/0'
    """
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def first_not_finite(where: str, leaves: Sequence[str]) -> str:
    """A warning: the first step has leaves that are not finite."""
    return f"{where}: {', '.join(leaves[:MOST_SHOWN])} not finite in the first step that is saved"


def zero_warning(where: str, leaves: Sequence[str]) -> str:
    """A warning: parameters have become zero."""
    return f"{where}: all elements of {', '.join(leaves[:MOST_SHOWN])} have become zero"


# -- inside


def _not_finite(where: str, bad: Sequence[tuple[str, str]]) -> Problem:
    """The problem of a state that has become NaN or infinite."""
    named = ", ".join(f"{path} ({what})" for path, what in bad[:MOST_SHOWN])
    more = f" and {len(bad) - MOST_SHOWN} more" if len(bad) > MOST_SHOWN else ""
    why = "every run that goes on from it is lost; it was not so in the last good step"
    fix = "an older step; exempt=['opt_state/*'] for leaves that may be so"
    return Problem("nonfinite", where, named + more, "leaves that are finite, as they were", why, fix)


def _is_exempt(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, p) for p in patterns)


def _is_parameter(path: str) -> bool:
    """Whether a leaf is one of the parameters, by the names of states: the first of a tuple, or "params".

    The sums of an optimizer that accumulates gradients are zero every so often.
    """
    return path.startswith("[0]") or "params" in path.partition("]")[0]


def _is_inexact(x: Leaf) -> bool:
    """Whether a leaf has elements that could be NaN; typed keys have none."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return isinstance(x, float | complex)
    return bool(jnp.issubdtype(dtype, jnp.inexact)) and 0 not in x.shape


def _devices_of(x: jax.Array) -> Any:
    """A key that is equal for arrays which one program can reduce."""
    return x.sharding.mesh if isinstance(x.sharding, NamedSharding) else x.sharding


def _flags(x: Any, numpy: Any) -> Any:
    return numpy.stack([numpy.isnan(x).any(), numpy.isinf(x).any(), ~(x != 0).any()])


def _quick_flags(x: jax.Array) -> Any:
    """The same flags in one pass for the usual case: the sum of squares is finite, and not zero.

    It takes a twentieth of the time on a CPU. Otherwise, also for huge elements, everything is checked
    closely. A maximum would not do: XLA's code for CPUs, and collectives, may lose a NaN there.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize == 1:
        return _flags(x, jnp)
    flat = x.reshape(-1)
    total = jnp.dot(flat, flat, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))
    is_well = jnp.isfinite(total) & (total > 0)
    return lax.cond(is_well, lambda: jnp.zeros(len(_NAMES), bool), lambda: _flags(x, jnp))


def _flags_of_all(xs: tuple[jax.Array, ...]) -> jax.Array:
    lies: list[Any] = [x.sharding for x in xs]
    if isinstance(lies[0], NamedSharding):
        return _reduction(lies[0].mesh, tuple(x.spec for x in lies))(*xs)
    found: jax.Array = jax.jit(_stacked)(xs)
    return found


@functools.lru_cache(maxsize=16)
def _reduction(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Callable[..., jax.Array]:
    """The check of the arrays of one set of devices: each checks its own parts, and gets the flags of all."""

    def looked(*parts: jax.Array) -> Any:
        nan, infinite, zero = jnp.stack([_quick_flags(x) for x in parts]).T
        return pmax(jnp.stack([nan, infinite, ~zero], axis=1).astype(jnp.int32), mesh.axis_names) > 0

    of_all = jax.shard_map(looked, mesh=mesh, in_specs=specs, out_specs=partition_spec(), check_vma=False)
    run: Callable[..., jax.Array] = jax.jit(lambda *xs: of_all(*xs) ^ jnp.array([False, False, True]))
    return run


def _stacked(xs: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.stack([_flags(x, jnp) for x in xs])


def _named(flags: np.ndarray[Any, Any]) -> frozenset[str]:
    return frozenset(name for name, flag in zip(_NAMES, flags, strict=True) if flag)
