"""The steps of a folder: which there are, which were set aside, and what may be deleted.

    step_00000200/
      sbp_manifest.json                      the step exists when this does
      sbp_manifest.abandoned-<token>.json    it was set aside: training went on from an older step
      sbp_manifest.pruned-<token>.json       it is about to be deleted
      data-<token>/sbp_owner.json            what marks a folder as this library's
      data-<token>/arrays/                   orbax's
      data-<token>/extra.npz                 arrays that are kept beside the state
    sbp_steps.json                           the steps once more, for stores that list late

Only folders with the mark are deleted, and a step's manifest goes before them: half a step does not look like
one. Whatever else lies there stays, and its folder with it.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sbp.errors import CheckpointError, DamagedCheckpointError
from sbp.runtime.checkpoint import messages
from sbp.runtime.checkpoint.manifest import MANIFEST, Manifest, decode
from sbp.runtime.storage import files
from sbp.runtime.storage.files import Path
from sbp.runtime.storage.locations import is_url
from sbp.runtime.storage.messages import storage_failure

ARRAYS, EXTRA = "arrays", "extra.npz"
OWNER = "sbp_owner.json"
INDEX = "sbp_steps.json"
_STEP = re.compile(r"step_(\d{8,})")
_ABANDONED = re.compile(r"sbp_manifest\.abandoned-(\w+)\.json")
_PRUNED = re.compile(r"sbp_manifest\.pruned-\w+\.json")
_DATA = re.compile(r"data-[0-9a-f]{32}")


def step_path(folder: Path, step: int) -> Path:
    """Where a step is."""
    return folder / f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a folder's name; None for names that `step_path` does not give.

    >>> step_of("step_00000007"), step_of("step_7"), step_of("step_00000007.tmp")
    (7, None, None)
    """
    found = _STEP.fullmatch(name)
    step = None if found is None else int(found[1])
    return step if step is not None and f"step_{step:08d}" == name else None


def finished_steps(folder: Path) -> list[int]:
    """The steps that exist, the oldest first."""
    candidates = {step_of(name) for name in files.names(folder)} | _index(folder)
    return sorted(s for s in candidates if s is not None and files.exists(step_path(folder, s) / MANIFEST))


def read_bytes(folder: Path, step: int) -> bytes:
    """The file of a step's manifest.

    Raises:
      DamagedCheckpointError: if the step was pruned meanwhile.
      CheckpointError: if it cannot be read.
    """
    path = step_path(folder, step)
    try:
        return files.read(path / MANIFEST)
    except FileNotFoundError:
        raise DamagedCheckpointError(messages.pruned_step(path)) from None
    except OSError as e:
        raise CheckpointError(storage_failure(path, e)) from e


def read_manifest(folder: Path, step: int) -> Manifest:
    """The manifest of a step.

    Raises:
      DamagedCheckpointError: if it is not what was written, or the step was pruned meanwhile.
      CheckpointError: if another version has written it.
    """
    return decode(step_path(folder, step), step, read_bytes(folder, step), others(folder, step))


def others(folder: Path, step: int) -> list[int]:
    """The other steps of a folder."""
    return [s for s in finished_steps(folder) if s != step]


def last_sequence(folder: Path, there: Sequence[int]) -> int:
    """The highest number that a save in a folder has had, as far as what is there says it; 0 for none.

    Arguments:
      there: the steps that exist, the oldest first.

    Raises:
      OSError: if nobody can tell.
    """
    found = [x.sequence for x in abandoned_steps(folder)]
    for step in reversed(there):  # the last one was saved last, but might be damaged
        with contextlib.suppress(FileNotFoundError, CheckpointError):
            found.append(
                decode(step_path(folder, step), step, files.read(step_path(folder, step) / MANIFEST)).sequence
            )
            break
    return max(found, default=0)


# -- what is set aside


