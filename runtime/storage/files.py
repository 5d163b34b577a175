"""Files of checkpoints on whatever orbax takes: a file system, or an object store behind a URL.

All that happens to files in a folder of checkpoints, orbax's own apart, happens here. Three operations carry
the guarantees. `create` makes a file that was not there, in one step that only one writer wins: a hard link
on a file system, a conditional put on an object store. `replace` changes a file as a whole. `sync` returns
when what was written would outlive a loss of power.
"""

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Iterator
from typing import Any

from sbp.errors import CheckpointError
from sbp.runtime.storage import libraries, messages, object_store
from sbp.runtime.storage.locations import check_name, in_the_way, is_url, location

NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""What file systems without hard links say."""

Path = Any
"""An `epath.Path`, from a package that the `checkpoint` extra brings."""


def folder_path(given: str | bytes | os.PathLike[str]) -> Path:
    """The path of a folder as a user has given it: a URL, or a path made absolute.

    Raises:
      CheckpointError: for what is neither, and for a URL that orbax cannot write to.
    """
    path = libraries.epath_module().Path(location(given))
    if is_url(path):
        object_store.filesystem(path)
        libraries.check_arrays_go_to(os.fspath(path), object_store.s3_endpoint)
    return path


def check_folder(folder: Path) -> None:
    """Sees whether there is a folder, or could be one.

    Raises:
      CheckpointError: if something else is in the way, or it cannot be looked at.
    """
    if is_url(folder):
        return
    try:
        os.listdir(folder)
    except FileNotFoundError as e:
        if (wrong := in_the_way(os.fspath(folder), e)) is not None:
            raise CheckpointError(wrong) from None
    except OSError as e:
        raise _cannot(folder, e) from e


def make_folder(folder: Path) -> None:
    """Makes a folder, and those that it lies in, if they are not there; an object store needs none.

    Raises:
      CheckpointError: if nothing can be made there, naming what is in the way.
    """
    check_name(os.fspath(folder))
    if is_url(folder):
        return
    try:
        with contextlib.suppress(FileNotFoundError):
            os.stat(folder)  # before any of those that it lies in is made
        os.makedirs(folder, exist_ok=True)
    except OSError as e:
        raise _cannot(folder, e) from e


def inode(folder: Path) -> int:
    """The number that a file system has for a folder; a copy has another one."""
    return 0 if is_url(folder) else os.stat(folder).st_ino


def real_name(folder: Path) -> str:
    """What names a folder, by whatever links it was reached."""
    return os.fspath(folder) if is_url(folder) else os.path.realpath(folder)


def names(folder: Path) -> list[str]:
    """What a folder holds, by name; nothing where there is no folder.

    Raises:
      CheckpointError: if nobody can tell.
    """
    try:
        return object_store.names(folder) if is_url(folder) else sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as e:
        raise _cannot(folder, e) from e


def sizes(folder: Path) -> dict[str, int]:
    """The bytes of every file below a folder, by its path in there; not of what is deleted meanwhile."""
    if is_url(folder):
        return object_store.sizes(folder)
    start, found = len(os.fspath(folder)) + 1, dict[str, int]()
    for file in (os.fspath(at / name) for at, _, names in folder.walk() for name in names):
        with contextlib.suppress(FileNotFoundError):
            found[file[start:]] = os.stat(file).st_size
    return found


def read(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
      FileNotFoundError: if there is none.
    """
    return object_store.read(path) if is_url(path) else bytes(path.read_bytes())


def exists(path: Path) -> bool:
    """Whether there is a file.

    Raises:
      CheckpointError: if nobody can tell: what cannot be looked at is not taken for absent.
    """
    try:
        if is_url(path):
            return object_store.exists(path)
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as e:
        raise _cannot(path, e) from e
    return True


def create(path: Path, data: bytes) -> None:
    """Makes a file that is not there, whole or not at all; one of several writers wins: see `is_exclusive`.

    Arguments:
      data: of no other writer, such as with a token in it.

    Raises:
      FileExistsError: if there is one.
    """
    if is_url(path):
        object_store.create(path, data)
        return
    with _temporary(path, data) as made:
        try:
            os.link(made, path)
        except OSError as e:
            if os.stat(made).st_nlink == 2:
                pass  # over a network: the link was made, its answer lost, and the second try has found it
            elif e.errno not in NO_LINKS:
                raise
            else:
                with open(path, "xb") as file:  # not whole after a crash, but nobody else's
                    _write(file, data)
    sync_folder(path.parent)


def is_exclusive(path: Path, data: bytes) -> bool:
    """Whether nobody else could have created a file that this process has just created.

    Arguments:
      data: that it has created it with.
    """
    return object_store.is_exclusive(path, data) if is_url(path) else True


def replace(path: Path, data: bytes) -> None:
    """Writes a file anew, as a whole."""
    if is_url(path):
        object_store.replace(path, data)
        return
    with _temporary(path, data) as made:
        os.replace(made, path)
    sync_folder(path.parent)


def rename(path: Path, to: Path) -> None:
    """Gives a file another name in its folder; a file system does it in one step, and on a full disk, too."""
    if is_url(path):
        replace(to, read(path))
        remove(path)
        return
    os.rename(path, to)
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Deletes a file, if it is there."""
    if is_url(path):
        object_store.remove(path)
        return
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def remove_tree(folder: Path) -> None:
    """Deletes a folder with all that it holds, if it is there."""
    if is_url(folder):
        object_store.remove_tree(folder)
        return
    with contextlib.suppress(FileNotFoundError):
        folder.rmtree()


def remove_temporaries(folder: Path, pattern: str, beginning: bytes) -> None:
    """Deletes what a process that was killed has left of files that it was creating or replacing.

    Arguments:
      pattern: of the names of the files.
      beginning: of what they hold: what begins otherwise is somebody else's.
    """
    for name in () if is_url(folder) else names(folder):
        if re.fullmatch(rf"\.{pattern}\.[0-9a-f]{{32}}\.tmp", name):
            with contextlib.suppress(FileNotFoundError):
                if beginning.startswith(read(folder / name)[: len(beginning)]):
                    remove(folder / name)


def remove_empty(folder: Path) -> None:
    """Deletes a folder that holds nothing; an object store has no such thing."""
    if not is_url(folder):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def sync_tree(folder: Path) -> None:
    """Returns when all files of a folder are on the disk."""
    if is_url(folder):
        return
    for at, _, files in folder.walk():
        for name in files:
            with (at / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(at)


def sync_folder(folder: Path) -> None:
    """Returns when the names in a folder are on the disk."""
    if is_url(folder):
        return
    at = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(at)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.EBADF, *NO_LINKS):  # some file systems cannot
            raise
    finally:
        os.close(at)


def listed_by_orbax(folder: Path, pattern: str) -> set[str]:
    """The names of a folder that orbax finds at this moment when it looks for a pattern."""
    if is_url(folder):
        object_store.forget_listings(folder)
    return {x.name for x in folder.glob(pattern)}


# -- inside


def _cannot(folder: Path, error: OSError) -> CheckpointError:
    """Why a folder cannot be made or looked at, in words."""
    wrong = None if is_url(folder) else in_the_way(os.fspath(folder), error)
    return CheckpointError(wrong or messages.storage_failure(folder, error))


@contextlib.contextmanager
def _temporary(path: Path, data: bytes) -> Iterator[Path]:
    """A file of a name of its own beside another, gone afterwards."""
    made = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        with made.open("wb") as file:
            _write(file, data)
        yield made
    finally:
        with contextlib.suppress(OSError):
            made.unlink(missing_ok=True)


def _write(file: Any, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
