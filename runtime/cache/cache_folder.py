"""A folder of files for the next process: plans, and programs that XLA has compiled.

No reader sees half of a file, whoever writes at the same time. A folder that cannot be written costs a search
or a compilation, and raises no error.
"""

import functools
import hashlib
import os
import platform
import sys
import warnings
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from sbp.compat.cache import CacheRequests, watch_cache
from sbp.options import Options
from sbp.runtime.cache import trust
from sbp.runtime.cache.trust import DIGEST_BYTES, NotTrustedError

COMPILED = ".xla"
"""The end of the names of compiled programs."""
MOST_COMPILED_BYTES = 4e9
"""Of compiled programs: a train step takes from 0.1 MB to 100 MB."""


@dataclass(frozen=True)
class CacheFolder:
    """Files of one kind in a folder, which may hold others.

    Arguments:
      path: made when the first file is written.
      suffix: of the names of the files.
      most_bytes: the limit on their sum; the least recently used go first.
      key: signs them, if others read and write them too; None for files of the user alone.
    """

    path: Path
    suffix: str
    most_bytes: float
    key: bytes | None = field(default=None, repr=False)

    def file(self, name: str) -> Path:
        """The path of a file, if it exists."""
        return self.path / (name + self.suffix)

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none, or it cannot be read."""
        try:
            found = self.file(name).read_bytes()
        except OSError:
            return None
        self.note_use(name)
        return found

    def note_use(self, name: str) -> None:
        """Makes a file the most recently used one."""
        with suppress(OSError):
            os.utime(self.file(name))

    def write(self, name: str, data: bytes) -> None:
        """Writes a file; an old one is replaced."""
        with suppress(OSError):
            trust.write_file(self.file(name), data, self.key)
            self._trim()

    def _trim(self) -> None:
        """Deletes the least recently used files beyond the limit; unfinished ones count too."""
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
    """Programs that XLA has compiled, by JAX's keys: of the program, XLA's version and options, the devices.

    They are code: a file is used only if nobody else can have written it, or if the folder's key has signed
    it.
    """

    folder: CacheFolder

    def get(self, key: str) -> bytes | None:
        """The program of a key; None if there is none, or it is damaged, or not to be trusted."""
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
        """Stores the program of a key."""
        name = self._name(key)
        self.folder.write(name, trust.digest(self.folder.key, *self._signed(name, value)) + value)

    def _signed(self, name: str, value: bytes) -> tuple[bytes, ...]:
        """The signed bytes: with the name, so that no file passes for another one of the folder."""
        return name.encode(), value

    def _name(self, key: str) -> str:
        """The file name of a key; code for a CPU also depends on the CPU, which JAX's key does not have."""
        return hashlib.sha256(f"{host_cpu()} {key}".encode()).hexdigest()[:40]


@functools.cache
def host_cpu() -> str:
    """A digest of this machine's CPU, as far as compiled code depends on it."""
    words = [platform.machine(), platform.processor()]
    with suppress(OSError), Path("/proc/cpuinfo").open() as file:  # of Linux
        words += [next((line for line in file if line.startswith(("flags", "Features"))), "")]
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]


def user_folder() -> Path | None:
    """The folder in the platform's folder for caches of the user; None if there is no home."""
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
    """The folder of a compilation.

    Arguments:
      path: of the folder.
      key: signs compiled programs; None if owners and modes of files decide.
    """

    path: Path
    key: bytes | None = field(default=None, repr=False)


def cache_of(options: Options) -> Cache | None:
    """The cache of a compilation; None if it keeps nothing."""
    path = options.cache if isinstance(options.cache, Path) else user_folder() if options.cache else None
    return None if path is None else Cache(path, options.signing_key)


def cache_context(cache: Cache | None) -> AbstractContextManager[CacheRequests]:
    """A context in which compiled programs are looked up in a folder first, and stored there.

    Arguments:
      cache: None to store nothing; nothing is stored either if others can write the folder and nothing is
        signed.
    """
    reason = None if cache is None else others_of(cache.path)
    if cache is None or (reason is not None and cache.key is None):
        if cache is not None and reason is not None:
            warn_of(cache.path, reason)
        return watch_cache(None, "")
    files = CompiledFolder(CacheFolder(cache.path, COMPILED, MOST_COMPILED_BYTES, cache.key))
    # What XLA keeps in a folder by itself is not signed.
    return watch_cache(files, str(cache.path), keeps_own=reason is None)


def others_of(path: Path) -> str | None:
    """Who else can write a folder; None if nobody can, or if this process cannot see it."""
    try:
        return trust.others_of_folder(path)
    except OSError:
        return None


@functools.cache
def warn_of(path: Path, reason: str) -> None:
    """Warns once that compiled programs are neither looked up nor stored in a folder."""
    warnings.warn(
        f"sbp: the compiled programs in {path} are not used: {reason}, and they are code. Take a folder of "
        "your own with Options(cache=...), chmod go-w, or sign them with Options(signing_key=...)",
        stacklevel=2,
    )
