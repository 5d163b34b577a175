"""What can be wrong with a checkpoint, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sbp.errors import Problem

FULL = ("No space left", "RESOURCE_EXHAUSTED", "File too large", "Disk quota")
"""What a full disk is called by those who write."""
_RIGHTS = "the rights of the folder, and its disk"
MOST_SHOWN = 4


def _problem(path: object, got: str, legal: str, why: str, fix: str) -> Problem:
    return Problem("checkpoint", str(path), got, legal, why, fix)


def keep(name: str, count: int) -> Problem:
    """A number of steps to keep that is none."""
    why = "the last step must stay"
    return Problem("argument", f"Checkpoints({name}=...)", str(count), "1 or more", why, f"{name}=3")


def not_installed() -> Problem:
    """No orbax."""
    legal, why = "the package orbax-checkpoint", "it writes and reads the arrays of checkpoints"
    return _problem("sbp.save", "no orbax.checkpoint", legal, why, "pip install 'sbp-jax[checkpoint]'")


def no_array(leaf: str, got: str) -> Problem:
    """A leaf of a state that is no array."""
    legal = "arrays of numbers, of truth values or of keys, and numbers of at most 64 bits"
    why = "a leaf is written as an array"
    fix = "extra= takes it, if JSON can hold it: text, and the state of a NumPy generator"
    return _problem(f"state{leaf}", got, legal, why, fix)


# -- paths


def no_path(text: str) -> Problem:
    """What no file system takes as a path."""
    got = "a path with a NUL character in it" if text else "an empty path"
    why = "nothing can lie there" if text else "it may come from a variable that is not set"
    return _problem(repr(text), got, "a folder, or a URL of one", why, "runs/first")


def no_home(text: str, user: str) -> Problem:
    """A home directory of nobody."""
    why = "this host knows no such user, and a folder of that name is hardly meant"
    return _problem(text, f"no home directory for {user}", "a folder", why, f"./{text}, if it is meant")


def unknown_scheme(text: str, schemes: Sequence[str]) -> Problem:
    """A URL of something that orbax does not write to."""
    legal = ", ".join(f"{s}://bucket/folder" for s in schemes) + ", or a path"
    why = "the arrays are written by orbax, which knows these"
    return _problem(
        text, f"a URL of {text.partition('://')[0]}://", legal, why, f"{schemes[0]}://bucket/folder"
    )


def broken_url(text: str, scheme: str) -> Problem:
    """A URL that went through `pathlib`, which takes away a slash."""
    fixed = text.replace(":/", "://", 1)
    why = f"pathlib.Path takes one of the slashes of {scheme}:// away"
    return _problem(text, "one slash behind the colon", "a URL as a string", why, repr(fixed))


def other_host(text: str, host: str) -> Problem:
    """A URL of a file of another host, or of none."""
    got = f"a file of the host {host!r}" if host else "a URL of no file"
    why = "a file: URL names a path of this host, behind three slashes"
    return _problem(text, got, "file:///folder, or a path", why, "the path alone")


def no_bucket_named(text: str, scheme: str) -> Problem:
    """A URL without a bucket."""
    why = "the name of the bucket stands behind the two slashes"
    legal = f"{scheme}://bucket/folder"
    return _problem(text, "a URL without a bucket", legal, why, legal)


def no_bucket(url: object, bucket: str) -> Problem:
    """A bucket that is not there."""
    why = "buckets are made by who pays for them, with a region and rights"
    return _problem(url, f"no bucket {bucket}", "a bucket that is there", why, "its name; or make it first")


def pattern(text: object, character: str) -> Problem:
    """A folder whose name is a pattern of names."""
    why = "orbax takes this for a pattern, or the end of a path, and would not find again what it has written"
    return _problem(text, f"a name with {character} in it", "a name without * ? [ #", why, "another name")


def no_filesystem(scheme: str, package: str) -> Problem:
    """An object store whose files cannot be listed here."""
    why = "files of the object store are listed with it"
    fix = "pip install 'sbp-jax[object-store]'"
    return _problem(f"{scheme}://", f"no {package}", f"the package {package}", why, fix)


def no_arrays_there(url: object, version: str) -> Problem:
    """A version of orbax that cannot be made to write into an object store."""
    why = "this version of orbax-checkpoint does not write arrays there, and has changed where it is told to"
    fix = "gs://, a folder that is mounted, or another version of orbax-checkpoint"
    return _problem(url, f"orbax-checkpoint {version}", "a version that can", why, fix)


def dangling(link: object, target: str, is_loop: bool) -> Problem:
    """A symbolic link to nothing.

    Arguments:
      is_loop: whether it points to another link, which points to nothing.
    """
    got = f"a symbolic link to {target}, which is " + ("a link to nothing itself" if is_loop else "not there")
    why = "nothing can be made behind it"
    fix = f"rm {link}" if is_loop else f"mkdir -p {target}"
    return _problem(link, got, "a folder, or a path of none", why, fix)


def not_a_folder(folder: object, file: str) -> Problem:
    """A file where a folder should be, or be made in it."""
    got = "a file" if str(folder) == file else f"{file} is a file"
    return _problem(folder, got, "a folder, or a path of none", "nothing can lie in a file", "another folder")


def too_long(folder: str, longest_bytes: int) -> Problem:
    """A path that the file system does not take."""
    short = f"{folder[:60]}..."
    got = f"a path of {len(folder)} characters, its longest name of {longest_bytes} bytes"
    why = "the file system takes no longer ones; most take names of 255 bytes and paths of 4,096"
    return _problem(short, got, "a shorter path", why, "another folder")


# -- one step


def there(target: object) -> Problem:
    """A step that was saved already."""
    why, fix = "a step is written once: what is there might be the only copy", "another step or folder"
    return _problem(target, "a step that is there already", "a new step", why, fix)


def foreign(target: object) -> Problem:
    """A step's folder that something else has made."""
    got, why = "a folder that this library has not written", "nothing of others is changed or deleted"
    return _problem(target, got, "a new step, or one of its own", why, "another folder for these checkpoints")


