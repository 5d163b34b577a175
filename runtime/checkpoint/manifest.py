"""The manifest of a step: what was saved, checksums of it, and where the step comes from.

A step exists when its manifest does. The manifest is written last, once, and by one writer alone; it names
the folder of the arrays, so that two writers of one step cannot mix, and it carries a checksum of itself.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sbp.errors import CheckpointError, DamagedCheckpointError
from sbp.runtime.arrays.state import LeafRecord
from sbp.runtime.checkpoint import messages
from sbp.runtime.storage.files import Path
from sbp.version import VERSION as LIBRARY

FORMAT, VERSION = "sbp-checkpoint", 2
MANIFEST = "sbp_manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What is in a step.

    Arguments:
      step: of the training.
      leaves: of the state.
      extra: what is kept beside the state and JSON can hold.
      data: the folder of the arrays, in that of the step.
      token: of the save: no two saves have the same.
      parent: the step that this one was trained from, and the token of its save.
      sequence: how many saves the folder had before.
      extra_digest: the SHA-256 of the file of arrays that are kept beside the state; None without one.
      sizes: the bytes of every file of orbax's.
      tables: where the rows of each stack of tables lie, as JSON has it; None where nobody says so.
    """

    step: int
    leaves: tuple[LeafRecord, ...]
    extra: Any
    data: str = ""
    token: str = ""
    parent: tuple[int, str] | None = None
    sequence: int = 0
    extra_digest: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    tables: Mapping[str, Any] | None = None

    def encode(self) -> bytes:
        """The manifest as a file, with a checksum of all that is before it."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "made_by": f"sbp {LIBRARY}",
            "step": self.step,
            "parent": self.parent,
            "token": self.token,
            "sequence": self.sequence,
            "data": self.data,
            "leaves": [[x.path, x.type, f"{x.checksum or 0:016x}", sorted(x.traits)] for x in self.leaves],
            "extra": self.extra,
            "extra_sha256": self.extra_digest,
            "bytes": dict(self.sizes),
            "tables": self.tables,
        }
        return json.dumps({**content, "sha256": _digest(content)}).encode()


def decode(path: Path, step: int, data: bytes, others: Sequence[int] = ()) -> Manifest:
    """The manifest of a step from the bytes of its file.

    Arguments:
      path: of the step's folder, for messages.
      step: that the folder's name says.
      others: steps that could be restored instead.

    Raises:
      DamagedCheckpointError: if it is not what was written.
      CheckpointError: if another version has written it.
    """
    try:
        content = json.loads(data)
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise CheckpointError(messages.other_version(path, content, FORMAT, VERSION))
        found = _manifest(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        if isinstance(e, CheckpointError):
            raise
        what = f"{MANIFEST} cannot be read: {type(e).__name__}: {str(e)[:200]}"
        raise DamagedCheckpointError(messages.damaged_step(path, others, what)) from None
    if found.step != step:
        what = f"{MANIFEST} is that of step {found.step}: the folder was renamed or copied"
        raise DamagedCheckpointError(messages.damaged_step(path, others, what))
    return found


def _manifest(content: Mapping[str, Any]) -> Manifest:
    rest = {key: value for key, value in content.items() if key != "sha256"}
    if content["sha256"] != _digest(rest):
        raise ValueError("it has other bytes than were written")
    leaves = (LeafRecord(p, t, int(c, 16), frozenset(traits)) for p, t, c, traits in content["leaves"])
    parent = content["parent"]
    return Manifest(
        int(content["step"]),
        tuple(leaves),
        content["extra"],
        str(content["data"]),
        str(content["token"]),
        None if parent is None else (int(parent[0]), str(parent[1])),
        int(content["sequence"]),
        content["extra_sha256"],
        {str(name): int(size) for name, size in content["bytes"].items()},
        content["tables"],
    )


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
