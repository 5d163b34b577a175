"""Attention by cuDNN for eight H100s that are not here: XLA compiles it, without scores in memory."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import S
from sbp.runtime.report.report import ProgramReport
from tests.runtime.target.plugin import needs_plugin

pytestmark = needs_plugin

QUERY = jax.ShapeDtypeStruct((16, 2048, 16, 64), jnp.bfloat16)
KEYS = jax.ShapeDtypeStruct((16, 2048, 8, 64), jnp.bfloat16)
SCORES_BYTES = 4 * 16 * 16 * 2048 * 2048 / 8


@cache
def report(dim: int, how: str) -> ProgramReport:
    def loss(*args: jax.Array) -> jax.Array:
        out = jax.nn.dot_product_attention(*args, is_causal=True, implementation=how)  # type: ignore[call-overload]
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    step = jax.value_and_grad(loss, argnums=(0, 1, 2))
    return sbp.compile(step, sbp.placement("h100", shape=(8,)), in_sbp=[S(dim)]).report(QUERY, KEYS, KEYS)


@pytest.mark.full
@pytest.mark.parametrize("dim", [0, 2])
def test_one_kernel_each_way_and_no_scores(dim: int) -> None:
    found, statistics = report(dim, "cudnn"), 4 * 16 * 16 * 2048 / 8
    assert found.simulation is not None
    assert found.simulation.unknown_kernels == ()
    assert found.unexplained_differences == ()
    # What cuDNN asks for where it runs is in the plan alone: it is not here to be asked.
    workspace = 4 * QUERY.size / 8 + statistics
    assert found.memory is not None
    assert found.plan.memory_bytes - workspace == pytest.approx(found.memory.peak, rel=0.1)
    assert found.memory.peak < SCORES_BYTES


@pytest.mark.full
def test_ordinary_ops_keep_the_scores() -> None:
    memory = report(0, "xla").memory
    assert memory is not None
    assert memory.peak > SCORES_BYTES
