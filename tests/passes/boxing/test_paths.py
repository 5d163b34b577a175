"""Boxing: cheapest paths against plain relaxation, and the paths that everyone expects."""

import itertools
import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from sbp import view
from sbp.hardware.catalogue import Hardware, hardware_for
from sbp.layout import is_even
from sbp.passes.boxing.links import STEP_SECONDS, Network
from sbp.passes.boxing.moves import Move, can_permute, moves_from, permute_targets, wire_bytes
from sbp.passes.boxing.paths import Boxing, Boxings
from sbp.placement import Placement, placement
from sbp.signature import B, NdSbp, P, Partial, S, Signature, format_sbp, parse_sbp
from tests.passes.boxing.move_reference import interpret
from tests.sbp.slicer import elements

CPU, H100 = hardware_for("cpu"), hardware_for("h100")
# Of figures alone: a collective over several nodes is as slow as its slowest link.
FLAT = replace(H100, chip="")
F32 = np.dtype("float32")


def boxing(
    shape: tuple[int, ...], p: Placement, hardware: Hardware = CPU, ops: str = "sum max", dtype: Any = F32
) -> Boxing:
    return Boxing(
        shape, np.dtype(dtype), Network(p, hardware), frozenset(ops.split()), tuple(range(len(shape)))
    )


CASES = {
    "1-D": boxing((5, 7), placement("cpu", shape=(8,)), ops="sum max min"),
    "1-D, permuted": boxing((6, 8), placement("cpu", ranks=[3, 1, 0, 2]), ops="sum max min"),
    "1-D, empty": boxing((0, 2), placement("cpu", shape=(4,))),
    "2x2": boxing((4, 4), placement("cpu", shape=(2, 2)), ops="sum max min"),
    "2x4": boxing((6, 8), placement("cpu", shape=(2, 4))),
    "4x2, uneven": boxing((5, 7), placement("cpu", ranks=[[7, 5], [3, 1], [0, 2], [4, 6]])),
    "2x2, one row": boxing((1, 3), placement("cpu", shape=(2, 2))),
    "16x8 chips": boxing((4096, 4096), placement("h100", shape=(16, 8)), H100, dtype="float16"),
    "8x16 chips, nodes inside": boxing(
        (512, 4096), placement("h100", np.arange(128).reshape(16, 8).T.tolist()), H100
    ),
    "2x2x2": boxing((8, 8), placement("cpu", shape=(2, 2, 2))),
    "2x2x2, one dim": boxing((8,), placement("cpu", shape=(2, 2, 2)), ops="sum max min"),
}
each = pytest.mark.parametrize("name", CASES)


def seconds(move: Move, box: Boxing) -> float:
    """The price of one move, from the placement's ranks and the catalogue."""
    return STEP_SECONDS + _seconds(move, box)


def _seconds(move: Move, box: Boxing) -> float:
    p, chip = box.network.placement, box.network.hardware
    if not move.is_collective:
        written = elements(box.shape, move.after, p.shape) * box.dtype.itemsize
        # A slice is merged into who reads it.
        return 0.0 if move.kind in ("keep", "slice") else written / chip.memory_bytes_per_second
    groups = [
        list(map(int, g)) for g in p.groups(tuple(range(p.ndim) if move.kind == "permute" else move.axes))
    ]
    slowest = min(groups, key=lambda g: chip.link(g).bytes_per_second)
    # A collective compares floats of 16 bits in 32.
    compared = move.kind == "all_reduce" and move.old != P and box.dtype.kind == "f"
    width = max(box.dtype.itemsize, 4 if compared else 1)
    sent = wire_bytes(move, box.shape, width, p.shape)
    return chip.collective_seconds(move.kind, sent, slowest, len(groups))


def edges(box: Boxing) -> list[tuple[int, int, float, Move]]:
    hierarchy = box.network.placement.shape
    out = []
    for nd in box.universe:
        moves = list(moves_from(nd, box.signatures))
        if len(hierarchy) > 1 and is_even(box.shape, nd, hierarchy):
            moves += [
                Move("permute", tuple(range(len(nd))), nd, after, B, B)
                for after in permute_targets(nd)
                if is_even(box.shape, after, hierarchy) and can_permute(nd, after, hierarchy)
            ]
        out += [(box.index[m.before], box.index[m.after], seconds(m, box), m) for m in moves]
    return out


def shortest(n: int, steps: list[tuple[int, int, float, Move]]) -> np.ndarray:
    """Bellman and Ford: relax every edge, from all starts at once, until nothing changes."""
    cost = np.where(np.eye(n, dtype=bool), 0.0, np.inf)
    while True:
        before = cost.copy()
        for i, j, price, _ in steps:
            cost[:, j] = np.minimum(cost[:, j], cost[:, i] + price)
        if (cost == before).all():
            return cost


