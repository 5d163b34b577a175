"""Keys and slots between passes, against what each pass asks for."""

import numpy as np
import pytest

from sbp.runtime.embedding.key_index import UNKNOWN
from sbp.runtime.embedding.tiers.slots import NOBODY, SlotTable, part_of


def fitting(rng: np.random.Generator, table: SlotTable, names: int) -> np.ndarray:
    """Random keys, of no part more than it has slots."""
    keys = rng.permutation(names).astype(np.uint64)[: rng.integers(0, len(table.keys))]
    parts = part_of(keys, table.parts)
    rank = np.array([(parts[:i] == parts[i]).sum() for i in range(len(keys))], int)
    return keys[rank < table.part_slots]


@pytest.mark.parametrize(("parts", "chunks", "names"), [(1, 1, 40), (4, 2, 60), (2, 8, 500)])
def test_random_passes(parts: int, chunks: int, names: int) -> None:
    rng = np.random.default_rng(parts)
    table, on_device = SlotTable(np.full(32, NOBODY), parts, chunks), dict[int, int]()
    for _ in range(40):
        keys = fitting(rng, table, names)
        before = dict(on_device)
        moves = table.move(keys)
        for key, slot in zip(
            moves.outgoing_keys.keys.tolist(), moves.outgoing_keys.slots.tolist(), strict=True
        ):
            assert on_device.pop(key) == slot and key not in keys
        for key, slot in zip(
            moves.incoming_keys.keys.tolist(), moves.incoming_keys.slots.tolist(), strict=True
        ):
            assert slot not in on_device.values() and key not in before
            on_device[key] = slot
        assert [on_device[k] for k in keys.tolist()] == moves.slots.tolist()
        for one in (moves.incoming_keys, moves.outgoing_keys):
            assert (np.diff(one.keys.astype(object)) > 0).all()
        held = {int(k): i for i, k in enumerate(table.keys) if k != NOBODY}
        assert held == on_device
        every = table.occupied_slots()
        assert (every.slots // table.part_slots == part_of(every.keys, parts)).all()
    assert (table.find(np.array([names + 1], np.uint64)) == UNKNOWN).all()


def test_a_row_stays_while_there_is_room_and_the_oldest_goes_first() -> None:
    table = SlotTable(np.full(4, NOBODY), 1)
    for keys in ([1, 2], [3], [1]):
        assert not len(table.move(np.array(keys, np.uint64)).outgoing_keys)
    assert table.move(np.array([4, 5], np.uint64)).outgoing_keys.keys.tolist() == [2]


def test_new_rows_are_dealt_out_to_all_chunks() -> None:
    table = SlotTable(np.full(64, NOBODY), 2, chunks=8)
    slots = table.move(np.arange(16, dtype=np.uint64)).slots
    assert len({*(slots // 8)}) == 8
