"""What XLA's scheduler is told of a limit on memory."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import B, S
from sbp.passes.physical.program import Physical
from sbp.rates.chips import CHIPS
from sbp.runtime.execute.compiled_program import SCHEDULED_SHARE, USUAL_HUNDREDTHS, compiler_options

W = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
X = jax.ShapeDtypeStruct((8192, 4096), jnp.float32)
GIVEN = W.size * 4 + X.size * 4 // 8
"""Bytes of the arguments on each of 8 devices."""
FACTOR = "xla_gpu_memory_limit_slop_factor"
OWN = SCHEDULED_SHARE * CHIPS["h100"].memory_bytes
"""What XLA takes for the limit of its own accord, arguments and all, but for its hundredths."""


def options(
    kind: str, limit: float | None, donated: tuple[int, ...] = (), needed_bytes: float | None = None
) -> Any:
    """What XLA is told of a program, whose plan may be said to need any number of bytes."""
    program = sbp.compile(
        lambda w, x: (w * 2, jnp.tanh(x @ w).mean()),
        sbp.placement(kind, shape=(8,)),
        in_sbp=([B], [S(0)]),
        out_sbp=([B], [B]),
        donate_argnums=donated,
        options=sbp.Options(memory_limit=limit),
    )
    plan = program.plan(W, X)
    assert isinstance(plan.physical, Physical)
    needed = plan.memory_bytes if needed_bytes is None else needed_bytes
    return compiler_options(plan.physical, plan.hardware, donated, needed)


@pytest.mark.parametrize("kind, limit", [("h100", None), ("h100", 80e9), ("cpu", 4e9)])
def test_without_a_limit_of_ones_own_it_is_told_nothing(kind: str, limit: float | None) -> None:
    assert options(kind, limit) == {}


@pytest.mark.parametrize("limit", [2e9, 16e9, 60e9])
@pytest.mark.parametrize("donated", [(), (0,)])
def test_a_limit_is_what_arguments_and_results_leave(limit: float, donated: tuple[int, ...]) -> None:
    results = 0 if donated else W.size * 4
    held = GIVEN + results
    hundredths = min(max(round(100 * (limit - held) / (OWN - held)), 1), USUAL_HUNDREDTHS)
    assert options("h100", limit, donated) == {FACTOR: hundredths}


@pytest.mark.parametrize("limit, needed, told", [
    (None, 0.8 * OWN, None),  # XLA has room enough by itself
    (None, 0.89 * OWN, None),  # about as much as it has
    (None, 0.95 * OWN, 1.05 * 0.95 * OWN),
    (None, 72e9, 1.05 * 72e9),
    (None, 79e9, 80e9),  # and no more than there is
    (75e9, 0.8 * OWN, None),
    (75e9, 70e9, 1.05 * 70e9),
    (75e9, 74e9, 75e9),
    (60e9, 59e9, 60e9),
])  # fmt: skip
def test_a_plan_beyond_what_xla_takes_for_the_limit_has_the_room_that_it_was_planned_with(
    limit: float | None, needed: float, told: float | None
) -> None:
    found = options("h100", limit, (0,), needed)
    assert found == ({} if told is None else {FACTOR: round(100 * (told - GIVEN) / (OWN - GIVEN))})


def test_a_program_under_a_limit_runs() -> None:
    program = sbp.compile(
        lambda w, x: jnp.tanh(x @ w),
        sbp.placement("cpu", shape=(8,)),
        in_sbp=([B], [S(0)]),
        options=sbp.Options(memory_limit=1e9),
    )
    w, x = jnp.ones((8, 8)), jnp.ones((16, 8))
    assert jnp.allclose(program(w, x), jnp.tanh(x @ w))
