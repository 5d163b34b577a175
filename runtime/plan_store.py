"""Plans on disk: what a search has found, a file each, in the user's cache folder or one of their choice.

Files are compressed JSON (`zcat` shows one), read by a parser that can do no more than that. A file that
cannot be read, or that another version of this library or of JAX has written, is as good as none; a folder
that cannot be written costs a search, and no error.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from sbp.options import Options
from sbp.passes.plan.record import ChoiceRecord, read_record, record_data, versions
from sbp.runtime.processes.team import team

FORMAT, VERSION = "sbp-signatures", 2
SUFFIX = ".json.gz"
MOST_BYTES = 200e6
"""Of a folder. The files that were not used for longest go first."""


@dataclass(frozen=True)
class PlanFolder:
    """A folder of plans.

    Arguments:
      path: made when the first plan is saved.
      most_bytes: what the files may take together.
    """

    path: Path
    most_bytes: float = MOST_BYTES

    def load(self, key: str) -> ChoiceRecord | None:
        """What was saved under a key; None if there is no such file, or it cannot be read."""
        file = self._file(key)
        try:
            data = json.loads(gzip.decompress(file.read_bytes()))
            if (data["format"], data["version"], data["key"]) != (FORMAT, VERSION, key):
                return None
            record = read_record(data)
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError):
            return None
        with suppress(OSError):
            os.utime(file)  # it is in use
        return record

    def save(self, key: str, record: ChoiceRecord) -> None:
        """Writes a file; one that is there is replaced, and no reader sees half of one."""
        data = {"format": FORMAT, "version": VERSION, "key": key, **record_data(record)}
        text = gzip.compress(json.dumps(data).encode(), mtime=0)
        file = self._file(key)
        with suppress(OSError):
            self.path.mkdir(parents=True, exist_ok=True)
            handle, unfinished = tempfile.mkstemp(prefix=file.name, dir=self.path)
            try:
                with os.fdopen(handle, "wb") as out:
                    out.write(text)
                os.replace(unfinished, file)
            except OSError:
                os.unlink(unfinished)
                raise
            self._trim()

    def _file(self, key: str) -> Path:
        """Files of other versions have other names, and go when they are old."""
        name = hashlib.sha256(f"{versions()} {code_digest()} {key}".encode()).hexdigest()
        return self.path / (name[:40] + SUFFIX)

    def _trim(self) -> None:
        """Deletes the oldest files until the others are within the limit; unfinished ones count too."""
        found = []
        for file in self.path.glob(f"*{SUFFIX}*"):
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


@cache
def code_digest() -> str:
    """The digest of the compiler's own files: a plan is of the version that has made it, released or not."""
    found = hashlib.sha256()
    for file in sorted(_files()):
        found.update(file.read_bytes())
    return found.hexdigest()


def _files() -> Iterator[Path]:
    """The modules and tables that plans depend on."""
    for package in ("sbp", "sbp.passes"):
        root = Path(str(resources.files(package)))
        yield from (f for f in root.rglob("*") if f.suffix in (".py", ".csv") and f.is_file())


def user_folder() -> Path | None:
    """The folder of plans below the platform's folder for caches of the user; None if there is no home."""
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "darwin":
        caches = home / "Library" / "Caches"
    else:
        given = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
        caches = Path(given) if given else home / ".cache"
    return caches / "sbp" / "plans"


def store_of(options: Options) -> PlanFolder | None:
    """Where a compilation keeps its plans; None if it keeps none.

    Of several processes process 0 plans, and so has the only store.
    """
    others = team()
    if not options.cache or (others is not None and not others.leads):
        return None
    folder = options.cache if isinstance(options.cache, Path) else user_folder()
    return None if folder is None else PlanFolder(folder)
