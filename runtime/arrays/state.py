"""The state that is saved: its leaves in words, as plain arrays, and as a program wants them back.

Copies of one array on several devices: for a save each of them becomes a part.

So every device hands over a share of what is replicated, and every element is handed over once: who computes
a checksum of a part has just what is written. Devices cut their share out of what they have; nothing is sent.
"""

import functools
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from sbp.compat import core
from sbp.compat.core import is_key
from sbp.compat.untyped import Leaf, PyTree, partition_spec, struct
from sbp.errors import ArgumentError, Problem, raise_all
from sbp.runtime.arrays import messages
from sbp.runtime.arrays.host_copies import gather_leaf, is_of_one, spread_leaf, spread_sharding
from sbp.runtime.pipeline.transfer_engine import TransferEngine
from sbp.runtime.processes.addressable import to_devices
from sbp.runtime.program.program import Program


@dataclass(frozen=True)
class LeafRecord:
    """One leaf of a saved state.

    Arguments:
      path: in the state, such as "['w']".
      type: dtype and shape, such as "float32[64, 256]".
      checksum: of its elements, see `checksums`; None while it is not known.
      traits: what a look has found in it: some of "nan", "inf" and "zero".
    """

    path: str
    type: str
    checksum: int | None = None
    traits: frozenset[str] = frozenset()


def leaves_of(state: PyTree) -> tuple[tuple[str, str], ...]:
    """Path, dtype and shape of every leaf.

    Raises:
      CheckpointError: for leaves that are no arrays, all at once.

    >>> leaves_of({"w": np.ones((2, 3)), "n": 1})
    (("['n']", 'int'), ("['w']", 'float64[2, 3]'))
    """
    named = [(jax.tree_util.keystr(path), x) for path, x in jax.tree.leaves_with_path(state)]
    raise_all(messages.no_array(path, _given(x)) for path, x in named if not _is_numeric(x))
    return tuple((path, _words(x)) for path, x in named)


def _is_numeric(x: Leaf) -> bool:
    """Whether orbax takes it as an array, or a number."""
    if isinstance(x, int) and not isinstance(x, bool):
        return -(2**63) <= x < 2**64
    if isinstance(x, bool | float | complex):
        return True
    dtype = getattr(x, "dtype", None)
    return (
        hasattr(x, "shape") and dtype is not None and (is_key(dtype) or np.dtype(dtype).kind not in "OSUMm")
    )


def _given(x: Leaf) -> str:
    """A leaf in a few words."""
    what = f"an array of {x.dtype}" if hasattr(x, "dtype") else type(x).__name__
    return f"{what}: {reprlib.repr(x)}"


def _words(x: Leaf) -> str:
    if isinstance(x, bool | int | float | complex):
        return type(x).__name__
    return f"{x.dtype}{list(x.shape)}"


EMPTY = np.zeros(1, np.int8)
"""What is written for an array without elements, which orbax does not take."""


def plain(state: PyTree, engine: TransferEngine) -> PyTree:
    """The state as orbax takes it: keys as words, nothing that only one process has, and no large replicas.

    Arrays of the host are copied, since the user may change them while they are written.
    """
    leaves, tree = jax.tree.flatten(state)
    return jax.tree.unflatten(tree, without_replicas([_plain(spread_leaf(x, engine)) for x in leaves]))


def _plain(x: Leaf) -> Leaf:
    if _is_empty(x):
        return EMPTY
    if isinstance(x, np.ndarray | np.generic | complex):
        return np.array(x)
    words = jax.random.key_data(x) if _has_keys(x) else x
    return np.asarray(words) if _is_alike(words) else words


def _is_alike(x: Leaf) -> bool:
    """Whether an array lies on devices of this process alone, as each process has one of its own: not placed
    yet, and the same in all."""
    return jax.process_count() > 1 and isinstance(x, jax.Array) and x.is_fully_addressable


def _has_keys(x: Leaf) -> bool:
    return hasattr(x, "dtype") and is_key(x.dtype)


def _is_empty(x: Leaf) -> bool:
    return hasattr(x, "shape") and 0 in x.shape


def plain_like(x: Leaf) -> Leaf:
    """What a leaf is restored as: of keys their words, where they lie; without a sharding, to the host."""
    if _is_empty(x):
        return EMPTY
    if isinstance(x, bool | int | float | complex):
        return x
    sharding = x.sharding if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else None
    if is_of_one(sharding):
        sharding = spread_sharding(sharding, x.shape)
    like = struct(x.shape, x.dtype)
    words = jax.eval_shape(jax.random.key_data, like) if _has_keys(x) else like
    return (
        np.zeros(words.shape, words.dtype)
        if sharding is None
        else struct(words.shape, words.dtype, sharding=sharding)
    )


