"""Decides whether a file of code may be run: only its user and root can have written it, or a key signed it.

A compiled program is code. Its checksum proves that it is whole, but not who made it. So a file is read only
if it belongs to the user or to root, and nobody else can write it or a folder above it; the opened file
itself is checked, by its descriptor. Where others write too, HMAC-SHA256 with a shared key proves that one of
them has written it. Windows has no such owners and modes: there nothing is checked.
"""

import hashlib
import hmac
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

DIGEST_BYTES = hashlib.sha256().digest_size
ROOT = 0
HAS_OWNERS = hasattr(os, "geteuid")
ACL = "system.posix_acl_access"
"""What Linux calls the list of further users and groups of a file."""


class NotTrustedError(Exception):
    """Others could have written a file; `str` names them."""


def digest(key: bytes | None, *parts: bytes) -> bytes:
    """The digest before a program: SHA-256 of its parts, or HMAC-SHA256 of them with a key.

    >>> digest(None, b"a", b"b") == digest(None, b"ab"), digest(b"k", b"a", b"b") == digest(b"k", b"ab")
    (True, False)
    """
    if key is None:
        return hashlib.sha256(b"".join(parts)).digest()
    found = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:  # each with its length: no part can pass for the beginning of the next one
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def is_digest(given: bytes, key: bytes | None, *parts: bytes) -> bool:
    """Whether a digest belongs to some parts; the time does not depend on where it is wrong."""
    return hmac.compare_digest(given, digest(key, *parts))


def read_file(path: str | os.PathLike[str], key: bytes | None) -> bytes:
    """Reads a file of code.

    Arguments:
      key: the key of its signature, which the caller checks; None for a file that only the user and root can
        have written.

    Raises:
      NotTrustedError: if there is no key and others could have written it, or if it is no regular file.
      OSError: if it cannot be read.
    """
    real = os.path.realpath(path)
    if key is None and (reason := _others_above(real)) is not None:
        raise NotTrustedError(reason)
    # A pipe would wait for who writes it; a link that has come since would lead elsewhere.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    handle = os.open(real, flags | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise NotTrustedError(f"{real} is no regular file")
        if key is None and (reason := _others(real, found)) is not None:
            raise NotTrustedError(reason)
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes, key: bytes | None) -> None:
    """Writes a file in one step; readers see the old one until then.

    Arguments:
      key: None for a file of the user alone; a signed file has the usual rights of the user's files.

    Raises:
      OSError: if it cannot be written; the old file stays.
    """
    path.parent.mkdir(0o700 if key is None else 0o777, parents=True, exist_ok=True)
    unfinished = f"{path}.{uuid.uuid4().hex}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(unfinished, flags, 0o600 if key is None else 0o666)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.replace(unfinished, path)
    except OSError:
        with suppress(OSError):
            os.unlink(unfinished)
        raise


def others_of_folder(path: str | os.PathLike[str]) -> str | None:
    """Who else could put files into a folder, or replace it; None if nobody can.

    Arguments:
      path: of the folder; if it does not exist, the folders above it count.
    """
    real = os.path.realpath(path)
    with suppress(FileNotFoundError):
        return _others_above(real) or _others(real, os.lstat(real))
    return _others_above(real)


# -- inside


def _others_above(path: str) -> str | None:
    """Who else could replace a file or folder; in a sticky folder only its owner."""
    with suppress(FileNotFoundError):
        for folder in reversed(Path(path).parents):
            found = os.lstat(folder)
            if (reason := _others(str(folder), found, bool(found.st_mode & stat.S_ISVTX))) is not None:
                return reason
    return None


def _others(path: str, found: os.stat_result, is_sticky: bool = False) -> str | None:
    """Who else could have written a file or folder."""
    if not HAS_OWNERS:
        return None
    if found.st_uid not in (os.geteuid(), ROOT):
        return f"{path} belongs to {_user(found.st_uid)}"
    who = "" if is_sticky else " and ".join(_writers(path, found))
    return f"{path} can be written by {who}" if who else None


def _writers(path: str, found: os.stat_result) -> Iterator[str]:
    if found.st_mode & stat.S_IWGRP and not _is_private(path, found):
        yield f"the group {_group(found.st_gid)}"
    if found.st_mode & stat.S_IWOTH:
        yield "everybody"


def _is_private(path: str, found: os.stat_result) -> bool:
    """Whether a group has no other user: many systems make a group of the same name for each user."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(found.st_uid), grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    is_own = user.pw_gid == found.st_gid != ROOT and group.gr_name == user.pw_name
    return is_own and {*group.gr_mem} <= {user.pw_name} and not _has_list(path)


def _has_list(path: str) -> bool:
    """Whether an access list names more users and groups: then the group's bits are those of all of them."""
    try:
        return ACL in os.listxattr(path, follow_symlinks=False)
    except (OSError, AttributeError):  # no such lists there
        return False


def _user(number: int) -> str:
    import pwd

    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"the user {number}"


def _group(number: int) -> str:
    import grp

    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
