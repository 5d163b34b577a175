"""What can be wrong with files, folders and their owners, in words."""

from collections.abc import Sequence

from sbp.compat.errors import is_full
from sbp.errors import Problem

MOST_SHOWN = 4
_RIGHTS = "the rights of the folder, and its disk"


def problem(path: object, got: str, legal: str, why: str, fix: str) -> Problem:
    """What is wrong with something at a path."""
    return Problem("checkpoint", str(path), got, legal, why, fix)


def not_installed() -> Problem:
    """No orbax."""
    legal, why = "the package orbax-checkpoint", "it writes and reads the arrays of checkpoints"
    return problem("sbp.save", "no orbax.checkpoint", legal, why, "pip install 'sbp-jax[checkpoint]'")


def no_path(text: str) -> Problem:
    """What no file system takes as a path."""
    got = "a path with a NUL character in it" if text else "an empty path"
    why = "nothing can lie there" if text else "it may come from a variable that is not set"
    return problem(repr(text), got, "a folder, or a URL of one", why, "runs/first")


def no_home(text: str, user: str) -> Problem:
    """A home directory of nobody."""
    why = "this host knows no such user, and a folder of that name is hardly meant"
    return problem(text, f"no home directory for {user}", "a folder", why, f"./{text}, if it is meant")


def unknown_scheme(text: str, schemes: Sequence[str]) -> Problem:
    """A URL of something that orbax does not write to."""
    legal = ", ".join(f"{s}://bucket/folder" for s in schemes) + ", or a path"
    why = "the arrays are written by orbax, which knows these"
    return problem(
        text, f"a URL of {text.partition('://')[0]}://", legal, why, f"{schemes[0]}://bucket/folder"
    )


def broken_url(text: str, scheme: str) -> Problem:
    """A URL that went through `pathlib`, which takes away a slash."""
    fixed = text.replace(":/", "://", 1)
    why = f"pathlib.Path takes one of the slashes of {scheme}:// away"
    return problem(text, "one slash behind the colon", "a URL as a string", why, repr(fixed))


def other_host(text: str, host: str) -> Problem:
    """A URL of a file of another host, or of none."""
    got = f"a file of the host {host!r}" if host else "a URL of no file"
    why = "a file: URL names a path of this host, behind three slashes"
    return problem(text, got, "file:///folder, or a path", why, "the path alone")


def no_bucket_named(text: str, scheme: str) -> Problem:
    """A URL without a bucket."""
    why = "the name of the bucket stands behind the two slashes"
    legal = f"{scheme}://bucket/folder"
    return problem(text, "a URL without a bucket", legal, why, legal)


def no_bucket(url: object, bucket: str) -> Problem:
    """A bucket that is not there."""
    why = "buckets are made by who pays for them, with a region and rights"
    return problem(url, f"no bucket {bucket}", "a bucket that is there", why, "its name; or make it first")


def pattern(text: object, character: str) -> Problem:
    """A folder whose name is a pattern of names."""
    why = "orbax treats this as a pattern, or as the end of a path, and would not find its own files again"
    return problem(text, f"a name with {character} in it", "a name without * ? [ #", why, "another name")


def no_filesystem(scheme: str, package: str) -> Problem:
    """An object store whose files cannot be listed here."""
    why = "files of the object store are listed with it"
    fix = "pip install 'sbp-jax[object-store]'"
    return problem(f"{scheme}://", f"no {package}", f"the package {package}", why, fix)


def no_arrays_there(url: object, version: str) -> Problem:
    """A version of orbax that cannot be made to write into an object store."""
    why = "this version of orbax-checkpoint does not write arrays there, and has changed where it is told to"
    fix = "gs://, a folder that is mounted, or another version of orbax-checkpoint"
    return problem(url, f"orbax-checkpoint {version}", "a version that can", why, fix)


def dangling_link(link: object, target: str, is_loop: bool) -> Problem:
    """A symbolic link to nothing.

    Arguments:
      is_loop: whether it points to another link, which points to nothing.
    """
    got = f"a symbolic link to {target}, which is " + ("a link to nothing itself" if is_loop else "not there")
    fix = f"rm {link}" if is_loop else f"mkdir -p {target}"
    return problem(link, got, "a folder, or a path of none", "nothing can be made behind it", fix)


def not_a_folder(folder: object, file: str) -> Problem:
    """A file where a folder should be, or be made in it."""
    got = "a file" if str(folder) == file else f"{file} is a file"
    return problem(folder, got, "a folder, or a path of none", "nothing can lie in a file", "another folder")


def too_long(folder: str, longest_bytes: int) -> Problem:
    """A path that the file system does not take."""
    got = f"a path of {len(folder)} characters, its longest name of {longest_bytes} bytes"
    why = "the file system takes no longer ones; most take names of 255 bytes and paths of 4,096"
    return problem(f"{folder[:60]}...", got, "a shorter path", why, "another folder")


def storage_failure(path: object, error: Exception) -> Problem:
    """What the file system, or orbax, has raised."""
    text = str(error).strip().splitlines()
    got = f"{type(error).__name__}: {text[0] if text else ''}"[:300]
    full = is_full(error)
    why = "the disk is full" if full else "the files could not be written or read"
    rights = "the rights in the bucket, and the network" if "://" in str(path) else _RIGHTS
    fix = "space on the disk, or a smaller keep=" if full else rights
    if "interpreter shutdown" in got:
        why = "Python has ended while the step was written, and lets no thread begin any more"
        fix = "wait() or close() of the Checkpoints before the program ends, or `with`"
    return problem(path, got, "a folder for it", f"{why}; the steps before are untouched", fix)


def extra(where: str, got: str) -> Problem:
    """Something beside the state that cannot be kept."""
    legal = "dicts by strings, lists, numbers, strings, bytes, None, arrays and keys"
    why = "the extra is read without running code from it"
    return problem(where, got, legal, why, "a tree of these; get_state() of an object")


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
