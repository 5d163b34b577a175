"""Which key has which slot of a table on the devices, and what changes between two passes.

All keys of a pass are known before it begins, so nothing is inserted while it trains. A row that the next
pass needs too stays where it is. Of the other slots those go first that no pass has used for the longest.

A table is cut into parts, and so are the keys, by their bits: a key has a slot in its own part always. A part
lies on the devices of one process, which has the store of its rows.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sbp.runtime.embedding.admission import mix_bits
from sbp.runtime.embedding.key_index import UNKNOWN, KeyIndex
from sbp.runtime.embedding.tiers.segment import Keys

Slots = NDArray[np.int32]
NOBODY = np.uint64(2**64 - 1)
"""The key of a slot that nobody has."""


def part_of(keys: Keys, parts: int) -> NDArray[np.int32]:
    """The part of a table that each key belongs to."""
    return (mix_bits(keys) % np.uint64(parts)).astype(np.int32)


@dataclass(frozen=True)
class KeySlots:
    """Some keys and their slots.

    Arguments:
      keys: "n", sorted, each once.
      slots: "n".
    """

    keys: Keys
    slots: Slots

    def __len__(self) -> int:
        return len(self.keys)


def _sorted(keys: Keys, slots: Slots) -> KeySlots:
    order = np.argsort(keys)
    return KeySlots(keys[order], slots[order])


@dataclass(frozen=True)
class SlotMoves:
    """What changes when a pass begins.

    Arguments:
      slots: of the keys of the pass, in their order.
      incoming_keys: keys that get a slot.
      outgoing_keys: keys that lose theirs.
    """

    slots: Slots
    incoming_keys: KeySlots
    outgoing_keys: KeySlots


@dataclass
class SlotTable:
    """The slots of one table.

    Arguments:
      keys: the key of each slot, `NOBODY` for none.
      parts: a number that divides that of the slots.
      chunks: the slots lie on devices in so many pieces, and are given away in turn.

    >>> table = SlotTable(np.full(4, NOBODY), parts=1)
    >>> first = table.move(np.array([7, 8, 9], np.uint64))
    >>> then = table.move(np.array([9, 5, 6], np.uint64))
    >>> first.slots.tolist(), then.slots.tolist(), then.outgoing_keys.keys.tolist()
    ([0, 1, 2], [2, 3, 0], [7])
    """

    keys: Keys
    parts: int
    chunks: int = 1
    _used: NDArray[np.int32] = field(init=False)
    _pass: int = field(init=False, default=1)
    _index: KeyIndex = field(init=False, default_factory=KeyIndex)

    def __post_init__(self) -> None:
        there = np.flatnonzero(self.keys != NOBODY).astype(np.int32)
        self._used = np.zeros(len(self.keys), np.int32)
        self._index.add(self.keys[there].view(np.int64), there)

    @property
    def part_slots(self) -> int:
        """Slots of a part."""
        return len(self.keys) // self.parts

    def find(self, keys: Keys) -> Slots:
        """The slot of each key; `UNKNOWN` where it has none."""
        return self._index.find(keys.view(np.int64))

    def occupied_slots(self) -> KeySlots:
        """All keys that have a slot."""
        there = np.flatnonzero(self.keys != NOBODY).astype(np.int32)
        return _sorted(self.keys[there], there)

    def move(self, keys: Keys) -> SlotMoves:
        """Gives slots to the keys of the next pass.

        Arguments:
          keys: each once, in any order; of no part more than it has slots.
        """
        self._pass += 1
        slots = self.find(keys)
        self._used[slots[slots != UNKNOWN]] = self._pass
        new = np.flatnonzero(slots == UNKNOWN)
        parts = part_of(keys[new], self.parts)
        order = np.argsort(parts, kind="stable")
        counts = np.bincount(parts, minlength=self.parts)
        given = [self._free(part, n) for part, n in enumerate(counts.tolist())]
        slots[new[order]] = np.concatenate(given)
        taken = slots[new]
        gone = taken[self.keys[taken] != NOBODY]
        outgoing = _sorted(self.keys[gone], gone)
        self._index.remove(outgoing.keys.view(np.int64))
        self._index.add(keys[new].view(np.int64), taken)
        self.keys[taken], self._used[taken] = keys[new], self._pass
        return SlotMoves(slots, _sorted(keys[new], taken), outgoing)

    def _free(self, part: int, count: int) -> Slots:
        """The slots of a part that are given away next: those of nobody, then those used longest ago."""
        first, each = part * self.part_slots, len(self.keys) // self.chunks
        slots = np.arange(first, first + self.part_slots, dtype=np.int32)
        owned, used = self.keys[slots] != NOBODY, self._used[slots]
        free = slots[used < self._pass]
        return free[np.lexsort((free % each, used[free - first], owned[free - first]))[:count]]