def as_asked(x: Leaf, like: Leaf, engine: TransferEngine) -> Leaf:
    """What was restored as it was asked for."""
    sharding = getattr(like, "sharding", None)
    if _is_empty(like):
        x = np.zeros(like.shape, like.dtype)
        return x if sharding is None else to_devices(x, sharding)
    if _has_keys(like):
        x = jax.random.wrap_key_data(x, impl=jax.random.key_impl(core.zeros((), like.dtype)))
    return gather_leaf(x, sharding, like.dtype, engine) if is_of_one(sharding) else x


def restore_targets(like: object, saved: Sequence[tuple[str, str]], keys: Sequence[str | int] = ()) -> PyTree:
    """What a checkpoint is restored as.

    Arguments:
      like: a tree of arrays or `ShapeDtypeStruct`s with shardings; or a program that has been planned, whose
        arguments are meant: all that the checkpoint has, by name or by position.
      saved: the leaves of the checkpoint.
      keys: of the part that is wanted; a program has it as an argument.

    Raises:
      ArgumentError: for a program that has not been planned, or without such arguments.
    """
    if not isinstance(like, Program):
        return like
    args = like.abstract_args
    names = like.parameters.positional or ()
    if keys:
        return _argument(like, names, args, keys)
    tops = dict.fromkeys(path.split("]")[0] + "]" for path, _ in saved)
    by_name = {f"[{name!r}]": name for name in names}
    if all(top in by_name for top in tops):
        return {by_name[top]: args[names.index(by_name[top])] for top in tops}
    by_position = [f"[{i}]" for i in range(len(args))]
    if list(tops) == by_position[: len(tops)]:
        return tuple(args[: len(tops)])
    raise ArgumentError(_no_arguments(like, names, list(tops)))


def _argument(
    program: Program[Any, Any], names: Sequence[str], args: Sequence[PyTree], keys: Sequence[str | int]
) -> PyTree:
    """The argument of a program that a part of a checkpoint is."""
    at = names.index(keys[0]) if keys[0] in names else keys[0]
    if not isinstance(at, int) or not 0 <= at < len(args):
        raise ArgumentError(_no_arguments(program, names, [repr(keys[0])]))
    found = args[at]
    for key in keys[1:]:
        found = found[key]
    return found


def _no_arguments(program: Program[Any, Any], names: Sequence[str], tops: Sequence[str]) -> Problem:
    return Problem(
        "argument",
        "restore(..., like=program)",
        f"a checkpoint of {', '.join(tops)}",
        f"a dict by names of its arguments ({', '.join(names)}), or a tuple of the first ones",
        f"like={program} means its arguments",
        "like=program.abstract_args[0], or another tree of them",
    )


SMALL_BYTES = 1 << 20
"""Below this the first copy is handed over: a program for the cut would cost more than it spares."""


def without_replicas(leaves: Sequence[Leaf]) -> list[Leaf]:
    """The leaves, large replicated ones split over the devices that have copies; all processes come here."""
    found = list(leaves)
    cuts = {i: s for i, x in enumerate(found) if (s := _cut(x)) is not None}
    groups = dict[Any, list[int]]()
    for i, sharding in cuts.items():
        groups.setdefault(sharding.mesh, []).append(i)
    for group in groups.values():
        cut = _cutter(tuple(cuts[i] for i in group))
        for i, part in zip(group, cut(*(found[i] for i in group)), strict=True):
            found[i] = part
    return found


def _cut(x: Leaf) -> NamedSharding | None:
    """How a replicated array is split further; None for what is left as it is."""
    if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding) or x.nbytes < SMALL_BYTES:
        return None
    return further_split(x.sharding, x.shape)


def further_split(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding | None:
    """A sharding split also by the axes that have copies, as far as a dim divides; None if none does.

    Arguments:
      shape: of the whole array.
    """
    spec = [_axes(entry) for entry in sharding.spec]
    spec += [()] * (len(shape) - len(spec))
    used = {a for axes in spec for a in axes}
    free = [a for a, n in sharding.mesh.shape.items() if n > 1 and a not in used]
    is_cut = False
    for axis in free:
        for dim, n in enumerate(shape):
            parts = int(np.prod([sharding.mesh.shape[a] for a in (*spec[dim], axis)]))
            if n % parts == 0:
                spec[dim] = (*spec[dim], axis)
                is_cut = True
                break
    if not is_cut:
        return None
    entries = [axes if axes else None for axes in spec]
    return NamedSharding(sharding.mesh, partition_spec(*entries), memory_kind=sharding.memory_kind)


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


@functools.lru_cache(maxsize=16)
def _cutter(shardings: tuple[NamedSharding, ...]) -> Any:
    return jax.jit(lambda *xs: xs, out_shardings=shardings)
