"""Moves against what they mean: which are legal, what they produce, what they send.

Every move of every table is interpreted on random shards (NaN in the padding, random summands). A path is a
chain of such moves, so this proves the planned side of every pair of signatures.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from sbp import view
from sbp.communication.protocol import COLLECTIVES
from sbp.hardware.catalogue import hardware_for
from sbp.layout import is_even
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.moves import (
    Move,
    can_permute,
    find_permutation,
    moves_from,
    permute_targets,
    wire_bytes,
)
from sbp.passes.boxing.paths import Boxing
from sbp.placement import placement
from sbp.signature import B, NdSbp, P, Partial, S, Signature, Split
from tests.passes.boxing.move_reference import interpret
from tests.sbp.slicer import elements, rows_of

CPU = hardware_for("cpu")
ALL = (B, S(0), S(1), P, P("max"), P("min"))
SHAPES = [(4, 4), (6, 8), (5, 7), (1, 3), (0, 2)]
FREE = (B, S(0), S(1))


def tensor(shape: Sequence[int]) -> np.ndarray:
    return np.random.default_rng(3).integers(-50, 50, size=shape).astype(np.float32)


def every(hierarchy: Sequence[int], ones: Sequence[Signature]) -> list[NdSbp]:
    return list(itertools.product(ones, repeat=len(hierarchy)))


def means(shards: view.Shards, nd: NdSbp, x: np.ndarray, hierarchy: Sequence[int]) -> bool:
    """Whether the shards are `x` under `nd`: copies equal, nothing missing, nothing wrong."""
    try:
        return np.array_equal(view.join(shards, x.shape, nd, hierarchy), x)
    except ValueError:
        return False


def all_moves(shape: tuple[int, ...], hierarchy: tuple[int, ...], ops: Sequence[str]) -> list[Move]:
    """Every move that a plan can contain."""
    network = Network(placement("cpu", shape=hierarchy), CPU)
    table = Boxing(shape, np.dtype("float32"), network, frozenset(ops), tuple(range(len(shape))))
    moves: list[Move] = []
    for nd in table.universe:
        moves += moves_from(nd, table.signatures)
        if len(hierarchy) > 1 and is_even(shape, nd, hierarchy):
            for after in permute_targets(nd):
                if is_even(shape, after, hierarchy) and can_permute(nd, after, hierarchy):
                    moves.append(Move("permute", tuple(range(len(nd))), nd, after, B, B))
    return moves


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "hierarchy", [*((n,) for n in range(1, 9)), (2, 2), (2, 4), (4, 2), (1, 3), (3, 2)], ids=str
)
def test_every_move_gives_the_tensor(hierarchy: tuple[int, ...], shape: tuple[int, ...]) -> None:
    check_all(shape, hierarchy, ("sum", "max", "min", "prod"))


@pytest.mark.parametrize("shape", [(8, 8), (5, 3), (2, 9)], ids=str)
def test_every_move_gives_the_tensor_in_three_levels(shape: tuple[int, ...]) -> None:
    check_all(shape, (2, 2, 2), ("sum", "max"))


def check_all(shape: tuple[int, ...], hierarchy: tuple[int, ...], ops: Sequence[str]) -> None:
    x = tensor(shape)
    shards = {nd: view.split(x, nd, hierarchy) for nd in every(hierarchy, (*FREE, *map(Partial, ops)))}
    for move in all_moves(shape, hierarchy, ops):
        after = interpret(move, shards[move.before], shape, hierarchy)
        assert means(after, move.after, x, hierarchy), move


def kind_of(old: Signature, new: Signature) -> str | None:
    """The table of one-axis moves, written out."""
    table = {
        "B S": "slice",
        "B P": "fill",
        "B M": "keep",
        "S B": "all_gather",
        "S S": "all_to_all",
        "S P": "embed",
        "S M": "embed",
        "P B": "all_reduce",
        "P S": "reduce_scatter",
        "M B": "all_reduce",
        "M S": "all_to_all",
    }
    letters = ["S" if isinstance(s, Split) else "B" if s == B else "P" if s == P else "M" for s in (old, new)]
    return None if old == new else table.get(" ".join(letters))


@pytest.mark.parametrize("shape", [(8, 8), (5, 7)], ids=str)
def test_exactly_the_legal_moves_are_offered(shape: tuple[int, ...]) -> None:
    """Of all moves that could be written down in three levels, those that hold are offered and no others.

    The exception is local and useless: a partial made outside another kind of partial.
    """
    hierarchy, ones, x = (2, 2, 2), (B, S(0), S(1), P, P("max")), tensor(shape)
    for nd in every(hierarchy, ones):
        shards = view.split(x, nd, hierarchy)
        offered = {(m.axes, m.new): m for m in moves_from(nd, ones)}
        for n, new in itertools.product((1, 2, 3), ones):
            for axes in itertools.combinations(range(3), n):
                old = nd[axes[0]]
                kind = kind_of(old, new)
                if any(nd[a] != old for a in axes) or not kind or (n > 1 and kind not in COLLECTIVES):
                    assert (axes, new) not in offered
                    continue
                after = tuple(new if a in axes else s for a, s in enumerate(nd))
                move = Move(kind, axes, nd, after, old, new)
                legal = means(interpret(move, shards, shape, hierarchy), after, x, hierarchy)
                assert offered.get((axes, new), move) == move
                if legal and (axes, new) not in offered:
                    assert kind in ("fill", "keep", "embed")
                    assert any(isinstance(s, Partial) and s != new for s in nd[axes[0] :])
                else:
                    assert legal == ((axes, new) in offered), move


@pytest.mark.parametrize("ones", [FREE, (B, S(0), P)], ids=str)
def test_a_permute_is_found_where_one_exists(ones: tuple[Signature, ...]) -> None:
    """All 24 ways to send one shard to one device, tried one after the other."""
    hierarchy, x = (2, 2), tensor((4, 4))
    where = view.coordinates(hierarchy)
    stay = tuple(range(4))
    for before, after in itertools.product(every(hierarchy, ones), repeat=2):
        if [s == P for s in before] != [s == P for s in after]:
            continue
        new_size = [len(rows_of(4, d, after, hierarchy, where[0])) for d in range(2)]
        old_size = [len(rows_of(4, d, before, hierarchy, where[0])) for d in range(2)]
        fits = [
            [
                all(
                    set(rows_of(4, d, after, hierarchy, to)) <= set(rows_of(4, d, before, hierarchy, at))
                    for d in range(2)
                )
                and all(i == j for i, j, s in zip(at, to, before, strict=True) if s == P)
                for to in where
            ]
            for at in where
        ]
        works = [p for p in itertools.permutations(stay) if all(fits[s][d] for d, s in enumerate(p))]
        found = find_permutation((4, 4), before, after, hierarchy)
        assert (found is not None) == (bool(works) and stay not in works), (before, after)
        if found:
            assert tuple(s for s, _ in sorted(found.pairs, key=lambda pair: pair[1])) in works
            assert found.shape == tuple(new_size)
            for start in found.starts:
                assert all(i + n <= m for i, n, m in zip(start, new_size, old_size, strict=True))
            move = Move("permute", (0, 1), before, after, B, B)
            assert means(
                interpret(move, view.split(x, before, hierarchy), x.shape, hierarchy), after, x, (2, 2)
            )


@pytest.mark.parametrize("hierarchy", [(2, 2), (2, 4), (4, 2), (2, 2, 2), (2, 3)], ids=str)
def test_whether_a_permute_exists_does_not_depend_on_the_shape(hierarchy: tuple[int, ...]) -> None:
    for shape in [(24, 24), (48, 24)]:
        for before in every(hierarchy, (B, S(0), S(1), P)):
            for after in permute_targets(before):
                if is_even(shape, before, hierarchy) and is_even(shape, after, hierarchy):
                    found = find_permutation(shape, before, after, hierarchy)
                    assert (found is not None) == can_permute(before, after, hierarchy)


def sent(move: Move, shape: Sequence[int], hierarchy: Sequence[int]) -> float:
    """Elements that one device sends, by the definition of each collective over padded buffers."""
    g = math.prod(hierarchy[a] for a in move.axes)
    before, after = elements(shape, move.before, hierarchy), elements(shape, move.after, hierarchy)
    match move.kind:
        case "all_reduce":
            return 2 * (g - 1) / g * before
        case "all_gather":
            return (g - 1) / g * (g * before)
        case "reduce_scatter":
            return (g - 1) / g * (g * after)
        case "permute":
            return after
        case "all_to_all" if isinstance(move.old, Partial):
            return (g - 1) / g * (g * after)
        case "all_to_all":
            # The buffer is split to the depth of BOTH signatures, and each device sends all but its own part.
            assert isinstance(move.old, Split) and isinstance(move.new, Split)
            parts = [
                len(rows_of(n, d, move.before, hierarchy, (0,) * len(hierarchy))) for d, n in enumerate(shape)
            ]
            parts[move.new.dim] = len(
                rows_of(shape[move.new.dim], move.new.dim, move.after, hierarchy, (0, 0, 0))
            )
            return (g - 1) * math.prod(parts)
    return 0.0


@pytest.mark.parametrize("hierarchy", [(2, 2, 2), (2, 1, 4), (3, 2, 1)], ids=str)
@pytest.mark.parametrize("shape", [(8, 8), (5, 7), (1, 3), (0, 2)], ids=str)
def test_what_a_move_sends(shape: tuple[int, ...], hierarchy: tuple[int, ...]) -> None:
    for move in all_moves(shape, hierarchy, ("sum", "max")):
        bytes_ = wire_bytes(move, shape, 4, hierarchy)
        assert bytes_ == pytest.approx(4 * sent(move, shape, hierarchy)), move
        assert (bytes_ == 0) or move.is_collective


@pytest.mark.parametrize(
    ("kind", "old", "new", "factor"),
    [
        ("all_reduce", P, B, 2 * 3 / 4 * 64),
        ("all_reduce", P("max"), B, 2 * 3 / 4 * 64),
        ("reduce_scatter", P, S(0), 3 / 4 * 64),
        ("all_to_all", P("max"), S(1), 3 / 4 * 64),
        ("all_gather", S(0), B, 3 / 4 * 64),
        ("all_to_all", S(0), S(1), 3 / 4 * 16),
        ("slice", B, S(0), 0),
        ("fill", B, P, 0),
        ("keep", B, P("min"), 0),
        ("embed", S(1), P, 0),
    ],
)
def test_bytes_worked_out_by_hand(kind: str, old: Signature, new: Signature, factor: float) -> None:
    (move,) = [m for m in moves_from((old,), ALL) if m.new == new]
    assert move.kind == kind
    assert wire_bytes(move, (8, 8), 2, (4,)) == 2 * factor


def test_half_a_byte() -> None:
    (move,) = moves_from((S(0),), (B, S(0)))
    assert wire_bytes(move, (8, 8), 0.5, (4,)) == 0.5 * 3 / 4 * 64


@pytest.mark.parametrize(
    ("kind", "chip", "dtype", "bytes_each"),
    [
        ("all_reduce", "cpu", "int16", 2),
        ("all_reduce", "h100", "int16", 4),
        ("reduce_scatter", "h100", "uint16", 4),
        ("all_gather", "h100", "int16", 2),
        ("all_reduce", "h100", "bfloat16", 2),
        ("all_reduce", "cpu", "uint4", 1),
        ("all_gather", "cpu", "uint4", 0.5),
    ],
)
def test_integers_that_are_added_up_may_take_more(
    kind: str, chip: str, dtype: str, bytes_each: float
) -> None:
    """XLA on GPUs adds up 16 bits as 32, and packs 4 bits nowhere but on their way."""
    old, new = {"all_reduce": (P, B), "reduce_scatter": (P, S(0)), "all_gather": (S(0), B)}[kind]
    move = Move(kind, (0,), (old,), (new,), old, new)
    network = Network(placement(chip, shape=(8,)), hardware_for(chip))
    factor = {"all_reduce": 2 * 7, "reduce_scatter": 7, "all_gather": 7}[kind]
    assert network.wire_bytes(move, (64,), jnp.dtype(dtype)) == factor / 8 * 64 * bytes_each


def test_moves_name_what_they_change() -> None:
    for move in all_moves((8, 8), (2, 2, 2), ("sum", "max")):
        changed = tuple(a for a in range(3) if move.before[a] != move.after[a])
        if move.kind == "permute":
            assert move.axes == (0, 1, 2) and set(changed) <= {0, 1, 2}
            continue
        assert changed == move.axes
        assert {move.before[a] for a in changed} == {move.old}
        assert {move.after[a] for a in changed} == {move.new}
        assert move.is_collective == (move.kind not in ("slice", "fill", "embed", "keep"))


def test_a_dim_of_one_level_may_repeat() -> None:
    """[S(0), S(0)] -> B by one all-gather over both levels, or inner first; never the outer alone."""
    found: dict[tuple[int, ...], Any] = {m.axes: m for m in moves_from((S(0), S(0)), (B,))}
    assert set(found) == {(1,), (0, 1)}
