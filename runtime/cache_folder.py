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
import tempfile
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from sbp.compat_cache import Watched, watched
from sbp.options import Options

COMPILED = ".xla"
"""The end of the names of compiled programs."""
MOST_COMPILED_BYTES = 4e9
"""Of compiled programs: a train step takes from 0.1 MB to 100 MB."""
DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class CacheFolder:
    """Files of one kind in a folder, in which there may be others.

    Arguments:
      path: made when the first file is written.
      suffix: of the names of the files.
      most_bytes: what they may take together. Those that were not used for longest go first.
    """

    path: Path
    suffix: str
    most_bytes: float

    def read(self, name: str) -> bytes | None:
        """What is in a file; None if there is none, or it cannot be read."""
        file = self.path / (name + self.suffix)
        try:
            found = file.read_bytes()
        except OSError:
            return None
        with suppress(OSError):
            os.utime(file)  # it is in use
        return found

    def write(self, name: str, data: bytes) -> None:
        """Writes a file; one that is there is replaced."""
        file = self.path / (name + self.suffix)
        with suppress(OSError):
            self.path.mkdir(parents=True, exist_ok=True)
            handle, unfinished = tempfile.mkstemp(prefix=file.name, dir=self.path)
            try:
                with os.fdopen(handle, "wb") as out:
                    out.write(data)
                os.replace(unfinished, file)
            except OSError:
                os.unlink(unfinished)
                raise
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
    """What XLA has compiled, by JAX's keys: of the program, of XLA's version and options, of the devices."""

    folder: CacheFolder

    def get(self, key: str) -> bytes | None:
        """What was put under a key; None if there is nothing, or it is damaged."""
        found = self.folder.read(self._name(key))
        if found is None or hashlib.sha256(found[DIGEST_BYTES:]).digest() != found[:DIGEST_BYTES]:
            return None
        return found[DIGEST_BYTES:]

    def put(self, key: str, value: bytes) -> None:
        """Keeps something under a key."""
        self.folder.write(self._name(key), hashlib.sha256(value).digest() + value)

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


def folder_of(options: Options) -> Path | None:
    """Where a compilation keeps what the next process can use; None if it keeps nothing."""
    if not options.cache:
        return None
    return options.cache if isinstance(options.cache, Path) else user_folder()


def caching(folder: Path | None) -> AbstractContextManager[Watched]:
    """A context in which what XLA compiles is looked for in a folder first, and kept there.

    Arguments:
      folder: None to keep nothing.
    """
    if folder is None:
        return watched(None, "")
    return watched(CompiledFolder(CacheFolder(folder, COMPILED, MOST_COMPILED_BYTES)), str(folder))