@each
def test_costs_are_those_of_plain_relaxation(name: str) -> None:
    box = CASES[name]
    n, steps = len(box.universe), edges(box)
    # A strict path makes no sum where there was none; any other sends nothing once zeros are filled in.
    filling = [
        step
        for step in steps
        if any(b == P and a != P for a, b in zip(step[3].before, step[3].after, strict=True))
    ]
    strict = shortest(n, [step for step in steps if step not in filling])
    local = shortest(n, [step for step in steps if not step[3].is_collective])
    loose = (strict[:, :, None] + local[None]).min(axis=1)
    np.testing.assert_allclose(box.strict_seconds, strict, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(box.seconds, loose, rtol=1e-9, atol=1e-10)


@each
def test_every_pair_has_a_path_that_costs_what_the_table_says(name: str) -> None:
    box = CASES[name]
    known = {(i, j): True for i, j, _, _ in edges(box)}
    for before, after in itertools.product(box.universe, repeat=2):
        path = box.path(before, after)
        stops = [before, *(m.after for m in path)]
        assert [m.before for m in path] == stops[:-1] and stops[-1] == after
        assert all((box.index[m.before], box.index[m.after]) in known for m in path)
        assert len(set(stops)) == len(stops)
        price = sum(seconds(m, box) for m in path)
        assert price == pytest.approx(box.seconds[box.index[before], box.index[after]], rel=1e-9, abs=1e-10)


@each
def test_strict_paths_make_no_sum(name: str) -> None:
    box = CASES[name]
    for before, after in itertools.product(box.universe, repeat=2):
        if np.isfinite(box.strict_seconds[box.index[before], box.index[after]]):
            for move in box.path(before, after, strict=True):
                assert not any(b == P and a != P for a, b in zip(move.before, move.after, strict=True))


@pytest.mark.parametrize("name", ["1-D", "1-D, permuted", "2x2", "2x2, one row"])
def test_whole_paths_give_the_tensor(name: str) -> None:
    """All pairs, move after move, from random shards."""
    box = CASES[name]
    hierarchy = box.network.placement.shape
    x = np.random.default_rng(5).integers(-50, 50, size=box.shape).astype(F32)
    for before, after in itertools.product(box.universe, repeat=2):
        shards = view.split(x, before, hierarchy)
        for move in box.path(before, after):
            shards = interpret(move, shards, box.shape, hierarchy)
        np.testing.assert_array_equal(view.join(shards, box.shape, after, hierarchy), x)


KNOWN_1D = {
    "B -> S(0)": ["slice"],
    "B -> P": ["fill"],
    "B -> P(max)": ["keep"],
    "S(0) -> B": ["all_gather"],
    "S(0) -> S(1)": ["all_to_all"],
    "S(0) -> P": ["embed"],
    "S(0) -> P(max)": ["embed"],
    "P -> B": ["all_reduce"],
    "P -> S(0)": ["reduce_scatter"],
    "P(max) -> B": ["all_reduce"],
    "P(max) -> S(1)": ["all_to_all"],
    "P(max) -> P": ["all_to_all", "embed"],
    "P -> P(max)": ["reduce_scatter", "embed"],
}
KNOWN_2D = {
    "P, P -> B, B": [("all_reduce", (0, 1))],
    "P, P -> S(0), S(0)": [("reduce_scatter", (0, 1))],
    "P(max), P(max) -> B, B": [("all_reduce", (0, 1))],
    "P(max), P(max) -> S(0), S(0)": [("all_to_all", (0, 1))],
    "S(0), S(0) -> B, B": [("all_gather", (0, 1))],
    "S(0), S(0) -> S(1), S(1)": [("all_to_all", (0, 1))],
    "S(0), S(1) -> S(1), S(0)": [("permute", (0, 1))],
    "S(0), B -> B, S(0)": [("permute", (0, 1))],
    "B, S(0) -> S(0), S(0)": [("permute", (0, 1))],
    "S(0), B -> S(0), S(0)": [("slice", (1,))],
    "P, B -> B, B": [("all_reduce", (0,))],
    "B, P -> B, S(1)": [("reduce_scatter", (1,))],
    "P, S(0) -> B, S(0)": [("all_reduce", (0,))],
    "P, S(0) -> S(1), S(0)": [("reduce_scatter", (0,))],
    "S(0), P -> S(0), S(0)": [("reduce_scatter", (1,))],
    "S(0), S(0) -> S(0), B": [("all_gather", (1,))],
    "S(0), S(1) -> S(0), S(0)": [("all_to_all", (1,))],
}


def ends(text: str) -> tuple[NdSbp, NdSbp]:
    before, after = text.split(" -> ")
    return parse_sbp(before), parse_sbp(after)


@pytest.mark.parametrize("pair", KNOWN_1D)
def test_best_paths_along_one_axis(pair: str) -> None:
    box = boxing((1024, 1024), placement("h100", shape=(8,)), H100)
    assert [m.kind for m in box.path(*ends(pair))] == KNOWN_1D[pair]


@pytest.mark.parametrize("shape", [(4, 4), (256, 256)], ids=str)
@pytest.mark.parametrize("pair", KNOWN_2D)
def test_best_paths_along_two_axes_of_one_network(pair: str, shape: tuple[int, int]) -> None:
    box = boxing(shape, placement("cpu", shape=(2, 2)))
    assert [(m.kind, m.axes) for m in box.path(*ends(pair))] == KNOWN_2D[pair]


def test_large_sums_cross_the_network_in_parts() -> None:
    """Scatter inside a node, reduce an eighth across, gather inside. Small ones go in one step.

    Where collectives over several nodes are known to do that themselves, all go in one step.
    """
    ends_ = (P, P), (B, B)
    for chip, p in ((FLAT, placement("cpu", shape=(16, 8))), (H100, placement("h100", shape=(16, 8)))):
        large = boxing((8192, 8192), p, chip).path(*ends_)
        steps = [("reduce_scatter", (1,)), ("all_reduce", (0,)), ("all_gather", (1,))]
        assert [(m.kind, m.axes) for m in large] == (steps if chip is FLAT else [("all_reduce", (0, 1))])
    small = boxing((8, 8), placement("cpu", shape=(16, 8)), FLAT).path(*ends_)
    assert [(m.kind, m.axes) for m in small] == [("all_reduce", (0, 1))]


def test_uneven_tensors_take_no_permute() -> None:
    box = boxing((5, 7), placement("cpu", shape=(2, 2)))
    for before, after in itertools.product(box.universe, repeat=2):
        evenly = all(is_even((5, 7), nd, (2, 2)) for nd in (before, after))
        assert evenly or all(m.kind != "permute" for m in box.path(before, after))


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_the_universe_is_every_signature(ndim: int) -> None:
    box = boxing((2, 2), placement("cpu", shape=(2,) * ndim), ops="max sum")
    ones: set[Signature] = {B, S(0), S(1), P, P("max")}
    assert set(box.signatures) == ones and len(box.universe) == len(ones) ** ndim
    assert [box.universe[i] for i in box.index.values()] == list(box.index)
    assert (np.diag(box.seconds) == 0).all()
    assert all(box.path(nd, nd) == () for nd in box.universe)


def test_longer_is_never_free() -> None:
    """Among equal prices the shorter path wins: no path holds a move that does nothing for it."""
    box = CASES["2x2"]
    steps = edges(box)
    for before, after in itertools.product(box.universe, repeat=2):
        direct = [s for i, j, s, _ in steps if (i, j) == (box.index[before], box.index[after])]
        path = box.path(before, after)
        if direct and math.isclose(min(direct), sum(seconds(m, box) for m in path), rel_tol=1e-12):
            assert len(path) == 1, format_sbp(before) + format_sbp(after)


def test_a_table_is_made_once_per_kind() -> None:
    network = Network(placement("cpu", shape=(2,)), CPU)
    tables = Boxings(network)
    sums = frozenset({"sum"})
    first = tables.of((4, 4), F32, sums, (0, 1))
    assert tables.of((4, 4), F32, sums, (0, 1)) is first
    assert tables.of((4, 4), F32, sums, (0,)) is not first
    assert set(tables.of((4, 4), F32, sums, (0,)).signatures) == {B, S(0), P}
    assert tables.of((4, 4), np.dtype("int32"), sums, (0, 1)).dtype == np.dtype("int32")


def test_keys_wait_for_nothing_and_truth_values_for_no_sum() -> None:
    tables = Boxings(Network(placement("cpu", shape=(2,)), CPU))
    every = frozenset({"sum", "max", "min"})
    keys = jax.random.split(jax.random.key(0), 4)
    assert tables.of((4,), keys.dtype, every, (0,)).signatures == (B, S(0))
    found = set(tables.of((4,), np.dtype(bool), every, (0,)).signatures)
    assert found == {B, S(0), Partial("max"), Partial("min")}


@pytest.mark.parametrize("name", CASES)
def test_what_is_sent_on_the_way_is_that_of_the_paths(name: str) -> None:
    case = CASES[name]
    narrow = replace(case, narrow=np.dtype("float16"), narrow_boxing=case)
    for box in (case, narrow):
        copies, any_ = box.sends
        for (i, a), (j, b) in itertools.product(enumerate(box.universe), repeat=2):
            if math.isfinite(box.seconds[i, j]):
                kinds = {m.kind for m in box.path(a, b) if m.is_collective}
                assert (copies[i, j], any_[i, j]) == (bool(kinds - {"all_reduce"}), bool(kinds)), (a, b)
