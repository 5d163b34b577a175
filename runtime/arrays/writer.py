"""Handing arrays to orbax: what this process has of them, copied to the host, and its checksums."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from sbp.compat.orbax_loops import run_and_drain
from sbp.compat.untyped import Leaf, PyTree
from sbp.runtime.arrays.checksums import WORD, Box, box_of, checksum
from sbp.runtime.storage.files import Path
from sbp.runtime.storage.libraries import handler, orbax

CHUNK_BYTES = 1 << 24
"""Of what is compressed as one: who reads some lines of an array decodes the chunks that they are in."""
THREADS = 4
"""That compute checksums; the loop holds no lock of Python."""


@dataclass(frozen=True)
class HostShard:
    """A part of an array that this process hands over.

    Arguments:
      leaf: the number of the leaf.
      values: on the host; not a copy, but what is written.
      box: where they lie in the array.
      shape: of the array.
    """

    leaf: int
    values: np.ndarray[Any, Any]
    box: Box
    shape: tuple[int, ...]

    @property
    def checksum(self) -> int:
        """What the part adds to that of its array."""
        return checksum(self.values, self.box, self.shape)


def parts_of(leaves: Sequence[Leaf]) -> list[HostShard]:
    """What this process hands over: of arrays the first copy of each part, of other values process 0's.

    Copies to the host are all begun before the first is waited for; orbax finds them there.
    """
    for x in leaves:
        if isinstance(x, jax.Array):
            for shard in x.addressable_shards:
                if shard.replica_id == 0:
                    shard.data.copy_to_host_async()
    return [part for i, x in enumerate(leaves) for part in _parts(i, x)]


def checksums_of(parts: Sequence[HostShard]) -> dict[str, int]:
    """What the parts of this process add to the checksums of their arrays, by the number of the leaf."""
    with ThreadPoolExecutor(THREADS, "sbp checksums") as pool:
        found = [*pool.map(lambda part: part.checksum, parts)]
    sums = dict[str, int]()
    for part, added in zip(parts, found, strict=True):
        sums[str(part.leaf)] = (sums.get(str(part.leaf), 0) + added) % WORD
    return sums


def begin_write(path: Path, state: PyTree) -> list[Any]:
    """orbax's futures of a state that it has copied to the host."""
    pieces = orbax().SaveArgs(chunk_byte_size=CHUNK_BYTES)
    arguments = orbax().args.PyTreeSave(state, save_args=jax.tree.map(lambda _: pieces, state))
    return list(_run(handler().async_save(path, args=arguments)) or ())


def await_written(futures: Sequence[Any]) -> None:
    """Returns when all has ended; then the first failure is raised: what was written is deleted."""
    failures = [e for future in futures if (e := _failure(future)) is not None]
    if failures:
        raise failures[0]


def merge(path: Path) -> None:
    """Merges what all processes have written, in one of them."""
    handler().finalize(path)


# -- inside


def _parts(leaf: int, x: Leaf) -> list[HostShard]:
    if isinstance(x, jax.Array):
        first = (shard for shard in x.addressable_shards if shard.replica_id == 0)
        return [HostShard(leaf, np.asarray(s.data), box_of(s.index, x.shape), x.shape) for s in first]
    if jax.process_index():
        return []
    values = np.asarray(x)
    return [HostShard(leaf, values, tuple((0, n) for n in values.shape), values.shape)]


def _failure(future: Any) -> Exception | None:
    """What went wrong with something that orbax was writing, when it has ended."""
    try:
        future.result()
    except Exception as e:
        return e
    return None


def _run(coroutine: Any) -> Any:
    """Runs a coroutine to its end, also where the caller is within a loop of asyncio, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_and_drain(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run_and_drain, coroutine).result()
