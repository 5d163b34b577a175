"""Small collectives that leave with no other, and plans without them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import B, S
from sbp.compat.untyped import struct
from sbp.passes.boxing.links import Network
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.lone_collectives import lone_moves

DEVICES = sbp.placement("h100", shape=(8,), axes=("data",))


def step(ws: Any, x: Any) -> Any:
    """A loss per row of a row, as that of a token: its gather takes less than the sum of the mean."""

    def loss(ws: Any) -> Any:
        return jnp.square(jnp.tanh(x @ ws[0]) @ ws[1]).sum(-1).mean()

    value, gradient = jax.value_and_grad(loss)(ws)
    return [w - g for w, g in zip(ws, gradient, strict=True)], value


def planned() -> sbp.Plan:
    """The plan for weights that every device has."""
    program = sbp.compile(step, DEVICES, in_sbp=([B], [S(0)]), out_sbp=[B], options=sbp.Options(cache=False))
    ws = [struct((256, 256), jnp.float32)] * 2
    return program.plan(ws, struct((64, 128, 256), jnp.float32))


def evaluator(plan: sbp.Plan) -> Evaluator:
    assert plan.physical is not None
    return Evaluator(plan.physical, Network(plan.placement, plan.hardware))


def test_a_loss_is_added_up_with_the_gradients() -> None:
    plan = planned()
    assert {c.kind for c in plan.collectives} == {"all_reduce"}
    assert not lone_moves(evaluator(plan))


def test_what_leaves_alone_and_is_small_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    better = evaluator(planned())
    monkeypatch.setattr("sbp.passes.search.explore.Explorer.run", lambda *_: None)
    plan = evaluator(planned())
    (lone,) = lone_moves(plan)
    assert lone.move.kind == "all_gather"
    assert better.scheduled().seconds < plan.scheduled().seconds
