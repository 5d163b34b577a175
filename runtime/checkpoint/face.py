"""`sbp.save` and `sbp.restore`: the checkpoints of a folder, without an object in between."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from sbp.runtime.checkpoint.folder import Checkpoints
from sbp.untyped import PyTree


def save(
    path: str | os.PathLike[str],
    state: PyTree,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int = 3,
) -> None:
    """Saves the state of a step in a folder of checkpoints while training goes on: `Checkpoints.save`.

    All processes call it. `restore`, the next `save` and the end of Python wait for it.

    Arguments:
      path: of the folder.
      state: arrays, numbers and keys in containers, such as a dict of parameters and optimizer's state.
      extra: what JSON can hold, such as where the data were.
      keep: how many of the last steps stay.

    Raises:
      CheckpointError: if it, or the step before it, cannot be written.

    >>> import tempfile, jax.numpy as jnp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, {"w": jnp.ones(2)}, step=1)
    ...     restore(folder, like={"w": jnp.zeros(2)})["w"].tolist()
    [1.0, 1.0]
    """
    folder = _folder(os.path.abspath(path))
    folder.keep = keep
    folder.save(state, step, extra)


def restore(
    path: str | os.PathLike[str], *, like: PyTree, step: int | None = None, check: bool = True
) -> PyTree:
    """The state of the last complete step of a folder, laid as `like` says: see `Checkpoints.restore`.

    Arguments:
      path: of the folder.
      like: a tree of arrays or `ShapeDtypeStruct`s with shardings, or a `Program` that was planned.
      step: which one; None for the last.
      check: whether checksums are compared.

    Raises:
      CheckpointError: if there is none, it is damaged, or it is of something else.
    """
    return _folder(os.path.abspath(path)).restore(like, step, check=check)


@functools.lru_cache(maxsize=64)
def _folder(path: str) -> Checkpoints:
    """One per folder: it knows what is being written there."""
    return Checkpoints(path)
