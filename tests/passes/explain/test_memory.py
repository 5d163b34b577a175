"""What is alive at the peak, against the plan's own figure."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import B, S
from sbp.hardware.catalogue import BYTES_ONLY
from sbp.passes.explain.memory import live_at_peak, over_limit
from sbp.passes.physical.evaluate import HOLES
from sbp.passes.physical.memory import SmallestPeak
from sbp.text.units import bytes_text

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


def test_a_plan_over_its_limit_says_how_much_would_be_enough() -> None:
    plan = sbp.compile(loss, GRID).plan([W, W, W], W)
    assert plan.physical is not None
    said = over_limit(plan, plan.memory_bytes - 1, SmallestPeak(plan.physical, 700.0, 500.0))
    assert said.why.startswith("the smallest peak that was found is 700 B, and none below 500 B by ")
    assert "alive there: " in said.why and said.legal == f"at most {bytes_text(plan.memory_bytes - 1)}"
    assert said.fix.endswith("Options(memory_limit=math.inf) to see the fastest plan of any size")
    # Where nothing was looked for, its own peak is what is known.
    assert "none below" not in over_limit(plan, 1.0, None).why


def test_the_advice_is_about_what_lies_whole() -> None:
    # Under `BYTES_ONLY`: so small a weight is else gathered whole.
    signatures = [[B, B], [S(0), B], [B, B]], [S(0), S(1)]
    program = sbp.compile(loss, GRID, in_sbp=signatures, options=sbp.Options(hardware=BYTES_ONLY))
    fix = over_limit(program.plan([W, W, W], W), 1.0, None).fix
    assert fix.startswith("split tensors that are whole on every device: in_sbp for params[0], params[2]; ")
