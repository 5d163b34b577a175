"""All moves of a kind of tensor at once, against the same one by one."""

from __future__ import annotations

import numpy as np
import pytest

import sbp
from sbp.hardware.catalogue import hardware_for
from sbp.layout import is_even
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.moves import can_permute, moves_from
from sbp.passes.boxing.table import MoveTable
from sbp.signature import B, Partial, Split

SIGNATURES = (B, Split(0), Split(1), Partial("max"), Partial("sum"))


@pytest.mark.parametrize("hierarchy", [(8,), (2, 4), (4, 8, 8), (2, 2, 2)])
@pytest.mark.parametrize("shape", [(64, 1024), (10, 4), (7, 512), (0, 8)])
@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_seconds_are_those_of_each(hierarchy: tuple[int, ...], shape: tuple[int, ...], dtype: str) -> None:
    placement = sbp.placement("h100", shape=hierarchy)
    network = Network(placement, hardware_for("h100"))
    table = MoveTable(SIGNATURES, network)
    seconds = table.seconds(shape, np.dtype(dtype))
    for move, taken in zip(table.moves, seconds.tolist(), strict=True):
        before, after = move.before, move.after
        even = is_even(shape, before, hierarchy) and is_even(shape, after, hierarchy)
        if move.kind == "permute" and not (even and can_permute(before, after, hierarchy)):
            assert taken == np.inf
        else:
            assert taken == network.seconds(move, shape, np.dtype(dtype)), move


def test_no_move_is_left_out() -> None:
    network = Network(sbp.placement("cpu", shape=(2, 2)), hardware_for("cpu"))
    table = MoveTable(SIGNATURES, network)
    usual = [m for nd in table.universe for m in moves_from(nd, SIGNATURES)]
    assert list(table.moves[: len(usual)]) == usual
    assert {m.kind for m in table.moves[len(usual) :]} == {"permute"}
    for (i, j), move in zip(table.ends.tolist(), table.moves, strict=True):
        assert table.universe[i] == move.before
        assert table.universe[j] == move.after


def test_a_gather_along_the_first_dim_is_preferred() -> None:
    """Of moves that send the same; by less than any figure shows."""
    network = Network(sbp.placement("h100", shape=(8,)), hardware_for("h100"))
    table = MoveTable((B, Split(0), Split(1), Partial("sum")), network)
    seconds = dict(zip(table.moves, table.seconds((64, 64), np.dtype("float32")).tolist(), strict=True))
    for kind, ends in (("all_gather", "before"), ("reduce_scatter", "after")):
        found = {getattr(m, ends): s for m, s in seconds.items() if m.kind == kind}
        first, second = found[(Split(0),)], found[(Split(1),)]
        assert first < second < first * (1 + 1e-6)
