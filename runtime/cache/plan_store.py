"""Plans on disk: the results of searches, a file each, in the user's cache folder or another one.

Files are compressed JSON (`zcat` shows one). Whoever has written a file, it can only choose among the
signatures that the rules allow. A file that cannot be read, or of another version of this library or of JAX,
counts as missing. A folder that cannot be written costs a search, and raises no error.
"""

import gzip
import hashlib
import json
import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from sbp.options import Options
from sbp.passes.plan.record import ChoiceRecord, read_record, record_data, versions
from sbp.runtime.cache import cache_folder
from sbp.runtime.cache.cache_folder import CacheFolder
from sbp.runtime.processes.process_group import process_group
from sbp.text.json_reader import json_of

LOG = logging.getLogger("sbp")

FORMAT, VERSION = "sbp-signatures", 2
SUFFIX = ".json.gz"
MOST_BYTES = 200e6
"""Of a folder. The files that were not used for longest go first."""
MOST_PLAN_BYTES = 100_000_000
"""Of one plan, unpacked: a small file can be made that fills the memory."""
GZIP = 16 + zlib.MAX_WBITS
"""How zlib calls the form of such files."""


@dataclass(frozen=True)
class PlanFolder:
    """A folder of plans.

    Arguments:
      path: made when the first plan is saved.
      most_bytes: the limit on the sum of the files.
    """

    path: Path
    most_bytes: float = MOST_BYTES

    def load(self, key: str) -> ChoiceRecord | None:
        """The plan of a key; None if there is no such file, or it cannot be read."""
        packed = self._files.read(self._name(key))
        record = None if packed is None else _read(packed, key)
        LOG.info("signatures %s in the cache (%s)", "not" if record is None else "found", self.path)
        return record

    def has(self, key: str) -> bool:
        """Whether there is a file for a key."""
        return self._file(key).is_file()

    def save(self, key: str, record: ChoiceRecord) -> None:
        """Writes a file; an old one is replaced, and no reader sees half of a file."""
        data = {"format": FORMAT, "version": VERSION, "key": key, **record_data(record)}
        self._files.write(self._name(key), gzip.compress(json.dumps(data).encode(), mtime=0))

    def _name(self, key: str) -> str:
        """The file name of a key; files of other versions have other names, and are deleted with age."""
        return hashlib.sha256(f"{versions()} {code_digest()} {key}".encode()).hexdigest()[:40]

    def _file(self, key: str) -> Path:
        return self.path / (self._name(key) + SUFFIX)

    @property
    def _files(self) -> CacheFolder:
        return CacheFolder(self.path, SUFFIX, self.most_bytes)


def _read(packed: bytes, key: str) -> ChoiceRecord | None:
    """The record in a file; None if it has another key, or cannot be read."""
    try:
        unpacked = zlib.decompressobj(GZIP)
        data = json_of(unpacked.decompress(packed, MOST_PLAN_BYTES))
        if not unpacked.eof:
            return None
        if (data["format"], data["version"], data["key"]) != (FORMAT, VERSION, key):
            return None
        return read_record(data)
    except (zlib.error, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


@cache
def code_digest() -> str:
    """The digest of the compiler's own files: a plan belongs to the version that made it, released or not."""
    found = hashlib.sha256()
    for file in sorted(_files()):
        found.update(file.read_bytes())
    return found.hexdigest()


def _files() -> Iterator[Path]:
    """The modules and tables that plans depend on."""
    for package in ("sbp", "sbp.passes"):
        root = Path(str(resources.files(package)))
        yield from (f for f in root.rglob("*") if f.suffix in (".py", ".csv") and f.is_file())


def store_of(options: Options) -> PlanFolder | None:
    """The store of a compilation; None if it keeps no plans.

    Of several processes process 0 plans, and so has the only store.
    """
    others = process_group()
    cache = None if others is not None and not others.leads else cache_folder.cache_of(options)
    return None if cache is None else PlanFolder(cache.path)
