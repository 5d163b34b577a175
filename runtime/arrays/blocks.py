"""Reading a stored array block by block: lines of it that no device, and no process, need hold together."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from sbp.compat.untyped import partition_spec
from sbp.runtime.arrays.checksums import WORD, Box, box_of, checksum
from sbp.runtime.storage.files import Path
from sbp.runtime.storage.libraries import open_stored

BLOCK_BYTES = 1 << 24
"""Of a block, over all devices together."""
SHARES = 16
"""Blocks are no larger than this part of what one device has of the array that they are read for."""
AHEAD = 2
"""Blocks that are read while another one is used."""


@dataclass
class StoredLines:
    """An array of a checkpoint, as lines in one count over its leading dims.

    Arguments:
      at: the folder that orbax wrote.
      name: the keys of the array in its tree, with dots between them.
      lead: how many dims count lines.
      checksum: of all that was read, in this process.
    """

    at: Path
    name: str
    lead: int
    checksum: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._array = open_stored(os.fspath(self.at), self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return tuple(map(int, self._array.shape))

    def blocks(self, like: NamedSharding | None, share_bytes: int) -> Iterator[tuple[NDArray[np.int32], Any]]:
        """Numbers of lines, and these lines: split over all devices of a mesh, or on the host.

        Behind the last line of a block stand lines of zeros, whose number is -1: all blocks have one size.

        Arguments:
          like: has the mesh; None for the host.
          share_bytes: what one device is to hold of the array.
        """
        devices = 1 if like is None else like.mesh.size
        line_bytes = math.prod(self.shape[self.lead :]) * self._array.dtype.numpy_dtype.itemsize
        most = min(BLOCK_BYTES, max(share_bytes // SHARES, 1)) // max(line_bytes, 1)
        size = -(-max(1, min(most, self.shape[self.lead - 1])) // devices) * devices
        begun = list[_Block]()
        for block in self._begun(like, size):
            begun.append(block)
            if len(begun) > AHEAD:
                yield self._ended(begun.pop(0))
        yield from (self._ended(block) for block in begun)

    def _begun(self, like: NamedSharding | None, size: int) -> "Iterator[_Block]":
        rest, height = self.shape[self.lead :], self.shape[self.lead - 1]
        split = None if like is None else NamedSharding(like.mesh, partition_spec(like.mesh.axis_names))
        for group in np.ndindex(self.shape[: self.lead - 1]):
            for begin in range(0, height, size):
                shape = (size, *rest)
                boxes = _boxes(shape, split)
                reads = {box: self._read(group, begin, box) for box in boxes}
                yield _Block(group, begin, shape, split, reads)

    def _read(self, group: tuple[int, ...], begin: int, box: Box) -> Any:
        """TensorStore's future of a part of a block; None for one behind the last line."""
        height = self.shape[self.lead - 1]
        first, last = (min(begin + x, height) for x in box[0])
        return None if first == last else self._array[(*group, slice(first, last))].read()

    def _ended(self, block: "_Block") -> tuple[NDArray[np.int32], Any]:
        height, dtype = self.shape[self.lead - 1], self._array.dtype.numpy_dtype
        parts = dict[Box, NDArray[Any]]()
        for box, future in block.reads.items():
            parts[box] = np.zeros([end - start for start, end in box], dtype)
            if future is not None:
                values = future.result()
                parts[box][: len(values)] = values
                own = block.begin + box[0][0], block.begin + box[0][0] + len(values)
                place = (*((g, g + 1) for g in block.group), own, *box[1:])
                self.checksum = (self.checksum + checksum(values, place, self.shape)) % WORD
        lines = np.arange(block.begin, block.begin + block.shape[0])
        first = int(np.ravel_multi_index((*block.group, 0), self.shape[: self.lead]))
        numbers = np.where(lines < height, first + lines, -1).astype(np.int32)
        if block.split is None:
            return numbers, next(iter(parts.values()))
        callback = lambda index: parts[box_of(index, block.shape)]  # noqa: E731
        return numbers, jax.make_array_from_callback(block.shape, block.split, callback)


@dataclass(frozen=True)
class _Block:
    """A block that is being read: TensorStore's futures, by where the parts lie in it."""

    group: tuple[int, ...]
    begin: int
    shape: tuple[int, ...]
    split: NamedSharding | None
    reads: dict[Box, Any]


def _boxes(shape: tuple[int, ...], split: NamedSharding | None) -> set[Box]:
    """What this process has of an array."""
    if split is None:
        return {tuple((0, n) for n in shape)}
    places: Any = split.addressable_devices_indices_map(shape)
    return {box_of(index, shape) for index in places.values()}
