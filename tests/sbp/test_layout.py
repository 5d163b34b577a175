"""The arithmetic of splits against a slicer that pads lists of rows and cuts them."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp.layout import (
    Layout,
    at_rest,
    chunk,
    chunk_sizes,
    is_even,
    is_padded,
    local_shape,
    offset,
    split_shape,
    valid_length,
)
from sbp.signature import B, NdSbp, P, S, Signature, Split, splits_of
from sbp.view import coordinates
from tests.sbp.slicer import HOLE, rows_of

HIERARCHIES = [
    (1,),
    (4,),
    (7,),
    (8,),
    (2, 2),
    (2, 3),
    (3, 2),
    (4, 2),
    (1, 3),
    (2, 1, 3),
    (2, 2, 2),
    (3, 2, 2),
]


def nested(hierarchy: tuple[int, ...]) -> list[NdSbp]:
    """Every way to split dim 0 by some of the axes."""
    return list(itertools.product((S(0), B), repeat=len(hierarchy)))


@pytest.mark.parametrize("hierarchy", HIERARCHIES, ids=str)
def test_offsets_and_lengths_are_those_of_the_slicer(hierarchy: tuple[int, ...]) -> None:
    """Uneven, nested, zero and smaller than the group: every size to 26, every device, every nesting."""
    for size, nd, coords in itertools.product(range(27), nested(hierarchy), coordinates(hierarchy)):
        axes = splits_of(nd, 0)
        rows = rows_of(size, 0, nd, hierarchy, coords)
        real = [r for r in rows if r != HOLE]
        given = (size, nd, coords)
        assert local_shape((size,), nd, hierarchy) == (len(rows),), given
        assert valid_length(size, axes, hierarchy, coords) == len(real), given
        assert rows[: len(real)] == real, "the real part of a shard is a prefix"
        if real:
            assert offset(size, axes, hierarchy, coords) == real[0], given


@pytest.mark.parametrize("hierarchy", HIERARCHIES, ids=str)
def test_padding_is_found_where_the_slicer_pads(hierarchy: tuple[int, ...]) -> None:
    for size, nd in itertools.product(range(27), nested(hierarchy)):
        holes = any(HOLE in rows_of(size, 0, nd, hierarchy, c) for c in coordinates(hierarchy))
        assert is_padded(size, splits_of(nd, 0), hierarchy) == holes, (size, nd)
        assert is_even((size,), nd, hierarchy) == (not holes), (size, nd)
        assert Layout((size,), nd, hierarchy).has_padding(0) == holes, (size, nd)


@pytest.mark.parametrize("hierarchy", [(4,), (2, 2), (2, 3), (2, 2, 2)], ids=str)
def test_every_row_is_held_exactly_once_per_copy(hierarchy: tuple[int, ...]) -> None:
    for size, nd in itertools.product(range(20), nested(hierarchy)):
        held = [r for c in coordinates(hierarchy) for r in rows_of(size, 0, nd, hierarchy, c) if r != HOLE]
        lengths = [valid_length(size, splits_of(nd, 0), hierarchy, c) for c in coordinates(hierarchy)]
        copies = math.prod(n for n, s in zip(hierarchy, nd, strict=True) if s == B)
        assert sum(lengths) == len(held) == size * copies


def test_chunk_is_the_least_that_covers() -> None:
    for size, group in itertools.product(range(60), range(1, 13)):
        assert chunk(size, group) == next(c for c in itertools.count() if c * group >= size)


def test_a_vocabulary_over_eight() -> None:
    assert chunk(50_257, 8) == 6_283
    assert [valid_length(50_257, (0,), (8,), (i,)) for i in (0, 6, 7)] == [6_283, 6_283, 6_276]
    assert offset(50_257, (0,), (8,), (7,)) == 43_981


SIGNATURES = st.sampled_from([S(0), S(1), B, P, P("max")])


@st.composite
def layouts(draw: Any) -> Layout:
    hierarchy = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    nd = [draw(SIGNATURES) for _ in hierarchy]
    return Layout(draw(st.tuples(st.integers(0, 30), st.integers(0, 30))), tuple(nd), tuple(hierarchy))


@given(layouts())
def test_a_layout_agrees_with_the_slicer(layout: Layout) -> None:
    first = (0,) * len(layout.hierarchy)
    for dim, size in enumerate(layout.shape):
        rows = rows_of(size, dim, layout.nd, layout.hierarchy, first)
        assert layout.local[dim] == len(rows)
        assert layout.axes(dim) == tuple(a for a, s in enumerate(layout.nd) if s == Split(dim))
        sizes = chunk_sizes(size, layout.axes(dim), layout.hierarchy)
        assert (sizes[-1] if sizes else size) == len(rows)
    assert layout.partial_axes("sum") == tuple(a for a, s in enumerate(layout.nd) if s == P)
    assert layout.partial_axes("max") == tuple(a for a, s in enumerate(layout.nd) if s == P("max"))


@given(layouts())
def test_axes_apply_one_after_the_other(layout: Layout) -> None:
    shape = layout.shape
    for signature, group in zip(layout.nd, layout.hierarchy, strict=True):
        shape = split_shape(shape, signature, group)
    assert shape == layout.local


@given(layouts())
def test_at_rest_keeps_what_divides_and_nothing_else(layout: Layout) -> None:
    kept = at_rest(layout.shape, layout.nd, layout.hierarchy)
    assert is_even(layout.shape, kept, layout.hierarchy)
    assert not any(s == P or s == P("max") for s in kept)
    for axis, (before, after) in enumerate(zip(layout.nd, kept, strict=True)):
        assert after in (before, B)
        if isinstance(before, Split) and after == B:  # it was dropped because it does not divide
            again = (*kept[:axis], before, *kept[axis + 1 :])
            assert not is_even(layout.shape, _outer(again, axis), layout.hierarchy)
    if is_even(layout.shape, layout.nd, layout.hierarchy):
        assert kept == tuple(s if isinstance(s, Split) else B for s in layout.nd)


def _outer(nd: tuple[Signature, ...], axis: int) -> NdSbp:
    return tuple(s if a <= axis else B for a, s in enumerate(nd))


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(ValueError):
        local_shape((4,), (B,), (2, 2))
