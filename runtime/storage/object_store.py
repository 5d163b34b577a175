"""Files of checkpoints in an object store, by fsspec: small ones, listings, and what is deleted.

The arrays are TensorStore's. Both try again by themselves what fails for the moment, for half a minute or
longer, so that what is raised here will not go away by trying once more. Listings are never remembered: other
processes write there. An error is never taken for "it is not there".
"""

import contextlib
import errno
import functools
import importlib
import os
from typing import Any

from sbp.errors import CheckpointError
from sbp.runtime.storage import messages
from sbp.runtime.storage.locations import SCHEMES

Path = Any
"""An `epath.Path` of a URL."""
UNCONDITIONAL = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What stores answer that know no conditional put."""


def names(folder: Path) -> list[str]:
    """What lies directly in a folder, by name.

    Raises:
      FileNotFoundError: if there is nothing.
    """
    found = filesystem(folder).ls(os.fspath(folder), detail=False, refresh=True)
    start = f"{_key(folder)}/"
    inside = (x.rstrip("/").removeprefix(start) for x in found if x.startswith(start))
    return sorted({name for name in inside if name})


def sizes(folder: Path) -> dict[str, int]:
    """The bytes of every object below a folder, by its path in there."""
    found = filesystem(folder).find(os.fspath(folder), detail=True)
    start = f"{_key(folder)}/"
    return {x.removeprefix(start): int(about["size"]) for x, about in found.items() if x != start}


def read(path: Path) -> bytes:
    """The bytes of an object.

    Raises:
      FileNotFoundError: if there is none.
    """
    return bytes(filesystem(path).cat_file(os.fspath(path)))


def exists(path: Path) -> bool:
    """Whether there is an object."""
    try:
        filesystem(path).info(os.fspath(path))
    except FileNotFoundError:
        return False
    return True


def create(path: Path, data: bytes) -> None:
    """A put that the store refuses where there is something, if it knows such a thing: see `is_exclusive`.

    Arguments:
      data: of no other writer, so that who has lost an answer knows its own.

    Raises:
      FileExistsError: if there is something.
      CheckpointError: if there is no such bucket.
    """
    if exists(path):  # for stores that take the condition, and forget it
        raise FileExistsError(os.fspath(path))
    try:
        _put(path, data, mode="create")
    except (NotImplementedError, TypeError, ValueError):
        _put(path, data)
    except OSError as e:
        if e.errno in UNCONDITIONAL:
            _put(path, data)
            return
        # The first answer may have been lost, and the second try have found what the first one put. And not
        # every store says that it is the condition that has failed.
        try:
            there = read(path)
        except FileNotFoundError:
            raise e from None
        if there != data:
            raise FileExistsError(os.fspath(path)) from e


def is_exclusive(path: Path, data: bytes) -> bool:
    """Whether the store refuses to `create` once more what this process has just created.

    A store that takes the condition and forgets it lets two writers create the same object.
    """
    try:
        _put(path, data, mode="create")
    except FileExistsError:
        return True
    except (NotImplementedError, TypeError, ValueError, ConnectionError, TimeoutError):
        return False
    except OSError as e:
        return e.errno not in UNCONDITIONAL
    return False


def replace(path: Path, data: bytes) -> None:
    """Writes an object anew, as a whole."""
    _put(path, data)


def remove(path: Path) -> None:
    """Deletes an object, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        filesystem(path).rm_file(os.fspath(path))


def remove_tree(folder: Path) -> None:
    """Deletes all objects below a folder."""
    with contextlib.suppress(FileNotFoundError):
        filesystem(folder).rm(os.fspath(folder), recursive=True)


def forget_listings(folder: Path) -> None:
    """Makes epath, by which orbax lists, look anew: it remembers what it has listed in this process."""
    epath_backend = importlib.import_module("etils.epath.backend")
    with contextlib.suppress(
        ImportError
    ):  # under TensorFlow epath does without fsspec, and remembers nothing
        epath_backend.fsspec_backend.fs(os.fspath(folder)).invalidate_cache()


def filesystem(path: Path | str) -> Any:
    """The file system of a URL.

    Raises:
      CheckpointError: if its package is not installed.
    """
    return _filesystem_of(os.fspath(path).partition("://")[0])


def s3_endpoint() -> dict[str, str]:
    """Where `s3://` is, for TensorStore, as `AWS_ENDPOINT_URL` or AWS's files say; {} for Amazon's own."""
    store = filesystem("s3://")
    store.connect()
    about = store.s3.meta
    if ".amazonaws." in about.endpoint_url:
        return {}
    region = about.region_name or ""
    return {
        "endpoint": about.endpoint_url,
        "aws_region": "us-east-1" if region in ("", "aws-global") else region,
    }


# -- inside


def _key(path: Path) -> str:
    """The bucket and the name, as fsspec has them."""
    return os.fspath(path).partition("://")[2]


def _put(path: Path, data: bytes, **how: str) -> None:
    at = os.fspath(path)
    try:
        filesystem(path).pipe_file(at, data, **how)
    except FileNotFoundError:
        raise CheckpointError(messages.no_bucket(at, _key(path).partition("/")[0])) from None


@functools.cache
def _filesystem_of(scheme: str) -> Any:
    try:
        return importlib.import_module("fsspec").filesystem(scheme, use_listings_cache=False)
    except ImportError:
        raise CheckpointError(messages.no_filesystem(scheme, SCHEMES[scheme])) from None
