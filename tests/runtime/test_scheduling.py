"""What XLA's scheduler is told of a limit on memory."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import B, S
from sbp.hardware import hardware_for
from sbp.passes.physical.program import Physical
from sbp.runtime.scheduling import SCHEDULED_SHARE, compiler_options

W = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
X = jax.ShapeDtypeStruct((8192, 4096), jnp.float32)
GIVEN = W.size * 4 + X.size * 4 // 8
"""Bytes of the arguments on each of 8 devices."""
FACTOR = "xla_gpu_memory_limit_slop_factor"


def options(kind: str, limit: float | None, donated: tuple[int, ...] = ()) -> Any:
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
    return compiler_options(plan.physical, plan.hardware, donated)


@pytest.mark.parametrize("kind, limit", [("h100", None), ("h100", 80e9), ("cpu", 4e9)])
def test_without_a_limit_of_ones_own_it_is_told_nothing(kind: str, limit: float | None) -> None:
    assert options(kind, limit) == {}


@pytest.mark.parametrize("limit", [2e9, 16e9, 60e9])
@pytest.mark.parametrize("donated", [(), (0,)])
def test_a_limit_is_what_arguments_and_results_leave(limit: float, donated: tuple[int, ...]) -> None:
    results = 0 if donated else W.size * 4
    held = GIVEN + results
    most = SCHEDULED_SHARE * hardware_for("h100").memory_bytes - held
    assert options("h100", limit, donated) == {FACTOR: min(max(round(100 * (limit - held) / most), 1), 95)}


def test_a_program_under_a_limit_runs() -> None:
    program = sbp.compile(
        lambda w, x: jnp.tanh(x @ w),
        sbp.placement("cpu", shape=(8,)),
        in_sbp=([B], [S(0)]),
        options=sbp.Options(memory_limit=1e9),
    )
    w, x = jnp.ones((8, 8)), jnp.ones((16, 8))
    assert jnp.allclose(program(w, x), jnp.tanh(x @ w))