def none(path: object, step: int | None, steps: Sequence[int], abandoned: Sequence[int] = ()) -> Problem:
    """No step that could be restored."""
    got = f"step {step}" if step is not None else "no complete step"
    if step in abandoned:
        got += ", which was set aside when training went on from an older step"
    legal = f"one of {', '.join(map(str, steps))}" if steps else "a folder that something was saved to"
    why = "only what was written whole is restored"
    return _problem(path, got, legal, why, "the folder that was given to save")


def other_state(path: object, differs: Sequence[str]) -> Problem:
    """A checkpoint of something else."""
    more = f"; and {len(differs) - MOST_SHOWN} more" if len(differs) > MOST_SHOWN else ""
    got = "; ".join(differs[:MOST_SHOWN]) + more
    why = "a checkpoint is restored into a state of its own shape"
    fix = "like=... of the model that was saved; only=... for a part of it, dtype=... for another precision"
    return _problem(path, got, "the leaves that were saved", why, fix)


def no_part(path: object, keys: Sequence[object], tops: Sequence[str]) -> Problem:
    """A part of a state that is not in it."""
    why = "only= takes the key of a part, or a tuple of keys, outermost first"
    return _problem(path, f"only={tuple(keys)!r}", f"one of {', '.join(tops)}", why, "only=... one of these")


def failed(path: object, error: Exception) -> Problem:
    """What the file system, or orbax, has raised."""
    text = str(error).strip().splitlines()
    got = f"{type(error).__name__}: {text[0] if text else ''}"[:300]
    full = any(word in str(error) for word in FULL)
    why = "the disk is full" if full else "the files could not be written or read"
    rights = "the rights in the bucket, and the network" if "://" in str(path) else _RIGHTS
    fix = "space on the disk, or a smaller keep=" if full else rights
    if "interpreter shutdown" in got:
        why = "Python has ended while the step was written, and lets no thread begin any more"
        fix = "wait() or close() of the Checkpoints before the program ends, or `with`"
    return _problem(path, got, "a folder for it", f"{why}; the steps before are untouched", fix)


def in_one_line(problem: Problem) -> str:
    """What is wrong, why, and what to try."""
    return f"{problem.got}; {problem.why}; try {problem.fix}"


def damaged(path: object, others: Sequence[int], what: str) -> Problem:
    """A step that is not as it was written.

    Arguments:
      others: steps of the same folder.
    """
    why = "a checkpoint is restored whole or not at all: other weights would train on without a word"
    fix = f"restore(..., step={others[-1]})" if others else "another copy: the folder has no other step"
    return Problem("damaged", str(path), what, "the files as they were written", why, fix)


