"""Where a folder of checkpoints is, as a user has said it: what is meant, and why nothing can be made there.

A URL is one of an object store; everything else is a path of the file system. What a shell, a browser or
`pathlib` would have made of it otherwise is read as it was meant, or refused in words.
"""

import errno
import os
import posixpath
import re
import urllib.parse

from sbp.errors import CheckpointError, Problem
from sbp.runtime.storage import messages

SCHEMES = {"gs": "gcsfs", "s3": "s3fs"}
"""Object stores, and the package of the `object-store` extra that lists their files."""
LOCAL_HOSTS = ("", "localhost")
NO_FOLDER = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.ELOOP)
"""What a file system says where a part of a path is no folder."""
_URL = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.IGNORECASE | re.DOTALL)
_BROKEN = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)(.*)", re.IGNORECASE | re.DOTALL)
_PATTERN = "*?[#"
"""What fsspec, which lists object stores, takes as a pattern, and orbax as the end of a URL's path."""


def location(given: str | bytes | os.PathLike[str]) -> str:
    """The URL of an object store, or the absolute path, that is meant.

    Raises:
      CheckpointError: for what is neither.
    """
    text = os.fsdecode(given)
    if not text or "\0" in text:
        raise CheckpointError(messages.no_path(text))
    if url := _URL.fullmatch(text):
        return _of_url(text, url[1].lower(), url[2])
    if broken := _BROKEN.fullmatch(text):
        if broken[1].lower() == "file":
            return _absolute(urllib.parse.unquote(f"/{broken[2]}"))
        raise CheckpointError(messages.broken_url(text, broken[1]))
    return _absolute(text)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a location is in an object store."""
    return os.fspath(path).startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


def in_the_way(folder: str, error: OSError) -> Problem | None:
    """Why no folder can be at a path: the first part of the path that is none; None where it is not that.

    Arguments:
      error: what the file system has said.
    """
    if error.errno == errno.ENAMETOOLONG:
        return messages.too_long(folder, max(len(os.fsencode(part)) for part in folder.split("/")))
    if error.errno not in NO_FOLDER:
        return None
    parts = folder.split("/")
    for at in ("/".join(parts[:end]) for end in range(2, len(parts) + 1)):
        if not os.path.lexists(at) or os.path.isdir(at):
            continue
        if not os.path.islink(at) or os.path.exists(at):
            return messages.not_a_folder(folder, at)
        target = os.path.normpath(os.path.join(os.path.dirname(at), os.readlink(at)))
        return messages.dangling_link(at, target, os.path.lexists(target))
    return None


def check_name(folder: str) -> None:
    """Refuses a folder whose name orbax takes as a pattern when it collects what processes have written.

    Raises:
      CheckpointError: if it is such a name.
    """
    if "[" in folder:
        raise CheckpointError(messages.pattern(folder, "["))


# -- inside


def _of_url(text: str, scheme: str, rest: str) -> str:
    bucket, _, key = rest.partition("/")
    if scheme == "file":
        if bucket.lower() not in LOCAL_HOSTS or not key:
            raise CheckpointError(messages.other_host(text, bucket))
        return _absolute(urllib.parse.unquote(f"/{key}"))
    if scheme not in SCHEMES:
        raise CheckpointError(messages.unknown_scheme(text, tuple(SCHEMES)))
    if not bucket:
        raise CheckpointError(messages.no_bucket_named(text, scheme))
    if found := [c for c in _PATTERN if c in rest]:
        raise CheckpointError(messages.pattern(text, found[0]))
    # orbax takes .. and double slashes out; what is listed must lie where it writes.
    key = posixpath.normpath(f"/{key}").strip("/")
    return f"{scheme}://{bucket}" + (f"/{key}" if key else "")


def _absolute(text: str) -> str:
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise CheckpointError(messages.no_home(text, path.partition("/")[0]))
    path = os.path.join(os.getcwd(), path)
    if ".." in path.split("/"):
        return os.path.realpath(path)  # orbax takes .. out as if there were no links
    return os.path.normpath(path)
