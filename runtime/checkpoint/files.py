"""Checkpoints on disk: a folder per step, and in each a manifest with what is in it and a checksum per file.

A step is written under another name, and gets its own when it is complete: what carries its own name and a
manifest was complete once. Anything else is what a crash has left, and is no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbp.errors import CheckpointError
from sbp.runtime.checkpoint import messages
from sbp.version import VERSION as LIBRARY

FORMAT, VERSION = "sbp-checkpoint", 1
MANIFEST = "sbp_manifest.json"
TIMES = "_CHECKPOINT_METADATA"
"""In which orbax notes when it began and when it ended: written once more behind the manifest."""
_STEP = re.compile(r"step_(\d+)")
_CHUNK_BYTES = 1 << 24


def step_path(folder: Path, step: int) -> Path:
    """Where a step is."""
    return folder / f"step_{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """The steps that are complete, the oldest first."""
    if not folder.is_dir():
        return []
    named = ((_STEP.fullmatch(p.name), p) for p in folder.iterdir())
    return sorted(int(m[1]) for m, p in named if m is not None and (p / MANIFEST).is_file())


def files_in(path: Path) -> list[Path]:
    """All files of a step that hold its state, by name."""
    return sorted(p for p in path.rglob("*") if p.is_file() and p.name not in (MANIFEST, TIMES))


def checksum(path: Path) -> str:
    """The SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            found.update(chunk)
    return found.hexdigest()


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint.

    Arguments:
      step: of the training.
      leaves: per leaf its path, shape and dtype, such as ("['w']", "float32[64, 256]").
      extra: what the user keeps beside the state.
      files: per file, by its path in the folder, its bytes and its checksum.
    """

    step: int
    leaves: tuple[tuple[str, str], ...]
    extra: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]

    def write(self, path: Path) -> None:
        """Writes it into the folder of the step."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            "made_by": f"sbp {LIBRARY}",
            "step": self.step,
            "leaves": [list(leaf) for leaf in self.leaves],
            "extra": dict(self.extra),
            "files": {name: list(found) for name, found in self.files.items()},
        }
        (path / MANIFEST).write_text(json.dumps(data, indent=1))


def with_files(
    path: Path, step: int, leaves: Sequence[tuple[str, str]], extra: Mapping[str, Any]
) -> Manifest:
    """The manifest of a folder whose files are all there."""
    files = {p.relative_to(path).as_posix(): (p.stat().st_size, checksum(p)) for p in files_in(path)}
    return Manifest(step, tuple(leaves), extra, files)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a step.

    Raises:
      CheckpointError: if it cannot be read, or another version has written it.
    """
    try:
        data = json.loads((path / MANIFEST).read_text())
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            raise CheckpointError(messages.other_version(path, data, FORMAT, VERSION))
        return Manifest(
            int(data["step"]),
            tuple((str(a), str(b)) for a, b in data["leaves"]),
            dict(data["extra"]),
            {str(name): (int(size), str(digest)) for name, (size, digest) in data["files"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError) as e:
        if isinstance(e, CheckpointError):
            raise
        what = f"{MANIFEST} cannot be read: {e}"
        raise CheckpointError(messages.damaged(path, others(path), what)) from None


def damage(path: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> Iterator[str]:
    """What is wrong with the files of a step, in words; files are told apart among several who look.

    Arguments:
      part, parts: who looks, and how many do.
    """
    for i, (name, (size, digest)) in enumerate(sorted(manifest.files.items())):
        if i % parts != part:
            continue
        file = path / name
        if not file.is_file():
            yield f"{name} is missing"
        elif file.stat().st_size != size:
            yield f"{name} has {file.stat().st_size} bytes, not {size}"
        elif checksum(file) != digest:
            yield f"{name} has other bytes than were written"


def others(path: Path) -> list[int]:
    """The other complete steps of a step's folder."""
    return [s for s in steps_in(path.parent) if step_path(path.parent, s) != path]


def prune(folder: Path, keep: int) -> None:
    """Deletes the oldest complete steps but the last `keep`."""
    for step in steps_in(folder)[:-keep]:
        path = step_path(folder, step)
        (path / MANIFEST).unlink(missing_ok=True)  # first: half a step must not look like one
        shutil.rmtree(path, ignore_errors=True)


def probe(folder: Path) -> None:
    """Raises what the file system says to a new folder in this one.

    orbax makes a step's folder in a thread; where that fails, others of its threads wait ten minutes for it,
    and the process with them (orbax 0.12.8).
    """
    made = folder / f".probe-{os.getpid()}"
    made.mkdir()
    made.rmdir()


def sweep(folder: Path) -> None:
    """Deletes what crashes have left: folders of steps that are not complete."""
    for path in folder.iterdir() if folder.is_dir() else ():
        unfinished = path.name.startswith("step_") and not (path / MANIFEST).is_file()
        if unfinished and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
