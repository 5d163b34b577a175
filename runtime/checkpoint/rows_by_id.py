"""Restoring tables by id: a row is found by its table and id, however it was stacked and split.

Rows change places block by block: no device and no process holds more of a table than its share and a block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from sbp.compat.untyped import Leaf, PyTree, block_until_ready
from sbp.errors import DamagedCheckpointError
from sbp.runtime.arrays.blocks import StoredLines
from sbp.runtime.arrays.checksums import WORD
from sbp.runtime.arrays.selection import RestoreRequest, part_of, selection
from sbp.runtime.arrays.state import restore_targets
from sbp.runtime.checkpoint import messages, steps
from sbp.runtime.checkpoint.manifest import Manifest
from sbp.runtime.checkpoint.reader import arrays_path, read_state
from sbp.runtime.embedding.collection import Collection
from sbp.runtime.embedding.restack import Restacking, SavedRows
from sbp.runtime.embedding.row_access import lead_of, row_writer
from sbp.runtime.embedding.row_map import RowMap, read_map
from sbp.runtime.pipeline.transfer_engine import TransferEngine
from sbp.runtime.processes.process_group import process_group
from sbp.runtime.storage.files import Path


@dataclass(frozen=True)
class RowReader:
    """Reads the steps of a folder whose states have tables.

    Arguments:
      folder: of the checkpoints.
      tables: of the state that is wanted.
      engine: moves arrays.
    """

    folder: Path
    tables: Collection
    engine: TransferEngine

    def restore(self, manifest: Manifest, request: RestoreRequest, check: bool) -> PyTree | None:
        """What is asked for of a step; None if its stacks are those that are wanted, or are not known.

        Raises:
          EmbeddingError: if a table was not saved, or had more rows.
        """
        if manifest.tables is None:  # saved without `tables`
            return None
        then, now = {name: read_map(x) for name, x in manifest.tables.items()}, self.tables.row_maps
        if {*then} == {*now}:  # a name says what lies where
            return None
        path = steps.step_path(self.folder, manifest.step)
        records, prefix = part_of(path, manifest.leaves, request.keys)
        like = restore_targets(request.like, [(x.path, x.type) for x in manifest.leaves], request.keys)
        known = {x.path.removeprefix(prefix): x for x in records}
        change = Restacking(like, now, then, {p: _shape(x.type) for p, x in known.items()})
        change.check(path)
        chosen = selection(
            path, manifest.leaves, RestoreRequest(change.saved_state(), request.only, request.dtype)
        )
        apart = change.by_rows()
        saved = read_state(self.folder, manifest, chosen, self.engine, check=check, apart=apart)
        sums = dict[str, int]()

        def take(leaf: Leaf, rows: RowMap, sources: Sequence[SavedRows]) -> Leaf:
            return _taken(arrays_path(path, manifest), chosen.with_dtype(leaf), rows, sources, sums)

        state = change.join(chosen.convert(saved), request.keys, take)
        if check:
            self._check(manifest, {p: x.checksum for p, x in known.items() if p in sums}, sums)
        return state

    def _check(self, manifest: Manifest, recorded: Mapping[str, int | None], sums: Mapping[str, int]) -> None:
        """Compares what all processes have read with what was written."""
        path, group = steps.step_path(self.folder, manifest.step), process_group()
        every = [sums] if group is None else group.gather(f"checksums of tables of {path.name}", dict(sums))
        wrong = [p for p, x in recorded.items() if sum(one.get(p, 0) for one in every) % WORD != x]
        if wrong:
            others = steps.others(self.folder, manifest.step)
            what = f"{', '.join(sorted(wrong))} has other elements than were written"
            raise DamagedCheckpointError(messages.damaged_step(path, others, what))


# -- inside


def _taken(at: Any, like: Leaf, rows: RowMap, sources: Sequence[SavedRows], sums: dict[str, int]) -> Leaf:
    """An array with the rows of stored ones; what was read of them is added to the checksums."""
    sharding = getattr(like, "sharding", None)
    mesh = sharding if isinstance(sharding, NamedSharding) else None
    out = _begun(like, rows, sources)
    lead = lead_of(like.shape, rows)
    share = like.dtype.itemsize * int(np.prod(like.shape if mesh is None else mesh.shard_shape(like.shape)))
    for source in sources:
        stored = StoredLines(at, source.name, source.lead)
        for numbers, lines in stored.blocks(mesh, share):
            to = np.where(numbers < 0, -1, source.rows.in_other(np.maximum(numbers, 0), rows)).astype(
                np.int32
            )
            if sharding is None:
                flat = out.reshape(rows.size, *like.shape[len(lead) :])
                flat[to[to >= 0]] = lines[to >= 0]
            else:
                # One block after the other: they would otherwise all wait on the devices.
                out = block_until_ready(row_writer(lead, like.shape, mesh)(out, to, lines))
        sums[source.path] = stored.checksum
    return out


def _begun(like: Leaf, rows: RowMap, sources: Sequence[SavedRows]) -> Leaf:
    """What rows are written to: zeros, or a copy of what is there where a table has grown."""
    before = {n: r for s in sources for n, r in zip(s.rows.names, s.rows.rows, strict=True)}
    grown = any(r > before.get(n, 0) for n, r in zip(rows.names, rows.rows, strict=True))
    keeps = grown and isinstance(like, jax.Array | np.ndarray)
    sharding = getattr(like, "sharding", None)
    if sharding is None:
        return np.array(like) if keeps else np.zeros(like.shape, like.dtype)
    return jnp.copy(like) if keeps else jnp.zeros(like.shape, like.dtype, device=sharding)


def _shape(words: str) -> tuple[int, ...]:
    """The shape of a leaf in words.

    >>> _shape("float32[64, 256]"), _shape("int")
    ((64, 256), ())
    """
    return tuple(int(n) for n in words.partition("[")[2].rstrip("]").split(",") if n.strip())
