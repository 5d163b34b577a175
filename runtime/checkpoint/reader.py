"""Reading a step, and comparing what is there with its manifest."""

from collections.abc import Sequence
from typing import Any

from sbp.compat.errors import is_damage
from sbp.compat.untyped import PyTree
from sbp.errors import CheckpointError, DamagedCheckpointError
from sbp.runtime.arrays.reader import differing, read_arrays
from sbp.runtime.arrays.state import LeafRecord
from sbp.runtime.checkpoint import messages
from sbp.runtime.checkpoint.manifest import Manifest
from sbp.runtime.checkpoint.steps import ARRAYS, EXTRA
from sbp.runtime.processes.process_group import process_group
from sbp.runtime.storage import extras, files
from sbp.runtime.storage.files import Path
from sbp.runtime.storage.messages import MOST_SHOWN, failed


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
    at = path if manifest.files is not None else path / manifest.data / ARRAYS
    try:
        return read_arrays(at, abstract, keys)
    except Exception as e:
        if not is_damage(e):
            raise CheckpointError(failed(path, e)) from e
        raise DamagedCheckpointError(messages.damaged(path, others, str(e)[:200])) from e


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
    if wrong := differing(path.name, records, found):
        what = f"{', '.join(wrong[:MOST_SHOWN])} has other elements than were written"
        raise DamagedCheckpointError(messages.damaged(path, others, what))


def check_sizes(path: Path, manifest: Manifest, others: Sequence[int]) -> None:
    """Compares the sizes of the files of a step: what is missing is said in words before orbax reads.

    Raises:
      DamagedCheckpointError: naming what is wrong.
    """
    there = files.sizes(path / manifest.data / ARRAYS)
    missing = [f"{name} is missing" for name in manifest.sizes if name not in there]
    found = [(name, size, there.get(name, size)) for name, size in manifest.sizes.items()]
    if wrong := missing + [f"{name} has {now} bytes, not {size}" for name, size, now in found if now != size]:
        raise DamagedCheckpointError(messages.damaged(path, others, "; ".join(wrong[:MOST_SHOWN])))


def check_files(path: Path, manifest: Manifest, others: Sequence[int]) -> None:
    """Compares the files of a step of version 1; each process looks at its share, and all say the same.

    Raises:
      DamagedCheckpointError: naming what is wrong.
    """
    group = process_group()
    index, count = (0, 1) if group is None else (group.index, group.count)
    every_file = sorted((manifest.files or {}).items())[index::count]
    mine = [*filter(None, (files.damage(path / name, name, *known) for name, known in every_file))]
    every = [mine] if group is None else group.gathered(f"checksums of {path.name}", mine)
    if found := [wrong for one in every for wrong in one]:
        raise DamagedCheckpointError(messages.damaged(path, others, "; ".join(found[:MOST_SHOWN])))


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
        return extras.decoded(manifest.extra, file)
    except (FileNotFoundError, *extras.DAMAGE) as e:
        raise DamagedCheckpointError(messages.damaged(path, others, f"{EXTRA} cannot be read: {e}")) from None
    except OSError as e:
        raise CheckpointError(failed(path, e)) from e
