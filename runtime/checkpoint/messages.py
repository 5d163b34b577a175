"""What can be wrong with a checkpoint, in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from sbp.errors import Problem
from sbp.runtime.storage.messages import problem


def keep(name: str, count: int) -> Problem:
    """A number of steps to keep that is none."""
    why = "the last step must stay"
    return Problem("argument", f"Checkpoints({name}=...)", str(count), "1 or more", why, f"{name}=3")


# -- one step


def step_exists(target: object) -> Problem:
    """A step that was saved already."""
    why, fix = "a step is written once; the existing one might be the only copy", "another step or folder"
    return problem(target, "a step that is there already", "a new step", why, fix)


def foreign(target: object) -> Problem:
    """A step's folder that something else has made."""
    got, why = "a folder that this library has not written", "nothing of others is changed or deleted"
    return problem(target, got, "a new step, or one of its own", why, "another folder for these checkpoints")


def none(path: object, step: int | None, steps: Sequence[int], abandoned: Sequence[int] = ()) -> Problem:
    """No step that could be restored."""
    got = f"step {step}" if step is not None else "no complete step"
    if step in abandoned:
        got += ", which was set aside when training went on from an older step"
    legal = f"one of {', '.join(map(str, steps))}" if steps else "a folder that something was saved to"
    return problem(path, got, legal, "only complete steps are restored", "the folder that was given to save")


def in_one_line(problem: Problem) -> str:
    """What is wrong, why, and what to try."""
    return f"{problem.got}; {problem.why}; try {problem.fix}"


def damaged_step(path: object, others: Sequence[int], what: str) -> Problem:
    """A step that is not as it was written.

    Arguments:
      others: steps of the same folder.
    """
    why = "a checkpoint is restored completely or not at all; training must not continue with wrong weights"
    fix = f"restore(..., step={others[-1]})" if others else "another copy: the folder has no other step"
    return Problem("damaged", str(path), what, "the files as they were written", why, fix)


def pruned_step(path: object) -> Problem:
    """A step that was deleted while it was read."""
    why = "its owner deletes all but the last keep= steps, and does not wait for readers"
    got = "a step that was pruned while it was read"
    return Problem("damaged", str(path), got, "a step that is there", why, "restore again")


def other_version(path: object, data: Mapping[str, Any], name: str, version: int) -> Problem:
    """A manifest that another version has written.

    Arguments:
      name, version: of the format that is read here.
    """
    made = data.get("made_by", "something else")
    got = f"format {data['format']!r}, version {data['version']!r}, made by {made}"
    why = "another version of this library may have written it"
    fix = "restore it with that version; the array files are orbax's, and can be read with it"
    return problem(path, got, f"{name!r}, version {version} or 1", why, fix)


def not_shared(path: object) -> Problem:
    """A folder that process 0 has made, and this process does not see."""
    why = "all processes write into one folder, and process 0 reads what they have written"
    fix = "a folder on a file system that all hosts share, or an object store"
    return problem(path, "nothing there in this process", "what process 0 has made there", why, fix)


def not_listed(path: object, missing: Sequence[str]) -> Problem:
    """What another process has written, and process 0 does not see."""
    why = "the storage has not listed it in time"
    return problem(path, f"no {', '.join(missing)}", "what all processes have written", why, "to save again")


def set_aside(folder: object, gone: Sequence[int], step: int) -> str:
    """A warning: steps that training has gone back from."""
    many = "step" if len(gone) == 1 else "steps"
    return (
        f"{folder}: {many} {', '.join(map(str, gone))} set aside: training went on from an older step, "
        f"and has saved step {step}; Checkpoints.abandoned_steps lists them"
    )


def not_pruned(folder: object, step: int, error: Exception) -> str:
    """A warning: older steps that could not be deleted."""
    return (
        f"{folder}: step {step} was saved, but older ones could not be deleted: "
        f"{type(error).__name__}: {str(error)[:200]}; the next save tries again"
    )


def passed_over(folder: object, step: int, what: str) -> str:
    """A warning: a step that is damaged, where none was asked for by its number."""
    return f"{folder}: step {step} is passed over, since it is damaged: {what}; the one before it is taken"


def taken_next(folder: object, step: int) -> str:
    """A warning: a step that vanished while it was read."""
    return f"{folder}: step {step} was pruned while it was read; the next one is taken"
