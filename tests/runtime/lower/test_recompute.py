"""Programs in which ops run again give what one device gives: values, gradients, dropout."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.checker.report import check_plan
from sbp.passes.physical.program import Compute, Physical

PLACE = sbp.placement("cpu", shape=(4,))
LAYERS, WIDTH = 2, 32


def loss(ws: Any, x: Any, key: Any) -> Any:
    for k, (w, u) in enumerate(ws):
        y = jax.nn.softmax(x @ w)
        kept = jax.random.bernoulli(jax.random.fold_in(key, k), 0.8, y.shape)
        x = x + jnp.where(kept, jnp.tanh(y), 0.0) @ u
    return (x**2).mean()


def step(ws: Any, x: Any, key: Any) -> Any:
    return jax.value_and_grad(loss)(ws, x, key)


def arguments() -> Any:
    keys = jax.random.split(jax.random.key(0), 2 * LAYERS + 1)
    ws = [
        (jax.random.normal(keys[2 * k], (WIDTH, 256)), 0.1 * jax.random.normal(keys[2 * k + 1], (256, WIDTH)))
        for k in range(LAYERS)
    ]
    return ws, jax.random.normal(keys[-1], (512, WIDTH)), jax.random.key(7)


def compiled(limit: float | None) -> Any:
    options = sbp.Options(memory_limit=limit, cache=False)
    return sbp.compile(step, PLACE, in_sbp=(sbp.AUTO, [sbp.S(0)], sbp.AUTO), options=options)


@pytest.fixture(scope="module")
def fitted() -> Any:
    args = arguments()
    needed = compiled(None).plan(*args).memory_bytes
    program = compiled(0.65 * needed)
    return program, program.plan(*args), args, needed


def test_a_plan_under_a_limit_recomputes_and_says_so(fitted: Any) -> None:
    _, plan, _, needed = fitted
    assert plan.memory_bytes <= 0.65 * needed and plan.bound <= plan.seconds
    assert any("are recomputed for later uses instead of being kept" in note for note in plan.notes)
    assert any(note.startswith("test_recompute.py:") for note in plan.notes)
    physical = plan.physical
    assert isinstance(physical, Physical) and plan.choice.recomputed
    again = [s for s in physical.steps if isinstance(s, Compute) and s.node.id >= len(physical.graph.nodes)]
    assert any(s.node.barrier >= 0 for s in again) and any(s.node.barrier < 0 for s in again)


def test_values_and_gradients_are_those_of_one_device(fitted: Any) -> None:
    program, _, args, _ = fitted
    found, wanted = program(*args), jax.jit(step)(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_a_plan_that_recomputes_can_be_taken_again(fitted: Any, tmp_path: Any) -> None:
    _, plan, args, needed = fitted
    plan.save(tmp_path / "plan.json")
    options = sbp.Options(plan=tmp_path / "plan.json", memory_limit=0.65 * needed, cache=False)
    again = sbp.compile(step, PLACE, in_sbp=(sbp.AUTO, [sbp.S(0)], sbp.AUTO), options=options).plan(*args)
    assert again.memory_bytes == plan.memory_bytes and again.choice.recomputed == plan.choice.recomputed
    assert check_plan(json.loads((tmp_path / "plan.json").read_text())).wrong == ()
    assert [str(c) for c in again.collectives] == [str(c) for c in plan.collectives]
