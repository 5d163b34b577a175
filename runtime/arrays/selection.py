"""What of a step is restored: all of its state or a part, and in which precision."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from sbp.compat.untyped import DType, Leaf, PyTree, struct
from sbp.errors import CheckpointError
from sbp.runtime.arrays import messages
from sbp.runtime.arrays.state import LeafRecord, leaves_of, restore_targets
from sbp.runtime.storage.files import Path


@dataclass(frozen=True)
class Selection:
    """What is restored.

    Arguments:
      tree: the tree that is wanted, in the precision that was saved.
      records: of its leaves.
      keys: of the part in the saved state, outermost first; none for all of it.
      dtype: that floating leaves are converted to.
    """

    tree: PyTree
    records: tuple[LeafRecord, ...]
    keys: tuple[str | int, ...]
    dtype: DType | None

    def convert(self, state: PyTree) -> PyTree:
        """The state in the precision that is wanted."""
        return state if self.dtype is None else jax.tree.map(self._converted, state)

    def with_dtype(self, like: Leaf) -> Leaf:
        """What is wanted of a leaf that is read apart: with the precision that is wanted."""
        if self.dtype is None or not jnp.issubdtype(like.dtype, jnp.floating):
            return like
        return struct(like.shape, self.dtype, sharding=getattr(like, "sharding", None))

    def _converted(self, x: Leaf) -> Leaf:
        dtype = getattr(x, "dtype", None)
        if dtype is None or dtype == self.dtype or not jnp.issubdtype(dtype, jnp.floating):
            return x
        return x.astype(self.dtype)


@dataclass(frozen=True)
class RestoreRequest:
    """What somebody asks for of a step.

    Arguments:
      like: what is wanted, see `state.restore_targets`.
      only: the key of a part, or several, outermost first.
      dtype: that floating leaves are converted to.
    """

    like: PyTree
    only: str | int | Sequence[str | int] | None = None
    dtype: DType | type | None = None

    @property
    def keys(self) -> tuple[str | int, ...]:
        """The keys of the part, outermost first."""
        if self.only is None:
            return ()
        return (self.only,) if isinstance(self.only, str | int) else tuple(self.only)


def selection(path: Path, leaves: Sequence[LeafRecord], request: RestoreRequest) -> Selection:
    """What is restored of a step.

    Arguments:
      path: of the step, for messages.
      leaves: that were saved.

    Raises:
      CheckpointError: if it is not in the step.
    """
    keys = request.keys
    records, prefix = part_of(path, leaves, keys)
    to = None if request.dtype is None else jnp.dtype(request.dtype)
    asked = restore_targets(request.like, [(x.path, x.type) for x in leaves], keys)
    if to is not None:
        asked = _in_saved_precision(asked, {x.path.removeprefix(prefix): x.type for x in records})
    saved = tuple((x.path.removeprefix(prefix), x.type) for x in records)
    if differs := list(_differences(saved, leaves_of(asked))):
        raise CheckpointError(messages.other_state(path, differs))
    by_path = {x.path.removeprefix(prefix): x for x in records}
    return Selection(asked, tuple(by_path[p] for p, _ in leaves_of(asked)), keys, to)


def part_of(
    path: Path, leaves: Sequence[LeafRecord], keys: Sequence[str | int]
) -> tuple[tuple[LeafRecord, ...], str]:
    """The leaves of a part, and what their paths begin with.

    Raises:
      CheckpointError: if there is no such part.
    """
    prefix, records = "", tuple(leaves)
    for key in keys:
        spellings = (f"[{key!r}]", f".{key}")
        begin = next((s for s in spellings for x in records if x.path.startswith(prefix + s)), None)
        if begin is None:
            tops = dict.fromkeys(_first_key(x.path.removeprefix(prefix)) for x in records)
            raise CheckpointError(messages.no_part(path, keys, tuple(tops)))
        prefix += begin
        records = tuple(x for x in records if _is_below(x.path, prefix))
    return records, prefix


def _is_below(path: str, prefix: str) -> bool:
    rest = path[len(prefix) :]
    return path.startswith(prefix) and (not rest or rest[0] in "[.")


def _first_key(path: str) -> str:
    """The outermost key of a path.

    >>> _first_key("['params']['w']"), _first_key(".count")
    ("['params']", '.count')
    """
    if path.startswith("["):
        return path[: path.find("]") + 1]
    return "." + path[1:].split("[")[0].split(".")[0]


def _in_saved_precision(asked: PyTree, types: dict[str, str]) -> PyTree:
    """The tree that is wanted, with the floating dtypes of what was saved."""

    def change(path: Any, x: Leaf) -> Leaf:
        saved = types.get(jax.tree_util.keystr(path), "").partition("[")[0]
        if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating) or not _is_floating(saved):
            return x
        return struct(x.shape, jnp.dtype(saved), sharding=getattr(x, "sharding", None))

    return jax.tree_util.tree_map_with_path(change, asked)


def _is_floating(name: str) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(name), jnp.floating))
    except TypeError:
        return False


def _differences(saved: tuple[tuple[str, str], ...], asked: tuple[tuple[str, str], ...]) -> list[str]:
    """How the leaves that are asked for differ from those that were saved, in words."""
    here, there = dict(asked), dict(saved)
    missing = [f"{path} {what} is not in it" for path, what in asked if path not in there]
    other = [f"{path} is {there[path]}, not {what}" for path, what in asked if there.get(path, what) != what]
    more = [f"{path} {what} is in it, too" for path, what in saved if path not in here]
    return [*other, *missing, *more]
