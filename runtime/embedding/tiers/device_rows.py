"""Rows between the arrays on devices and the host, in pieces of one size.

Each device reads and writes what it has: nothing is sent between devices, and of several processes each moves
the rows of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from sbp.compat.untyped import partition_spec
from sbp.runtime.embedding.shards import axes_of
from sbp.runtime.embedding.tiers.row_codec import RowField
from sbp.runtime.embedding.tiers.segment import Keys
from sbp.runtime.embedding.tiers.slots import KeySlots

PIECE_SHARE, MOST_PIECE_BYTES = 1 / 8, 1 << 25
"""Of the smaller budget, of the host or of all devices, that rows on their way take at once; and at most."""


def piece_rows(budget_bytes: float, width: int, shards: int) -> int:
    """Rows of a shard that are moved at once.

    Arguments:
      width: bytes of a row.

    >>> piece_rows(1e6, 256, 8)
    61
    """
    return max(1, int(min(budget_bytes * PIECE_SHARE, MOST_PIECE_BYTES) / width / shards))


Lines = list[NDArray[Any]]
"""Of each array by row, one line for each place of a piece."""


@dataclass(frozen=True)
class RowPiece:
    """Some rows that are moved at once.

    Arguments:
      keys: of this process, sorted.
      places: of the keys in the piece.
      local: "shards x rows": rows of each shard, in its own count; beyond it for none.
    """

    keys: Keys
    places: NDArray[np.intp]
    local: NDArray[np.int32]


@dataclass(frozen=True)
class DeviceRows:
    """The arrays with a line per row of one table.

    Arguments:
      fields: of them.
      slots: rows.
      sharding: along the rows alone; all of them lie so.
      piece: rows of each shard that are moved at once.
    """

    fields: tuple[RowField, ...]
    slots: int
    sharding: NamedSharding
    piece: int

    @property
    def shards(self) -> int:
        """Into how many pieces the rows are split."""
        return int(np.prod([self.sharding.mesh.shape[a] for a in axes_of(self.sharding, 0)], dtype=int))

    @property
    def height(self) -> int:
        """Rows of a shard."""
        return self.slots // self.shards

    @cached_property
    def own_shards(self) -> tuple[int, ...]:
        """The shards of this process."""
        spans = self.sharding.addressable_devices_indices_map((self.slots,)).values()
        return tuple(sorted({(span[0].start or 0) // self.height for span in spans if span is not None}))

    def own_parts(self, parts: int) -> list[int]:
        """The parts of the slots, of so many, that lie on devices of this process."""
        # Part p of all, and shard s of all, have something in common.
        own = self.own_shards
        return [
            p
            for p in range(parts)
            if any(p * self.shards < (s + 1) * parts and s * parts < (p + 1) * self.shards for s in own)
        ]

    def pieces(self, moved: KeySlots) -> Iterator[RowPiece]:
        """Pieces of some rows; all processes have as many."""
        shard = moved.slots // self.height
        order = np.argsort(shard, kind="stable")
        ends = np.cumsum(np.bincount(shard, minlength=self.shards))
        begins = np.append(0, ends[:-1])
        for first in range(0, int((ends - begins).max(initial=0)), self.piece):
            local = np.full((self.shards, self.piece), self.height, np.int32)
            keys, places = list[Keys](), list[NDArray[np.intp]]()
            for s, (begin, end) in enumerate(zip(begins + first, ends, strict=True)):
                at = order[begin : min(begin + self.piece, end)]
                local[s, : len(at)] = moved.slots[at] - s * self.height
                if s in self.own_shards:
                    keys.append(moved.keys[at])
                    places.append(s * self.piece + np.arange(len(at)))
            own, where = np.concatenate(keys), np.concatenate(places)
            by_key = np.argsort(own)
            yield RowPiece(own[by_key], where[by_key], local)

    def read(self, arrays: Sequence[jax.Array], piece: RowPiece) -> Lines:
        """The lines of a piece, in the order of its keys."""
        out = Lines()
        for f, x in zip(
            self.fields, self._reader(self._placed(piece.local.reshape(-1)), *arrays), strict=True
        ):
            every = np.empty((self.shards * self.piece, *f.shape), f.dtype)
            for shard in x.addressable_shards:
                every[shard.index] = np.asarray(shard.data)
            out.append(every[piece.places])
        return out

    def write(self, arrays: Sequence[jax.Array], piece: RowPiece, lines: Lines) -> tuple[jax.Array, ...]:
        """The arrays with the lines of a piece, in the order of its keys; the old ones are gone."""
        placed = list[jax.Array]()
        for f, x in zip(self.fields, lines, strict=True):
            every = np.zeros((self.shards * self.piece, *f.shape), f.dtype)
            every[piece.places] = x
            placed.append(self._placed(every))
        return self._writer(tuple(arrays), self._placed(piece.local.reshape(-1)), tuple(placed))

    # -- programs

    def _placed(self, x: NDArray[Any]) -> jax.Array:
        """What each shard has a piece of, on the devices."""
        rows = NamedSharding(self.sharding.mesh, partition_spec(self.sharding.spec[0]))
        return jax.make_array_from_callback(x.shape, rows, lambda at: x[at])

    def _mapped(self, body: Callable[..., Any], args: int) -> Callable[..., Any]:
        """A body that every device runs on what it has; all that it takes and gives is split along rows."""
        spec = partition_spec(self.sharding.spec[0])
        return jax.shard_map(
            body, mesh=self.sharding.mesh, in_specs=(spec,) * args, out_specs=spec, check_vma=False
        )

    @cached_property
    def _reader(self) -> Callable[..., tuple[jax.Array, ...]]:
        def read(rows: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(x.at[rows].get(mode="fill", fill_value=0) for x in arrays)

        return jax.jit(self._mapped(read, 1 + len(self.fields)))

    @cached_property
    def _writer(self) -> Callable[..., tuple[jax.Array, ...]]:
        def write(
            arrays: tuple[jax.Array, ...], rows: jax.Array, lines: tuple[jax.Array, ...]
        ) -> tuple[jax.Array, ...]:
            return tuple(
                x.at[rows].set(line, mode="drop", unique_indices=True)
                for x, line in zip(arrays, lines, strict=True)
            )

        return jax.jit(self._mapped(write, 3), donate_argnums=0)
