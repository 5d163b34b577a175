"""What a device holds in a sparse exchange."""

import pytest

from sbp.communication.extents import extent
from sbp.communication.legs import Exchange, legs
from sbp.communication.wire import deliver_held, fetch_held
from sbp.layout import Layout
from sbp.signature import S

ROW = 512.0


def exchange(*hierarchy: int) -> Exchange:
    """Of 1,024 keys a device with a table whose rows all axes split."""
    axes = tuple(range(len(hierarchy)))
    table = Layout((1 << 20, 128), (S(0),) * len(hierarchy), hierarchy)
    return Exchange(extent(table, 0), axes, 1024)


def test_one_leg_holds_what_is_sent_and_what_is_received() -> None:
    [leg] = legs(exchange(8))
    assert fetch_held(exchange(8), ROW) == 2 * leg.received_keys * ROW
    assert deliver_held(exchange(8), ROW, additive=True) == 2 * leg.received_keys * ROW
    assert deliver_held(exchange(8), ROW) == 3 * leg.received_keys * ROW


def test_what_came_along_an_earlier_leg_stays() -> None:
    outer, inner = legs(exchange(4, 8))
    assert fetch_held(exchange(4, 8), ROW) == (outer.received_keys + 2 * inner.received_keys) * ROW
    assert deliver_held(exchange(4, 8), ROW) == (outer.received_keys + 3 * inner.received_keys) * ROW


@pytest.mark.parametrize(("additive", "keys"), [(True, 0), (False, 1024)])
def test_rows_of_own_keys_are_summed_where_nothing_travels(additive: bool, keys: int) -> None:
    assert fetch_held(exchange(1), ROW) == 0
    assert deliver_held(exchange(1), ROW, additive) == keys * ROW
