"""What is alive at the peak, against the plan's own figure."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import B, S
from sbp.errors import SbpError
from sbp.hardware import BYTES_ONLY
from sbp.passes.explain.memory import check_limit, live_at_peak
from sbp.passes.physical.evaluate import HOLES

GRID = sbp.placement("cpu", shape=(2, 4))
W = np.ones((16, 16), np.float32)


def loss(params: Any, x: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


@pytest.mark.parametrize("fn", [loss, jax.grad(loss)], ids=["forward", "gradient"])
@pytest.mark.parametrize("signature", [[B, B], [S(0), B], [B, S(1)]], ids=str)
def test_the_tensors_at_the_peak_add_up_to_it(fn: Any, signature: Any) -> None:
    program = sbp.compile(fn, GRID, in_sbp=([signature] * 3, [S(0), B]))
    plan = program.plan([W, W, W], W)
    assert plan.physical is not None
    live = live_at_peak(plan)
    ends = set(plan.physical.graph.inputs) | set(plan.physical.graph.outputs)
    between = sum(x.bytes for x in live if x.version[0] not in ends)
    least = sum(x.bytes for x in live)
    assert least <= plan.memory_bytes <= least + HOLES * least
    assert plan.memory_bytes >= least + HOLES * between - 1e-6
    assert [x.bytes for x in live] == sorted((x.bytes for x in live), reverse=True)
    # Arguments are there for the whole step.
    assert {x.version[0] for x in live} >= set(plan.physical.graph.inputs)


def test_only_a_plan_over_the_limit_is_refused() -> None:
    plan = sbp.compile(loss, GRID).plan([W, W, W], W)
    check_limit(plan, None)
    check_limit(plan, plan.memory_bytes)
    with pytest.raises(SbpError, match="alive at the peak: "):
        check_limit(plan, plan.memory_bytes - 1)


def test_the_advice_is_about_what_lies_whole() -> None:
    # Under `BYTES_ONLY`: so small a weight is else gathered whole.
    signatures = [[B, B], [S(0), B], [B, B]], [S(0), S(1)]
    program = sbp.compile(loss, GRID, in_sbp=signatures, options=sbp.Options(hardware=BYTES_ONLY))
    plan = program.plan([W, W, W], W)
    with pytest.raises(SbpError) as caught:
        check_limit(plan, 1.0)
    fix = caught.value.problems[0].fix
    assert fix.startswith("split what lies whole on every device: in_sbp for params[0], params[2]; ")
