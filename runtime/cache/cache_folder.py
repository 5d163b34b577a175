"""A folder of files for the next process: what searches have found, and what XLA has compiled.

No reader sees half of a file, whoever writes at the same time; a folder that cannot be written costs a search
or a compilation, and no error.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
import warnings
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from sbp.compat.cache import Watched, watched
from sbp.options import Options
from sbp.runtime.cache import trust
from sbp.runtime.cache.trust import DIGEST_BYTES, NotTrustedError

COMPILED = ".xla"
"""The end of the names of compiled programs."""
MOST_COMPILED_BYTES = 4e9
"""Of compiled programs: a train step takes from 0.1 MB to 100 MB."""


@dataclass(frozen=True)
class CacheFolder:
    """Files of one kind in a folder, in which there may be others.

    Arguments:
      path: made when the first file is written.
      suffix: of the names of the files.
      most_bytes: what they may take together. Those that were not used for longest go first.
      key: what signs them, where others read and write them too; None for files of the user alone.
    """

    path: Path
    suffix: str
    most_bytes: float
    key: bytes | None = field(default=None, repr=False)

    def file(self, name: str) -> Path:
        """Where a file is, if it is there."""
        return self.path / (name + self.suffix)

    def read(self, name: str) -> bytes | None:
        """What is in a file; None if there is none, or it cannot be read."""
        try:
            found = self.file(name).read_bytes()
        except OSError:
            return None
        self.note_use(name)
        return found

    def note_use(self, name: str) -> None:
        """Makes a file the youngest one."""
        with suppress(OSError):
            os.utime(self.file(name))

    def write(self, name: str, data: bytes) -> None:
        """Writes a file; one that is there is replaced."""
        with suppress(OSError):
            trust.write_file(self.file(name), data, self.key)
            self._trim()

    def _trim(self) -> None:
        """Deletes the oldest files until the others are within the limit; unfinished ones count too."""
        found = []
        for file in self.path.glob(f"*{self.suffix}*"):
            with suppress(OSError):  # another process may have deleted it
                stat = file.stat()
                found.append((stat.st_mtime, stat.st_size, file))
        size = sum(n for _, n, _ in found)
        for _, n, file in sorted(found):
            if size <= self.most_bytes:
                return
            with suppress(OSError):
                file.unlink()
            size -= n


@dataclass(frozen=True)
class CompiledFolder:
    """What XLA has compiled, by JAX's keys: of the program, of XLA's version and options, of the devices.

    It is code: a file counts that nobody else can have written, or that the folder's key has signed.
    """

    folder: CacheFolder

    def get(self, key: str) -> bytes | None:
        """What was put under a key; None if there is nothing, it is damaged, or not to be trusted."""
        name, signing = self._name(key), self.folder.key
        try:
            found = trust.read_file(self.folder.file(name), signing)
        except NotTrustedError as e:
            warn_of(self.folder.path, str(e))
            return None
        except OSError:
            return None
        digest, value = found[:DIGEST_BYTES], found[DIGEST_BYTES:]
        if not trust.is_digest(digest, signing, *self._signed(name, value)):
            return None
        self.folder.note_use(name)
        return value

    def put(self, key: str, value: bytes) -> None:
        """Keeps something under a key."""
        name = self._name(key)
        digest = trust.digest(self.folder.key, *self._signed(name, value))
        self.folder.write(name, digest + value)

    def _signed(self, name: str, value: bytes) -> tuple[bytes, ...]:
        """What the digest is of: with its name, so that no file passes for another one of the folder."""
        return name.encode(), value

    def _name(self, key: str) -> str:
        """Code for a CPU runs on CPUs like it alone, of which JAX's key knows nothing."""
        return hashlib.sha256(f"{host_cpu()} {key}".encode()).hexdigest()[:40]


@functools.cache
def host_cpu() -> str:
    """What code for this machine's CPU may rely on, as a digest: the kind of machine, and what it can do."""
    words = [platform.machine(), platform.processor()]
    with suppress(OSError), Path("/proc/cpuinfo").open() as file:  # of Linux
        words += [next((line for line in file if line.startswith(("flags", "Features"))), "")]
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]


def user_folder() -> Path | None:
    """The folder below the platform's folder for caches of the user; None if there is no home."""
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "darwin":
        caches = home / "Library" / "Caches"
    else:
        given = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
        caches = Path(given) if given else home / ".cache"
    return caches / "sbp"


@dataclass(frozen=True)
class Cache:
    """Where a compilation keeps what the next process can use.

    Arguments:
      path: of the folder.
      key: what signs compiled programs; None where the owners and modes of files decide.
    """

    path: Path
    key: bytes | None = field(default=None, repr=False)


def cache_of(options: Options) -> Cache | None:
    """Where a compilation keeps what the next process can use; None if it keeps nothing."""
    path = options.cache if isinstance(options.cache, Path) else user_folder() if options.cache else None
    return None if path is None else Cache(path, options.signing_key)


def caching(cache: Cache | None) -> AbstractContextManager[Watched]:
    """A context in which what XLA compiles is looked for in a folder first, and kept there.

    Arguments:
      cache: None to keep nothing; so it is too where others can write the folder, and nothing is signed.
    """
    reason = None if cache is None else others_of(cache.path)
    if cache is None or (reason is not None and cache.key is None):
        if cache is not None and reason is not None:
            warn_of(cache.path, reason)
        return watched(None, "")
    files = CompiledFolder(CacheFolder(cache.path, COMPILED, MOST_COMPILED_BYTES, cache.key))
    # What XLA keeps in a folder by itself is not signed.
    return watched(files, str(cache.path), keeps_own=reason is None)


def others_of(path: Path) -> str | None:
    """Who else can write a folder; None if nobody can, or if this process cannot even see it."""
    try:
        return trust.others_of_folder(path)
    except OSError:
        return None


@functools.cache
def warn_of(path: Path, reason: str) -> None:
    """Warns once that what is compiled is neither looked for in a folder, nor kept there."""
    warnings.warn(
        f"sbp: the compiled programs in {path} are not used: {reason}, and they are code. Take a folder of "
        "your own with Options(cache=...), chmod go-w, or sign them with Options(signing_key=...)",
        stacklevel=2,
    )
