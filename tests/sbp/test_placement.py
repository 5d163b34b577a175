"""Placements: order of ranks, groups, stages, and the way to a mesh and back."""

import itertools
import re
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp.errors import PlacementError
from sbp.placement import Placement, as_placement, for_placement, parse_placement, placement

PERMUTED = [
    placement("cpu", ranks=[3, 1, 0, 2]),
    placement("cpu", ranks=[[0, 3], [1, 2]]),
    placement("cpu", ranks=[[7, 5, 3, 1], [0, 2, 4, 6]], axes=("nodes", "gpus")),
    placement("cpu", ranks=[[[0, 4], [2, 6]], [[1, 5], [3, 7]]]),
    placement("cpu", shape=(2, 4)),
    placement("cpu", shape=(8,), axes=("i",)),
    placement("cpu", shape=(1, 2, 1, 3)),
]


def test_shape_counts_ranks_from_zero() -> None:
    p = placement("cpu", shape=(2, 4))
    assert (p.ranks, p.shape, p.axes) == (tuple(range(8)), (2, 4), ("data", "model"))
    assert (p.ndim, p.size) == (2, 8)
    assert (
        p == placement("cpu", ranks=[[0, 1, 2, 3], [4, 5, 6, 7]]) == placement("cpu", range(8), shape=(2, 4))
    )
    assert hash(p) == hash(placement("cpu", shape=[2, 4]))


@pytest.mark.parametrize(
    ("ndim", "axes"),
    [(1, ("x",)), (2, ("data", "model")), (3, ("pod", "data", "model")), (4, ("x0", "x1", "x2", "x3"))],
)
def test_default_names(ndim: int, axes: tuple[str, ...]) -> None:
    assert placement("cpu", shape=(1,) * ndim).axes == axes


def test_the_order_of_ranks_is_kept() -> None:
    p = placement("cpu", ranks=[[3, 1], [0, 2]])
    assert p.ranks == (3, 1, 0, 2)
    assert p.groups((0,)).tolist() == [[3, 0], [1, 2]]
    assert p.groups((1,)).tolist() == [[3, 1], [0, 2]]
    assert p.groups((0, 1)).tolist() == [[3, 1, 0, 2]]


@pytest.mark.parametrize("p", PERMUTED, ids=str)
def test_groups_against_a_loop(p: Placement) -> None:
    """A group is the devices that differ along the axes alone, in row-major order of those axes."""
    grid = np.asarray(p.ranks).reshape(p.shape)
    for n in range(1, p.ndim + 1):
        for axes in itertools.combinations(range(p.ndim), n):
            expected: dict[tuple[int, ...], list[int]] = {}
            for at in np.ndindex(*p.shape):
                rest = tuple(i for a, i in enumerate(at) if a not in axes)
                expected.setdefault(rest, []).append(int(grid[at]))
            assert p.groups(axes).tolist() == list(expected.values())


@pytest.mark.parametrize("p", PERMUTED, ids=str)
def test_split_takes_the_grid_apart(p: Placement) -> None:
    grid = np.asarray(p.ranks).reshape(p.shape)
    for a, name in enumerate(p.axes):
        stages = p.split(name)
        assert stages == p.split(a) == p.split(a - p.ndim)
        assert len(stages) == p.shape[a]
        for i, stage in enumerate(stages):
            assert stage.ranks == tuple(np.take(grid, i, axis=a).flat)
            assert stage.kind == p.kind
            if p.ndim > 1:
                assert stage.shape == p.shape[:a] + p.shape[a + 1 :]
                assert stage.axes == p.axes[:a] + p.axes[a + 1 :]
            else:
                assert (stage.shape, stage.axes) == ((1,), p.axes)


@pytest.mark.parametrize("axis", ["pipe", 2, -3, 1.0, None])
def test_split_along_no_axis(axis: object) -> None:
    with pytest.raises(PlacementError, match="legal  'data', 'model'"):
        placement("cpu", shape=(2, 2)).split(axis)  # type: ignore[arg-type]


