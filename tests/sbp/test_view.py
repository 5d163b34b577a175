"""The oracle: `split` and `join` are inverse, and agree with a slicer that shares no code with them."""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sbp import view
from sbp.signature import PARTIAL_OPS, B, NdSbp, P, Partial, S, has_partial
from tests.sbp.slicer import shard_of

SHAPES = [(4, 4), (6, 8), (5, 7), (1, 3), (0, 2), (9, 1)]
HIERARCHIES = [(1,), (3,), (4,), (8,), (2, 2), (2, 4), (4, 2), (1, 3), (2, 2, 2)]
ONE = (B, S(0), S(1), P, P("max"), P("min"))


def tensor(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(1).integers(-50, 50, size=shape).astype(dtype)


def every(hierarchy: tuple[int, ...], ones: tuple[Any, ...] = ONE) -> list[NdSbp]:
    return list(itertools.product(ones, repeat=len(hierarchy)))


@pytest.mark.parametrize("hierarchy", HIERARCHIES, ids=str)
def test_join_undoes_split(hierarchy: tuple[int, ...]) -> None:
    """All signatures, mixed partials included, with NaN in the padding."""
    for shape, nd in itertools.product(SHAPES, every(hierarchy)):
        x = tensor(shape)
        shards = view.split(x, nd, hierarchy)
        np.testing.assert_array_equal(view.join(shards, shape, nd, hierarchy), x, err_msg=f"{shape} {nd}")


@pytest.mark.parametrize("hierarchy", HIERARCHIES, ids=str)
def test_shards_are_those_of_the_slicer(hierarchy: tuple[int, ...]) -> None:
    for shape, nd in itertools.product(SHAPES, every(hierarchy, (B, S(0), S(1)))):
        x = tensor(shape)
        for coords, shard in view.split(x, nd, hierarchy).items():
            expected, real = shard_of(x, nd, hierarchy, coords)
            assert shard.shape == expected.shape
            np.testing.assert_array_equal(shard[real], expected[real])
            assert np.isnan(shard[~real]).all(), "padding is filled with NaN"


@pytest.mark.parametrize(
    ("dtype", "ops"),
    [
        (np.int8, PARTIAL_OPS),
        (np.uint8, PARTIAL_OPS),
        (np.int32, PARTIAL_OPS),
        (np.bool_, ("max", "min", "and", "or", "xor")),
        (ml_dtypes.bfloat16, ("sum", "max", "min")),
        (np.complex64, ("sum",)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_every_dtype_at_its_extremes(dtype: Any, ops: tuple[str, ...]) -> None:
    """A shard of a maximum never wraps around to something larger."""
    x = tensor((5, 7), dtype)
    if np.dtype(dtype).kind in "iu":
        x[0, 0], x[0, 1] = np.iinfo(dtype).min, np.iinfo(dtype).max
    for nd in every((2, 3), (B, S(0), *map(Partial, ops))):
        shards = view.split(x, nd, (2, 3))
        assert all(s.dtype == x.dtype for s in shards.values())
        np.testing.assert_array_equal(view.join(shards, x.shape, nd, (2, 3)), x, err_msg=str(nd))


@pytest.mark.parametrize("extreme", ["min", "max"])
def test_a_scalar_of_an_integer_type_wraps_in_silence(extreme: str) -> None:
    x = np.array(getattr(np.iinfo(np.int32), extreme), np.int32)
    for nd in every((2, 3), (B, P, P("max"), P("min"))):
        assert view.join(view.split(x, nd, (2, 3)), (), nd, (2, 3)) == x


def test_infinities_and_nans_survive() -> None:
    x = np.array([np.inf, -np.inf, np.nan, 0.0], np.float32)
    for nd in every((2, 2), (B, S(0), P, P("max"), P("min"))):
        shards = view.split(x, nd, (2, 2))
        np.testing.assert_array_equal(view.join(shards, x.shape, nd, (2, 2)), x, err_msg=str(nd))


def test_partial_shards_all_take_part() -> None:
    """Test data that hides nothing: no shard of a sum is zero or whole, both signs occur."""
    x = tensor((16, 16))
    for op in ("sum", "max", "min"):
        shards = list(view.split(x, (Partial(op),), (4,)).values())
        assert all(np.count_nonzero(s != x) > 0 for s in shards)
        assert all((s < 0).any() and (s > 0).any() for s in shards)
    for op, reduce in (("max", np.maximum), ("min", np.minimum)):
        shards = list(view.split(x, (Partial(op),), (4,)).values())
        owners = [int((s == reduce.reduce(shards)).sum()) for s in shards]
        assert min(owners) > 0, "every shard holds the extreme somewhere"


def test_outer_partial_is_reduced_last() -> None:
    """[P, P(max)] is a sum of maxima; [P(max), P] is a maximum of sums."""
    shards = {c: np.array([v]) for c, v in zip(view.coordinates((2, 2)), (1, 4, 3, 2), strict=True)}
    assert view.join(shards, (1,), (P, P("max")), (2, 2)) == 4 + 3
    assert view.join(shards, (1,), (P("max"), P), (2, 2)) == max(1 + 4, 3 + 2)


def test_copies_hold_equal_summands() -> None:
    """[B, P] and [P, B] alike: what differs in a B axis alone is equal, so a permute may take either copy."""
    x = tensor((4,))
    for nd in every((2, 2, 2), (B, S(0), P, P("max"))):
        shards = view.split(x, nd, (2, 2, 2))
        for at in shards:
            first = tuple(0 if s == B else i for i, s in zip(at, nd, strict=True))
            np.testing.assert_array_equal(shards[at], shards[first])
    shards = view.split(x, (B, P), (2, 2))
    shards[1, 0], shards[1, 1] = shards[1, 1], shards[1, 0]  # the same sum, from other summands
    with pytest.raises(ValueError, match="copies"):
        view.join(shards, x.shape, (B, P), (2, 2))


def test_padding_of_copies_may_differ_and_their_values_may_not() -> None:
    x = tensor((3,), np.int32)
    shards = view.split(x, (S(0), B), (2, 2))
    shards[1, 0] = np.array([x[2], 111], np.int32)
    shards[1, 1] = np.array([x[2], 222], np.int32)
    np.testing.assert_array_equal(view.join(shards, (3,), (S(0), B), (2, 2)), x)
    shards[1, 1] = np.array([x[2] + 1, 111], np.int32)
    with pytest.raises(ValueError, match="copies"):
        view.join(shards, (3,), (S(0), B), (2, 2))


def test_shards_of_a_wrong_shape_are_refused() -> None:
    """Without this a shard of one row would be spread over the whole chunk."""
    shards = {(0,): np.ones((1,)), (1,): np.ones((1,))}
    with pytest.raises(ValueError, match="shape"):
        view.join(shards, (6,), (S(0),), (2,))


def test_the_seed_changes_partials_only() -> None:
    x = tensor((4, 4))
    for nd in every((2, 2)):
        a, b = (view.split(x, nd, (2, 2), seed=seed) for seed in (0, 1))
        same = all(np.array_equal(a[c], b[c], equal_nan=True) for c in a)
        assert same == (not has_partial(nd))


def test_coordinates_are_row_major() -> None:
    assert view.coordinates((2, 3)) == list(np.ndindex(2, 3))