def pruned(path: object) -> Problem:
    """A step that was deleted while it was read."""
    why = "its owner deletes all but the last keep= steps, and does not wait for those who read"
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
    return _problem(path, got, f"{name!r}, version {version} or 1", why, fix)


def not_shared(path: object) -> Problem:
    """A folder that process 0 has made, and this process does not see."""
    why = "all processes write into one folder, and process 0 reads what they have written"
    fix = "a folder on a file system that all hosts share, or an object store"
    return _problem(path, "nothing there in this process", "what process 0 has made there", why, fix)


def not_listed(path: object, missing: Sequence[str]) -> Problem:
    """What another process has written, and process 0 does not see."""
    why = "the storage has not listed it in time"
    return _problem(path, f"no {', '.join(missing)}", "what all processes have written", why, "to save again")


def extra(where: str, got: str) -> Problem:
    """Something beside the state that cannot be kept."""
    legal = "dicts by strings, lists, numbers, strings, bytes, None, arrays and keys"
    why = "what is kept beside the state is read without running code of it"
    return _problem(where, got, legal, why, "a tree of these; get_state() of an object")


# -- good states


def not_finite(where: str, bad: Sequence[tuple[str, str]]) -> Problem:
    """A state that has become NaN or infinite."""
    named = ", ".join(f"{path} ({what})" for path, what in bad[:MOST_SHOWN])
    more = f" and {len(bad) - MOST_SHOWN} more" if len(bad) > MOST_SHOWN else ""
    why = "every run that goes on from it is lost; it was not so in the last good step"
    fix = "an older step; exempt=['opt_state/*'] for leaves that may be so"
    return Problem("nonfinite", where, named + more, "leaves that are finite, as they were", why, fix)


def first_not_finite(where: str, leaves: Sequence[str]) -> str:
    """A warning: a first step that has leaves that are not finite."""
    return f"{where}: {', '.join(leaves[:MOST_SHOWN])} not finite in the first step that is saved"


def zeroed(where: str, leaves: Sequence[str]) -> str:
    """A warning: parameters that have become zero."""
    return f"{where}: all elements of {', '.join(leaves[:MOST_SHOWN])} have become zero"


def set_aside(folder: object, gone: Sequence[int], step: int) -> str:
    """A warning: steps that training has gone back from."""
    many = "step" if len(gone) == 1 else "steps"
    return (
        f"{folder}: {many} {', '.join(map(str, gone))} set aside: training went on from an older step, "
        f"and has saved step {step}; Checkpoints.abandoned lists them"
    )


def not_pruned(folder: object, step: int, error: Exception) -> str:
    """A warning: older steps that could not be deleted."""
    return (
        f"{folder}: step {step} was saved, but older ones could not be deleted: "
        f"{type(error).__name__}: {str(error)[:200]}; the next save tries again"
    )


def taken_next(folder: object, step: int) -> str:
    """A warning: a step that vanished while it was read."""
    return f"{folder}: step {step} was pruned while it was read; the next one is taken"


# -- who owns a folder


def lease_held(folder: object, owner: str, seconds: float) -> Problem:
    """A folder that another one writes to."""
    got = f"held by {owner}, which lives after {seconds:.0f} s of waiting"
    why = "two writers of one folder would delete each other's steps"
    legal, fix = "a folder of its own for each run", "another folder, or the end of that run"
    return Problem("lease", str(folder), got, legal, why, fix)


def lease_lost(folder: object, owner: str) -> Problem:
    """A folder that another one has taken over."""
    why = "this process was silent for so long that it was taken for dead; the step does not count"
    got, legal = f"taken over by {owner}", "a folder that is still this run's"
    return Problem("lease", str(folder), got, legal, why, "one run per folder")


def lease_awaited(folder: object, owner: str, seconds: float) -> str:
    """A warning: another one writes there."""
    return f"{folder} is held by {owner}; waiting up to {seconds:.0f} s for its end"


def lease_taken_over(folder: object, owner: str, reason: str) -> str:
    """A warning: who wrote there before."""
    return f"{folder} is taken over from {owner}: {reason}"


def lease_advisory(folder: object) -> str:
    """A warning: a storage that cannot tell who was first."""
    return (
        f"{folder}: this storage has no exclusive creation of files, so that two runs that start at once may "
        "both take the folder"
    )
