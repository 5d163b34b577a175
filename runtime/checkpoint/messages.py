"""What can be wrong with a checkpoint, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sbp.errors import Problem

FULL = ("No space left", "RESOURCE_EXHAUSTED", "File too large", "Disk quota")
"""What a full disk is called by those who write."""
MOST_SHOWN = 4


def _problem(path: object, got: str, legal: str, why: str, fix: str) -> Problem:
    return Problem("checkpoint", str(path), got, legal, why, fix)


def keep(count: int) -> Problem:
    """A number of steps to keep that is none."""
    why = "the last step must stay"
    return Problem("argument", "Checkpoints(keep=...)", str(count), "1 or more", why, "keep=3")


def not_installed() -> Problem:
    """No orbax."""
    legal, why = "the package orbax-checkpoint", "it writes and reads the arrays of checkpoints"
    return _problem("sbp.save", "no orbax.checkpoint", legal, why, "pip install 'sbp-jax[checkpoint]'")


def there(target: Path) -> Problem:
    """A step that was saved already."""
    why, fix = "a step is written once: what is there might be the only copy", "another step or folder"
    return _problem(target, "a step that is there already", "a new step", why, fix)


def none(path: Path, step: int | None, steps: Sequence[int]) -> Problem:
    """No step that could be restored."""
    got = f"step {step}" if step is not None else "no complete step"
    legal = f"one of {', '.join(map(str, steps))}" if steps else "a folder that something was saved to"
    why = "only what was written whole is restored"
    return _problem(path, got, legal, why, "the folder that was given to save")


def other_state(path: Path, differs: Sequence[str]) -> Problem:
    """A checkpoint of something else."""
    more = f"; and {len(differs) - MOST_SHOWN} more" if len(differs) > MOST_SHOWN else ""
    got = "; ".join(differs[:MOST_SHOWN]) + more
    why = "a checkpoint is restored into a state of its own shape"
    return _problem(path, got, "the leaves that were saved", why, "like=... of the model that was saved")


def failed(path: Path, error: Exception) -> Problem:
    """What the file system, or orbax, has raised."""
    text = str(error).strip().splitlines()
    got = f"{type(error).__name__}: {text[0] if text else ''}"[:300]
    full = any(word in str(error) for word in FULL)
    why = "the disk is full" if full else "the files could not be written or read"
    fix = "space on the disk, or a smaller keep=" if full else "the rights of the folder, and its disk"
    return _problem(path, got, "a folder for it", f"{why}; the steps before are untouched", fix)


def damaged(path: Path, others: Sequence[int], what: str) -> Problem:
    """A checkpoint whose files are not as they were written.

    Arguments:
      others: steps of the same folder.
    """
    why = "a checkpoint is restored whole or not at all: other weights would train on without a word"
    fix = f"restore(..., step={others[-1]})" if others else "another copy: the folder has no other step"
    return _problem(path, what, "the files as they were written", why, fix)


def other_version(path: Path, data: Mapping[str, Any], name: str, version: int) -> Problem:
    """A manifest that another version has written.

    Arguments:
      name, version: of the format that is read here.
    """
    made = data.get("made_by", "something else")
    got = f"format {data['format']!r}, version {data['version']!r}, made by {made}"
    why = "another version of this library may have written it"
    fix = "restore it with that version; the array files are orbax's, and can be read with it"
    return _problem(path, got, f"{name!r}, version {version}", why, fix)
