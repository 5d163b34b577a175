"""Reading a step, and comparing what is there with its manifest."""

from collections.abc import Collection, Sequence
from itertools import compress
from typing import Any

import jax
from jax.tree_util import keystr

from sbp.compat.errors import is_damage
from sbp.compat.untyped import PyTree
from sbp.errors import CheckpointError, DamagedCheckpointError
from sbp.runtime.arrays.reader import differing_leaves, read_arrays
from sbp.runtime.arrays.selection import Selection
from sbp.runtime.arrays.state import LeafRecord, as_asked, plain_like
from sbp.runtime.checkpoint import messages
from sbp.runtime.checkpoint.manifest import Manifest
from sbp.runtime.checkpoint.steps import ARRAYS, EXTRA, step_path
from sbp.runtime.checkpoint.steps import others as steps_beside
from sbp.runtime.pipeline.transfer_engine import TransferEngine
from sbp.runtime.storage import extras, files
from sbp.runtime.storage.agreement import agree
from sbp.runtime.storage.files import Path
from sbp.runtime.storage.libraries import orbax
from sbp.runtime.storage.messages import MOST_SHOWN, storage_failure


def read_state(
    folder: Path,
    manifest: Manifest,
    wanted: Selection,
    engine: TransferEngine,
    *,
    check: bool,
    apart: Collection[str] = (),
) -> PyTree:
    """The leaves of a step that are wanted, where they are wanted; all processes come here.

    Arguments:
      folder: of the checkpoints.
      check: whether checksums are compared.
      apart: the paths of leaves that are read apart; `orbax.PLACEHOLDER` stands for them.

    Raises:
      DamagedCheckpointError: if the step is not what was written.
      CheckpointError: if it cannot be read.
    """
    path, others = step_path(folder, manifest.step), steps_beside(folder, manifest.step)
    nothing = orbax().PLACEHOLDER
    asked = jax.tree.map_with_path(lambda p, x: nothing if keystr(p) in apart else x, wanted.tree)
    abstract = jax.tree.map(lambda x: x if x is nothing else plain_like(x), asked)
    found = list[PyTree]()

    def action() -> None:
        found.append(read(path, manifest, abstract, wanted.keys, others))

    agree(f"read {path.name}", path, action)
    if check:
        flags = [x is not nothing for x in jax.tree.leaves(asked)]
        records = [*compress(wanted.records, flags)]
        check_arrays(path, records, [*compress(jax.tree.leaves(found[0]), flags)], others)
    return jax.tree.map(lambda x, like: x if like is nothing else as_asked(x, like, engine), found[0], asked)


def read(
    path: Path, manifest: Manifest, abstract: PyTree, keys: Sequence[str | int], others: Sequence[int]
) -> PyTree:
    """The arrays of a step, or of a part of it.

    Arguments:
      path: of the step.
      abstract: what is wanted, of the structure that was saved.
      keys: of the part in the saved state, outermost first.
      others: steps that could be restored instead.

    Raises:
      DamagedCheckpointError: if the files are not what was written.
      CheckpointError: if they cannot be read.
    """
    try:
        return read_arrays(arrays_path(path, manifest), abstract, keys)
    except Exception as e:
        if not is_damage(e):
            raise CheckpointError(storage_failure(path, e)) from e
        raise DamagedCheckpointError(messages.damaged_step(path, others, str(e)[:200])) from e


def arrays_path(path: Path, manifest: Manifest) -> Path:
    """Where orbax has written the arrays of a step."""
    return path / manifest.data / ARRAYS


def check_arrays(path: Path, records: Sequence[LeafRecord], found: PyTree, others: Sequence[int]) -> None:
    """Compares what was read with the checksums of what was written; all processes say the same.

    Arguments:
      path: of the step.
      records: of the leaves.
      found: the state, in the layout that it was read in; each process looks at its parts.
      others: steps that could be restored instead.

    Raises:
      DamagedCheckpointError: naming the leaves that differ.
    """
    if wrong := differing_leaves(path.name, records, found):
        what = f"{', '.join(wrong[:MOST_SHOWN])} has other elements than were written"
        raise DamagedCheckpointError(messages.damaged_step(path, others, what))


def check_sizes(path: Path, manifest: Manifest, others: Sequence[int]) -> None:
    """Compares the sizes of the files of a step: what is missing is said in words before orbax reads.

    Raises:
      DamagedCheckpointError: naming what is wrong.
    """
    there = files.sizes(path / manifest.data / ARRAYS)
    missing = [f"{name} is missing" for name in manifest.sizes if name not in there]
    found = [(name, size, there.get(name, size)) for name, size in manifest.sizes.items()]
    if wrong := missing + [f"{name} has {now} bytes, not {size}" for name, size, now in found if now != size]:
        raise DamagedCheckpointError(messages.damaged_step(path, others, "; ".join(wrong[:MOST_SHOWN])))


def read_extra(path: Path, manifest: Manifest, others: Sequence[int]) -> Any:
    """What is kept beside the state of a step.

    Raises:
      DamagedCheckpointError: if it is not as it was written.
      CheckpointError: if it cannot be read.
    """
    file = b""
    try:
        if manifest.extra_digest is not None:
            file = files.read(path / manifest.data / EXTRA)
        if extras.digest(file) != manifest.extra_digest:
            raise ValueError("it has other bytes than were written")
        return extras.decode(manifest.extra, file)
    except (FileNotFoundError, *extras.DAMAGE) as e:
        raise DamagedCheckpointError(
            messages.damaged_step(path, others, f"{EXTRA} cannot be read: {e}")
        ) from None
    except OSError as e:
        raise CheckpointError(storage_failure(path, e)) from e
