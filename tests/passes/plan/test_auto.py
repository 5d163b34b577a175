"""AUTO against every hand annotation: never more bytes under a bytes-only cost, never a worse estimate."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import sbp
from models import gpt
from sbp.hardware.catalogue import BYTES_ONLY

OPTIMIZER = optax.adamw(1e-3)
HANDS = {
    (8,): ("data", "tensor", "zero1", "zero"),
    (2, 4): ("data", "tensor", "2d", "zero1", "zero"),
    (2, 2, 2): ("2d", "zero"),
}


def plan(choice: str, shape: tuple[int, ...], layers: int, hardware: Any) -> sbp.Plan:
    config = gpt.Config(layers=layers, width=64, heads=8, vocabulary=256, sequence=32, dropout=0.1)
    params = jax.eval_shape(partial(gpt.init, config=config), jax.random.key(0))
    program = sbp.compile(
        gpt.make_train_step(config, OPTIMIZER),
        sbp.placement("h100", shape=shape),
        in_sbp=gpt.signatures(choice, shape, config, OPTIMIZER),
        options=sbp.Options(hardware=hardware),
    )
    batch = jax.ShapeDtypeStruct((16, config.sequence + 1), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return program.plan(params, jax.eval_shape(OPTIMIZER.init, params), batch, key)


@pytest.mark.full
@pytest.mark.parametrize("shape", ((8,), (2, 4), pytest.param((2, 2, 2), marks=pytest.mark.slow)))
@pytest.mark.parametrize("hardware", (BYTES_ONLY, None), ids=("bytes", "time"))
def test_auto_is_at_most_every_hand_annotation(shape: tuple[int, ...], hardware: Any) -> None:
    """Everything open includes every annotation, so its optimum is at most theirs."""
    auto = plan("auto", shape, 1, hardware)
    assert auto.gap == 0.0
    for choice in HANDS[shape]:
        hand = plan(choice, shape, 1, hardware)
        assert auto.seconds <= hand.seconds * (1 + 1e-9), choice
        if hardware is BYTES_ONLY:
            assert auto.wire_bytes <= hand.wire_bytes + 1e-6, choice


@pytest.mark.slow
@pytest.mark.parametrize("layers", (2, 12))
@pytest.mark.parametrize(
    "row", ("data:8", "tensor:8", "zero:8", "auto:8", "data:2x4", "2d:2x4", "zero:2x4", "auto:2x4")
)
def test_gpt_is_proven_optimal(layers: int, row: str) -> None:
    """GPT of 2 and 12 layers on 8 and on 2 x 4: the gap is closed."""
    choice, _, shape = row.partition(":")
    assert plan(choice, tuple(map(int, shape.split("x"))), layers, None).gap == 0.0
