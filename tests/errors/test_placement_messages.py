"""Every message about placements, word for word: what was given, what is legal, why, and what to try."""

from typing import Any

import jax.numpy as jnp
import pytest

from sbp.annotation import annotate
from sbp.errors import (
    KINDS,
    PlacementError,
)
from sbp.hardware.catalogue import CATALOGUE, PLATFORMS, hardware_for
from sbp.placement import parse_placement, placement
from sbp.signature import S
from tests.errors.messages import Messages, check_message, kinds

X = jnp.ones((3, 4))
GRID = {"shape": (2, 2)}
KIND_NAMES = ", ".join(sorted({*CATALOGUE, *PLATFORMS}))
PLACED_NAMES = ", ".join(sorted({*CATALOGUE, *PLATFORMS, "tpu"}))
NO_PLACEMENT = (
    "an sbp.placement, or a jax.sharding.Mesh",
    "a placement says which devices a program, or a part of it, runs on",
)

MESSAGES: Messages = {
    "an unknown kind": (
        lambda: placement("cuda:0", shape=(2,)),
        PlacementError,
        "placement(...)",
        "kind 'cuda:0'",
        PLACED_NAMES,
        "the kind is a JAX platform or a catalogue name",
        "'cpu' or 'gpu' to run, a chip's name to plan for it",
    ),
    "too few names": (
        lambda: placement("cpu", **GRID, axes=("a",)),
        PlacementError,
        "placement(...)",
        "axes ('a',) for a hierarchy of shape (2, 2)",
        "a tuple of 2 different names",
        "each level of the hierarchy has one name",
        "axes=('data', 'model')",
    ),
    "a name twice": (
        lambda: placement("cpu", **GRID, axes=("a", "a")),
        PlacementError,
        "placement(...)",
        "axes ('a', 'a') for a hierarchy of shape (2, 2)",
        "a tuple of 2 different names",
        "each level of the hierarchy has one name",
        "axes=('data', 'model')",
    ),
    "a name that is no string": (
        lambda: placement("cpu", shape=(2,), axes=(0,)),  # type: ignore[arg-type]
        PlacementError,
        "placement(...)",
        "axes (0,) for a hierarchy of shape (2,)",
        "a tuple of 1 name",
        "each level of the hierarchy has one name",
        "axes=('x',)",
    ),
    "no devices named": (
        lambda: placement("cpu"),
        PlacementError,
        "placement(...)",
        "neither ranks nor shape",
        "one of them",
        "the devices must be named",
        "shape=(8,)",
    ),
    "a level of no devices": (
        lambda: placement("cpu", shape=(2, 0)),
        PlacementError,
        "placement(...)",
        "shape=(2, 0)",
        "a tuple of sizes of at least 1, outer to inner",
        "every level of the hierarchy has devices",
        "shape=(2, 4)",
    ),
    "a shape that is no tuple": (
        lambda: placement("cpu", shape=8),  # type: ignore[arg-type]
        PlacementError,
        "placement(...)",
        "shape=8",
        "a tuple of sizes of at least 1, outer to inner",
        "every level of the hierarchy has devices",
        "shape=(2, 4)",
    ),
    "a shape where ranks are expected": (
        lambda: placement("cpu", (2, 4)),
        PlacementError,
        "placement(...)",
        "(2, 4)",
        "nested lists of ranks, or shape=",
        "as ranks it would mean devices 2 and 4, and no others",
        "did you mean shape=(2, 4)? If these are the ranks: ranks=[2, 4]",
    ),
    "a count where ranks are expected": (
        lambda: placement("cpu", 8),
        PlacementError,
        "placement(...)",
        "8",
        "nested lists of ranks, or shape=",
        "as ranks it would mean device 8, and no others",
        "did you mean shape=(8,)? If these are the ranks: ranks=[8]",
    ),
    "a mesh for a kind": (
        lambda: placement(placement("cpu", shape=(2,)).mesh),  # type: ignore[arg-type]
        PlacementError,
        "placement(...)",
        f"kind {placement('cpu', shape=(2,)).mesh!r}",
        PLACED_NAMES,
        "the kind is a JAX platform or a catalogue name",
        "placement('cpu', ...); a Mesh is taken as it is where a placement is wanted",
    ),
    "an annotation's placement": (
        lambda: annotate(X, [S(0)], placement="cpu"),  # type: ignore[arg-type]
        PlacementError,
        "annotate(..., placement=...)",
        "'cpu'",
        *NO_PLACEMENT,
        "sbp.placement('cpu', shape=(8,))",
    ),
    "ragged ranks": (
        lambda: placement("cpu", [[0, 1], [2]]),
        PlacementError,
        "placement(...)",
        "ranks=[[0, 1], [2]]",
        "rows of equal length",
        "the hierarchy is a grid",
        "ranks=[[0, 1], [2, 3]]",
    ),
    "a negative rank": (
        lambda: placement("cpu", [0, -1]),
        PlacementError,
        "placement(...)",
        "ranks=[0, -1]",
        "integers >= 0",
        "a rank is a position in jax.devices(kind)",
        "ranks=[[0, 1], [2, 3]]",
    ),
    "no ranks": (
        lambda: placement("cpu", []),
        PlacementError,
        "placement(...)",
        "ranks=[]",
        "integers >= 0",
        "a rank is a position in jax.devices(kind)",
        "ranks=[[0, 1], [2, 3]]",
    ),
    "a rank that is no integer": (
        lambda: placement("cpu", [0.5, 1.0]),
        PlacementError,
        "placement(...)",
        "ranks=[0.5, 1.0]",
        "integers >= 0",
        "a rank is a position in jax.devices(kind)",
        "ranks=[[0, 1], [2, 3]]",
    ),
    "a rank twice": (
        lambda: placement("cpu", [[0, 1], [1, 2]]),
        PlacementError,
        "placement(...)",
        "ranks=[[0, 1], [1, 2]]",
        "every rank once",
        "rank 1 is repeated: a device has one place in the hierarchy",
        "list each rank once",
    ),
    "ranks that do not fill the shape": (
        lambda: placement("cpu", [0, 1, 2], shape=(2, 2)),
        PlacementError,
        "placement(...)",
        "3 ranks for shape (2, 2)",
        "4 ranks",
        "the shape must hold all ranks",
        "drop ranks= or shape=",
    ),
    "a placement's text": (
        lambda: parse_placement("cpu:2by4"),
        PlacementError,
        "a placement in text form",
        "'cpu:2by4'",
        "KIND:AxBxC",
        "the shape is a product of sizes",
        "cpu:2x4, h100:16x8",
    ),
    "stages along no axis": (
        lambda: placement("cpu", **GRID).split("pipe"),
        PlacementError,
        "cpu(data=2 x model=2).split(...)",
        "axis 'pipe'",
        "'data', 'model', or 0..1",
        "stages lie along one axis of the placement",
        "split('data')",
    ),
    "more ranks than devices": (
        lambda: placement("cpu", shape=(3, 3)).mesh,
        PlacementError,
        "cpu(data=3 x model=3).mesh",
        "rank 8",
        "ranks below 8",
        "a rank is a position in jax.devices('cpu'), which has 8",
        "jax.config.update('jax_num_cpu_devices', 9) before any device is used",
    ),
    "no rates for a kind": (
        lambda: hardware_for("tpu"),
        PlacementError,
        "planning for 'tpu'",
        "kind 'tpu'",
        KIND_NAMES,
        "a plan needs the rates of the device and of its links; the catalogue has none for it",
        "Options(hardware=sbp.hardware.hardware_from('machine.toml')) with its rates",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_whole_message(name: str) -> None:
    check_message(*MESSAGES[name])
    assert KINDS[kinds(MESSAGES[name][0])[0][0]] is MESSAGES[name][1]


def test_a_missing_platform_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(platform: str) -> list[Any]:
        raise RuntimeError(f"Unknown backend {platform}")

    monkeypatch.setattr("jax.devices", none)
    with pytest.raises(PlacementError) as caught:
        _ = placement("h100", shape=(2,)).mesh
    assert str(caught.value).splitlines() == [
        "h100(x=2).mesh",
        "  got    rank 1",
        "  legal  none here: JAX finds no 'gpu' device",
        "  why    a rank is a position in jax.devices('gpu'), which has 0",
        "  try    placement('cpu', ...) to run here; Program.plan() needs no devices",
    ]
    monkeypatch.setattr("jax.devices", lambda platform: ["one device"])
    with pytest.raises(PlacementError, match=r"a smaller shape, or Program\.plan") as caught:
        _ = placement("h100", shape=(2,)).mesh
    assert "  legal  ranks below 1\n" in str(caught.value)
