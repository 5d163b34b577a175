"""`sbp.save` and `sbp.restore`: the checkpoints of a folder, without an object in between."""

import functools
import os
from collections.abc import Sequence

from sbp.compat.untyped import DType, PyTree
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.storage import files


def save(
    path: str | os.PathLike[str],
    state: PyTree,
    *,
    step: int,
    extra: PyTree = None,
    keep: int = 3,
) -> None:
    """Saves the state of a step in a folder of checkpoints; returns when the step is complete.

    All processes call it. `Checkpoints.save` writes in the background.

    Arguments:
      path: of the folder.
      state: arrays, numbers and keys in containers, such as a dict of parameters and optimizer's state.
      extra: a tree of JSON values, arrays and keys, such as the position in the data.
      keep: how many of the last steps stay.

    Raises:
      CheckpointError: if it, or the step before it, cannot be written.
      NonFiniteError: if a leaf is NaN or infinite that was finite in the step before.

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
    """The state of a folder's last complete step, with the shardings of `like`: see `Checkpoints.restore`.

    Arguments:
      path: of the folder.
      like: a tree of arrays or `ShapeDtypeStruct`s with shardings, or a `Program` that was planned.
      step: which one; None for the last.
      check: whether checksums are compared.
      only: the key or keys of the part to restore, such as the weights for inference.
      dtype: the type to convert floating leaves to.
      strict: whether a damaged last step is an error; otherwise the one before it is restored.

    Raises:
      DamagedCheckpointError: if the step is damaged.
      CheckpointError: if there is no such step, or it is of another state.
    """
    return _folder(os.fspath(files.folder_path(path))).restore(
        like, step, check=check, only=only, dtype=dtype, strict=strict
    )


@functools.lru_cache(maxsize=64)
def _folder(path: str) -> Checkpoints:
    """One per folder: it knows what is being written there."""
    return Checkpoints(path)