@pytest.mark.parametrize("p", PERMUTED, ids=str)
def test_mesh_and_back(p: Placement) -> None:
    mesh = p.mesh
    devices = jax.devices("cpu")
    assert mesh.axis_names == p.axes
    assert [devices.index(d) for d in mesh.devices.flat] == list(p.ranks)
    assert mesh.devices.shape == p.shape
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert Placement.from_mesh(mesh) == p
    assert Placement.from_mesh(mesh).mesh == mesh


@pytest.mark.parametrize("p", PERMUTED, ids=str)
def test_the_abstract_mesh_is_that_of_the_mesh(p: Placement) -> None:
    abstract, mesh = p.abstract_mesh, p.mesh
    assert abstract.shape_tuple == mesh.abstract_mesh.shape_tuple
    assert abstract.axis_types == mesh.axis_types


def test_from_a_mesh_that_jax_made() -> None:
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    p = Placement.from_mesh(mesh)
    assert (p.kind, p.shape, p.axes) == ("cpu", (2, 2), ("a", "b"))
    assert p.mesh == mesh


def test_what_is_taken_for_a_placement() -> None:
    for p in PERMUTED:
        assert as_placement(p, "here") is p
        assert as_placement(p.mesh, "here") == p


@pytest.mark.parametrize("ranks", [np.arange(8), range(8), list(range(8)), list(np.arange(8))], ids=repr)
def test_ranks_in_a_row_are_a_list(ranks: Any) -> None:
    assert placement("cpu", ranks) == placement("cpu", ranks=ranks) == placement("cpu", shape=(8,))


@pytest.mark.parametrize("ranks", [((0, 1), (2, 3)), [(0, 1), (2, 3)], ([0, 1], [2, 3])], ids=repr)
def test_nested_tuples_are_no_shape(ranks: Any) -> None:
    assert placement("cpu", ranks) == placement("cpu", shape=(2, 2))


@pytest.mark.parametrize("shape", [(2, 4), (8,), 8, np.int64(8), (np.int64(2), 4), (3, 1, 2)], ids=repr)
def test_a_shape_where_ranks_are_expected(shape: Any) -> None:
    meant = shape if isinstance(shape, tuple) else (shape,)
    for call in (lambda: placement("cpu", shape), lambda: placement("cpu", ranks=shape)):
        with pytest.raises(PlacementError, match=re.escape(f"did you mean shape={tuple(map(int, meant))}?")):
            call()


def test_chips_are_planned_for_without_being_there() -> None:
    p = placement("h100", shape=(16, 8))
    assert p.platform == "gpu"
    assert p.abstract_mesh.shape_tuple == (("data", 16), ("model", 8))
    assert placement("cuda", shape=(1,)).platform == "cuda"
    assert placement("cpu", shape=(1,)).platform == "cpu"


def test_printing() -> None:
    assert str(placement("cpu", shape=(2, 4))) == "cpu(data=2 x model=4)"
    assert str(placement("cpu", ranks=[1, 0])) == "cpu(x=2, ranks [1, 0])"


@given(st.sampled_from(["cpu", "gpu", "h100"]), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_the_command_lines_form(kind: str, shape: list[int]) -> None:
    text = f"{kind}:{'x'.join(map(str, shape))}"
    assert parse_placement(text) == parse_placement(text.replace("x", "X")) == placement(kind, shape=shape)


def test_one_device() -> None:
    p = placement("cpu", ranks=[5])
    assert (p.ranks, p.shape, p.axes) == ((5,), (1,), ("x",))


class Net:
    """A callable pytree, as nets of some libraries are."""

    def __call__(self, x: Any) -> Any:
        raise AssertionError("a prefix is not called")

    def sizes(self, on: Placement) -> tuple[int, ...]:
        return on.shape


def test_functions_of_the_placement_in_every_form() -> None:
    two, net = placement("cpu", shape=(2, 4)), Net()

    def sized(by: int, on: Placement) -> int:
        return by * on.size

    assert for_placement(partial(sized, 3), two) == 24
    assert for_placement(lambda on: on.ndim, two) == 2
    assert for_placement(net.sizes, two) == (2, 4)
    assert for_placement(net, two) is net
