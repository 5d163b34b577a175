"""Notes of a plan on what the user asked for and did not get, with what would get it."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import AUTO, B, S
from sbp.hardware.catalogue import BYTES_ONLY, Hardware

LINE = sbp.placement("h100", shape=(8,))
GRID = sbp.placement("h100", shape=(2, 4))


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def scanned(weights: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0]


@pytest.mark.parametrize(
    ("on", "shape", "asked", "divides"),
    [
        (LINE, (6, 512, 512), [S(0)], "; S(1) or S(2) divides; "),
        (LINE, (6, 512, 500), [S(0)], "; S(1) divides; "),
        (LINE, (6, 500, 512), [S(0)], "; S(2) divides; "),
        (LINE, (6, 500, 500), [S(0)], None),
        (GRID, (6, 512, 4), [B, S(0)], "; S(1) or S(2) divides; "),
        # Dim 1 is halved already: of what is left a quarter is wanted.
        (GRID, (6, 12, 12), [S(1), S(0)], "; S(2) divides; "),
        (GRID, (6, 16, 9), [S(1), S(0)], "; S(1) divides; "),
    ],
)
def test_an_uneven_split_names_the_dims_that_divide(
    on: Any, shape: Any, asked: Any, divides: str | None
) -> None:
    plan = sbp.compile(lambda w: w * 2, on, in_sbp=(asked,)).plan(floats(*shape))
    (note,) = (n for n in plan.notes if n.startswith("w: dim 0 of size 6 does not divide"))
    assert "a size of 8 would stay split" in note
    assert divides in note if divides else "divides;" not in note


def test_what_cannot_be_held_split_is_not_gathered_in_each_step() -> None:
    """Weights stacked by layer, six layers on eight devices: split by them the plan is that of whole ones."""
    weights, x = floats(6, 256, 256), floats(512, 256)

    def grad(weights: Any, x: Any) -> Any:
        return jax.grad(lambda w: (scanned(w, x) ** 2).mean())(weights)

    def planned(nd: Any) -> sbp.Plan:
        plan: sbp.Plan = sbp.compile(grad, LINE, in_sbp=(nd, [S(0)]), out_sbp=nd).plan(weights, x)
        return plan

    uneven, whole, even = planned([S(0)]), planned([B]), planned([S(1)])
    (note,) = uneven.notes[:1]
    assert "[S(0)] is [B] at rest, 1.31 MB more per device" in note and "S(1) or S(2) divides" in note
    assert uneven.wire_bytes == whole.wire_bytes and uneven.seconds == whole.seconds
    assert not even.notes and even.memory_bytes < whole.memory_bytes


def step(weights: Any, x: Any, insist: bool = False) -> Any:
    def loss(weights: Any) -> Any:
        h = x @ weights["up"]
        if insist:
            h = sbp.annotate(h, S(0), grad=S(0))
        return jnp.mean((jax.nn.relu(h) @ weights["down"]) ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - g, weights, grads), value


def weights(width: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {"up": floats(width, width), "down": floats(width, width)}


def everywhere(plan: sbp.Plan) -> list[str]:
    return [note for note in plan.notes if "gathered whole over" in note]


LINE_OF_UP = inspect.getsourcelines(step)[1] + 2


@pytest.mark.parametrize("hardware", [None, BYTES_ONLY], ids=["h100", "bytes only"])
def test_work_that_is_done_everywhere_is_said(hardware: Hardware | None) -> None:
    """A tiny model: to gather the batch is cheaper than to add up the gradients."""
    options = sbp.Options(hardware=hardware)
    plan = sbp.compile(step, LINE, in_sbp=([B], [S(0)]), options=options).plan(weights(64), floats(64, 64))
    assert [c.kind for c in plan.collectives] == ["all_gather"]
    (note,) = everywhere(plan)
    assert note.startswith("x [S(0)]: gathered whole over 'x', as that is cheaper by the estimate")
    assert "each of the 8 devices does all of it" in note
    assert f"annotate an activation, such as what dot_general at test_notes.py:{LINE_OF_UP} makes" in note
    assert note in str(plan)


def test_who_follows_the_note_has_the_work_split() -> None:
    def insisting(weights: Any, x: Any) -> Any:
        return step(weights, x, insist=True)

    plan = sbp.compile(insisting, LINE, in_sbp=([B], [S(0)])).plan(weights(64), floats(64, 64))
    assert not everywhere(plan)
    assert not any(c.kind == "all_gather" and c.tensor == "x" for c in plan.collectives)


def test_only_the_axis_along_which_nothing_is_split_is_named() -> None:
    signatures = {"up": [B, S(1)], "down": [B, S(0)]}, [S(0), B]
    plan = sbp.compile(step, GRID, in_sbp=signatures).plan(weights(512), floats(16, 512))
    (note,) = everywhere(plan)
    assert note.startswith("x [S(0), B]: gathered whole over 'data'") and "each of the 2 devices" in note


@pytest.mark.parametrize(
    "in_sbp",
    [([B], [S(0)]), ([S(0)], [S(0)]), (AUTO, AUTO), (AUTO, [S(0)]), ([S(0)], AUTO)],
    ids=["data parallel", "ZeRO-3", "nothing", "the batch", "the weights"],
)
def test_nothing_is_said_where_the_work_is_split(in_sbp: Any) -> None:
    """Weights that are gathered for use, as in ZeRO-3, are not work done everywhere."""
    plan = sbp.compile(step, LINE, in_sbp=in_sbp).plan(weights(1024), floats(65536, 1024))
    assert not everywhere(plan)