@dataclass(frozen=True, order=True)
class AbandonedStep:
    """A step that was set aside.

    Arguments:
      sequence: how many saves the folder had before it.
      step: of the training.
      token: of its save.
    """

    sequence: int
    step: int
    token: str

    def manifest_path(self, folder: Path) -> Path:
        """Where its manifest is."""
        return step_path(folder, self.step) / _abandoned_name(self.token)


def abandoned_steps(folder: Path) -> list[AbandonedStep]:
    """The steps that were set aside, the first saved first; those whose manifest is damaged are left out."""
    found = []
    for name in files.names(folder):
        step = step_of(name)
        for file in files.names(folder / name) if step is not None else ():
            if match := _ABANDONED.fullmatch(file):
                manifest = _readable(folder / name / file, step or 0)
                if manifest is not None:
                    found.append(AbandonedStep(manifest.sequence, manifest.step, match[1]))
    return sorted(found)


def aside_path(folder: Path, step: int, token: str) -> Path:
    """What the manifest of a step is renamed to in order to set it aside; its arrays stay.

    Arguments:
      token: of the save that takes its place: it names a step whose own token cannot be read.
    """
    path = step_path(folder, step)
    manifest = _readable(path / MANIFEST, step)
    return path / _abandoned_name(token if manifest is None or not manifest.token else manifest.token)


def take_back(folder: Path, step: int, aside: Path) -> None:
    """Lets a step exist again that was set aside, unless another one has its place."""
    manifest = step_path(folder, step) / MANIFEST
    if files.exists(aside) and not files.exists(manifest):
        files.rename(aside, manifest)


def withdraw(folder: Path, step: int, token: str) -> None:
    """Takes the manifest of one save away, if it is there."""
    path = step_path(folder, step)
    manifest = _readable(path / MANIFEST, step)
    if manifest is not None and manifest.token == token:
        files.remove(path / MANIFEST)
        files.sync_folder(path)


# -- what is deleted


def prune(folder: Path, keep: int, keep_every: int | None, check: Callable[[], None]) -> None:
    """Deletes the steps that need not stay, and all but the last `keep` of those that were set aside.

    A step whose manifest is damaged does not count: the last ones that stay can be restored.

    Arguments:
      check: raises, if the folder is not this process's any more; called before each deletion.
    """
    steps = finished_steps(folder)
    stay = {s for s in steps if keep_every is not None and s % keep_every == 0}
    counted = 0
    for step in reversed(steps):
        if counted < keep:
            stay.add(step)
            counted += _readable(step_path(folder, step) / MANIFEST, step) is not None
    write_index(folder, stay)
    for step in steps:
        if step not in stay:
            check()
            _remove_step(folder, step, check)
    for old in abandoned_steps(folder)[:-keep]:
        check()
        path = old.manifest_path(folder)
        _remove_version(folder, old.step, path, _readable(path, old.step))


def _remove_step(folder: Path, step: int, check: Callable[[], None]) -> None:
    """Takes a step's manifest away, and deletes it all if the folder is still this process's.

    So an owner that was taken for dead just before it deletes a step takes none from the new one, which may
    have saved this step again.
    """
    path = step_path(folder, step)
    manifest, at = _readable(path / MANIFEST, step), path / MANIFEST
    if manifest is not None:
        at = path / f"sbp_manifest.pruned-{manifest.token}.json"
        files.rename(path / MANIFEST, at)
    try:
        check()
        _remove_version(folder, step, at, manifest)
    except Exception:
        take_back(folder, step, at)
        raise


def _remove_version(folder: Path, step: int, manifest_path: Path, manifest: Manifest | None) -> None:
    """Deletes a manifest and then the arrays that it names, and nothing else: others may be being written.

    Where it is damaged, the arrays stay until the folder has a new owner.
    """
    files.remove(manifest_path)
    files.sync_folder(manifest_path.parent)
    if manifest is not None:
        drop(folder, step, manifest.data)
    files.remove_empty(manifest_path.parent)


