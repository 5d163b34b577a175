"""`sbp.save` and `sbp.restore`: the checkpoints of a folder, without an object in between."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.storage import files
from sbp.untyped import DType, PyTree


def save(
    path: str | os.PathLike[str],
    state: PyTree,
    *,
    step: int,
    extra: PyTree = None,
    keep: int = 3,
) -> None:
    """Saves the state of a step in a folder of checkpoints; it returns when the step counts.

    All processes call it. `Checkpoints.save` writes while training goes on.

    Arguments:
      path: of the folder.
      state: arrays, numbers and keys in containers, such as a dict of parameters and optimizer's state.
      extra: what JSON can hold, arrays and keys: where the data were, for one.
      keep: how many of the last steps stay.

    Raises:
      CheckpointError: if it, or the step before it, cannot be written.
      NonFiniteError: if a leaf is NaN or infinite that was not so in the step before.

    >>> import tempfile, jax.numpy as jnp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, {"w": jnp.ones(2)}, step=1)
    ...     restore(folder, like={"w": jnp.zeros(2)})["w"].tolist()
    [1.0, 1.0]
    """
    folder = _folder(os.fspath(files.folder_path(path)))
    folder.keep = keep
    folder.save(state, step, extra)
    folder.wait()


def restore(
    path: str | os.PathLike[str],
    *,
    like: PyTree,
    step: int | None = None,
    check: bool = True,
    only: str | int | Sequence[str | int] | None = None,
    dtype: DType | type | None = None,
    strict: bool = False,
) -> PyTree:
    """The state of the last complete step of a folder, laid as `like` says: see `Checkpoints.restore`.

    Arguments:
      path: of the folder.
      like: a tree of arrays or `ShapeDtypeStruct`s with shardings, or a `Program` that was planned.
      step: which one; None for the last.
      check: whether checksums are compared.
      only: the part that is wanted, by its key or keys: the weights alone, for inference.
      dtype: that floating leaves are converted to.
      strict: whether a damaged step is an error also where no step is named; else the one before it is taken.

    Raises:
      DamagedCheckpointError: if it is not as it was written.
      CheckpointError: if there is none, or it is of something else.
    """
    return _folder(os.fspath(files.folder_path(path))).restore(
        like, step, check=check, only=only, dtype=dtype, strict=strict
    )


@functools.lru_cache(maxsize=64)
def _folder(path: str) -> Checkpoints:
    """One per folder: it knows what is being written there."""
    return Checkpoints(path)
