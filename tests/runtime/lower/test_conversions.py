"""Conversions beside collectives on CPUs: plans say what compiled programs send, and results are equal."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import sbp
from sbp.runtime.hlo.meter import read_compiled
from tests.runtime.lower.conversions import CASES


@pytest.mark.some(4)
@pytest.mark.parametrize("name", CASES)
def test_the_plan_says_what_is_sent(name: str) -> None:
    case = CASES[name]
    x = (np.random.default_rng(0).normal(size=(64, 512)) * 50).astype(case.dtype)
    asked = [[nd] for nd in case.asked]
    out_sbp = asked if len(asked) > 1 else asked[0]
    program = sbp.compile(case.fn, sbp.placement("cpu", shape=(8,)), in_sbp=[case.given], out_sbp=out_sbp)
    plan, compiled = program.plan(x), program.lower(x).compile()
    assert plan.wire_bytes > 0
    assert read_compiled(compiled).wire_bytes == pytest.approx(plan.wire_bytes, rel=0.01)
    assert {np.dtype(c.dtype).itemsize for c in plan.collectives} == {case.itemsize}
    for got, want in zip(jax.tree.leaves(program(x)), jax.tree.leaves(jax.jit(case.fn)(x)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=1e-6)