def sweep(folder: Path) -> None:
    """Deletes what saves have left that did not end: marked folders no manifest names, and temporary files.

    Who calls it owns the folder, and is not writing there.
    """
    files.remove_temporaries(folder, re.escape(INDEX), b'{"steps": [')
    for name in files.names(folder):
        if (step := step_of(name)) is not None:
            _sweep_step(folder, step)


def _sweep_step(folder: Path, step: int) -> None:
    """The same of one step, and deletes its folder, if it is empty."""
    path = step_path(folder, step)
    files.remove_temporaries(path, r"sbp_manifest[\w.-]*\.json", b'{"format": "sbp-checkpoint"')
    there = files.names(path)
    # Manifests are asked for by name, too: a listing that comes late must not cost a step its arrays.
    kept = {f for f in there if _ABANDONED.fullmatch(f)}
    kept |= {MANIFEST} if files.exists(path / MANIFEST) else set()
    manifests = [_readable(path / f, step) for f in kept]
    for name in filter(_PRUNED.fullmatch, there):
        files.remove(path / name)
    named = {m.data for m in manifests if m is not None}
    for name in there:
        if not _DATA.fullmatch(name) or name in named:
            continue
        if files.exists(path / _abandoned_name(name.removeprefix("data-"))):
            continue
        if not files.exists(path / name / OWNER):  # the mark comes first: nothing else can be in there
            files.remove_temporaries(path / name, re.escape(OWNER), b'{"token": "')
            files.remove_empty(path / name)
        elif None not in manifests:  # one that is damaged might name these arrays
            _remove_data(path / name)
    files.remove_empty(path)


def drop(folder: Path, step: int, data: str, keeps_mark: bool = False) -> None:
    """Deletes the arrays of one save, unless the step's manifest names them, or cannot be read.

    Arguments:
      keeps_mark: whether the mark stays, since something might still be written there.
    """
    path = step_path(folder, step)
    if files.exists(path / MANIFEST):
        manifest = _readable(path / MANIFEST, step)
        if manifest is None or manifest.data == data:
            return
    _remove_data(path / data, keeps_mark)
    files.remove_empty(path)


def _remove_data(data: Path, keeps_mark: bool = False) -> None:
    """Deletes the folder of a save; its mark goes last, for who must go on if this process is killed."""
    files.remove_tree(data / ARRAYS)
    for name in files.names(data):
        if name != OWNER:
            with contextlib.suppress(OSError):  # a folder: it goes with the rest
                files.remove(data / name)
    if not keeps_mark:
        files.remove_tree(data)


def is_foreign(path: Path) -> bool:
    """Whether a step's folder holds something, and nothing of it has a name of this library's.

    Names suffice where nothing is deleted: who saves the same step now might not have set its mark.
    """
    there = files.names(path)
    return bool(there) and not any(
        f == MANIFEST or any(name.fullmatch(f) for name in (_ABANDONED, _PRUNED, _DATA)) for f in there
    )


def write_index(folder: Path, steps: Iterable[int]) -> None:
    """Notes the steps once more, for stores that list late."""
    files.replace(folder / INDEX, json.dumps({"steps": sorted(steps)}).encode())


# -- inside


def _abandoned_name(token: str) -> str:
    """The manifest of a save that was set aside."""
    return f"sbp_manifest.abandoned-{token}.json"


def _index(folder: Path) -> set[int | None]:
    """The steps that were noted; what was never written, or is damaged, says nothing: the folders do, too.

    Raises:
      CheckpointError: if a store that may list late does not answer.
    """
    try:
        return {s for s in json.loads(files.read(folder / INDEX))["steps"] if isinstance(s, int)}
    except FileNotFoundError:
        return set()
    except OSError as e:
        if is_url(folder):
            raise CheckpointError(storage_failure(folder / INDEX, e)) from e
        return set()
    except (ValueError, KeyError, TypeError, RecursionError):
        return set()


def _readable(path: Path, step: int) -> Manifest | None:
    """A manifest, unless it is damaged."""
    try:
        return decode(path.parent, step, files.read(path))
    except (OSError, CheckpointError):
        return None
