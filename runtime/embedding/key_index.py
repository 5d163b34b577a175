"""A set of keys with a row each: a hash table in two arrays, whose work is that of the keys it is asked for.

Keys lie at the first free slot behind the one that their bits name (linear probing). Who removes a key moves
those behind it back, so that nothing marks what was removed: Knuth, "The Art of Computer Programming", 6.4,
algorithm R.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbp.compat.machine_code import compile_loops

Keys = NDArray[np.int64]
Rows = NDArray[np.int32]

UNKNOWN = -1
FEWEST_SLOTS = 64


@dataclass(slots=True)
class KeyIndex:
    """Distinct keys and their rows; at most half of the slots are taken."""

    keys: Keys = field(default_factory=lambda: np.zeros(FEWEST_SLOTS, np.int64))
    rows: Rows = field(default_factory=lambda: np.full(FEWEST_SLOTS, UNKNOWN, np.int32))
    count: int = 0

    def find(self, keys: Keys) -> Rows:
        """The row of each key, `UNKNOWN` where there is none."""
        out = np.empty(keys.size, np.int32)
        _find(self.keys, self.rows, np.ascontiguousarray(keys).reshape(-1), out)
        return out.reshape(keys.shape)

    def remove(self, keys: Keys) -> None:
        """Forgets keys; those that are not there do not matter."""
        self.count -= int(_remove(self.keys, self.rows, np.ascontiguousarray(keys)))

    def add(self, keys: Keys, rows: Rows) -> None:
        """Takes in distinct keys that are not there."""
        self.count += keys.size
        if 2 * self.count > self.keys.size:
            slots = 1 << (2 * self.count - 1).bit_length()
            taken = self.rows != UNKNOWN
            old = self.keys[taken], self.rows[taken]
            self.keys, self.rows = np.zeros(slots, np.int64), np.full(slots, UNKNOWN, np.int32)
            _add(self.keys, self.rows, *old)
        _add(self.keys, self.rows, np.ascontiguousarray(keys), np.ascontiguousarray(rows, np.int32))


@compile_loops
def _slot(key: Any, mask: Any) -> Any:
    """Where a key belongs: the finaliser of SplitMix64, so that every bit of a key counts."""
    bits = np.uint64(key)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64((bits ^ (bits >> np.uint64(31))) & np.uint64(mask))


@compile_loops
def _find(slots: Any, rows: Any, keys: Any, out: Any) -> None:
    mask = slots.size - 1
    for i in range(keys.size):
        at = _slot(keys[i], mask)
        while rows[at] != UNKNOWN and slots[at] != keys[i]:
            at = (at + 1) & mask
        out[i] = rows[at]


@compile_loops
def _add(slots: Any, rows: Any, keys: Any, new: Any) -> None:
    mask = slots.size - 1
    for i in range(keys.size):
        at = _slot(keys[i], mask)
        while rows[at] != UNKNOWN:
            at = (at + 1) & mask
        slots[at], rows[at] = keys[i], new[i]


@compile_loops
def _remove(slots: Any, rows: Any, keys: Any) -> Any:
    """How many keys were there."""
    mask, removed = slots.size - 1, 0
    for i in range(keys.size):
        free = _slot(keys[i], mask)
        while rows[free] != UNKNOWN and slots[free] != keys[i]:
            free = (free + 1) & mask
        if rows[free] == UNKNOWN:
            continue
        removed += 1
        at = (free + 1) & mask
        while rows[at] != UNKNOWN:
            home = _slot(slots[at], mask)
            if ((at - home) & mask) >= ((at - free) & mask):  # its way leads over the slot that is free
                slots[free], rows[free] = slots[at], rows[at]
                free = at
            at = (at + 1) & mask
        rows[free] = UNKNOWN
    return removed
