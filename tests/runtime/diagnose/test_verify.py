"""`verify`: silent on right programs; of wrong ones it names the first op that differs."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp import B, S
from sbp.errors import MismatchError
from sbp.passes.program.graph import Const
from sbp.passes.program.trace import trace
from sbp.rules.registry import REGISTRY
from sbp.runtime.compile import traced_call
from sbp.runtime.diagnose.verify import difference, limit

GRID = sbp.placement("cpu", shape=(2, 4))
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(16, 12)).astype(np.float32)
SPLIT = ([S(0), S(1)], [B, S(0)])


def mlp(x: Any, w: Any) -> Any:
    hidden = x @ w
    return jnp.tanh(hidden).sum(0), hidden.max()


def break_tanh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives `tanh` a body that is wrong by one part in a hundred."""
    wrong = replace(REGISTRY["tanh"], body=lambda ctx, x: [jnp.tanh(x) * 1.01])
    monkeypatch.setitem(REGISTRY, "tanh", wrong)


def test_right_programs_pass_with_keys_constants_and_donated_state() -> None:
    def step(state: Any, key: Any, x: Any) -> Any:
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return {"w": state["w"] + 1, "n": state["n"] + 1}, jnp.where(keep, x, 0) @ state["w"], key, 1.5

    program = sbp.compile(step, GRID, in_sbp=({"w": [B, S(1)], "n": None}, None, [S(0), B]), donate_argnums=0)
    state = {"w": jax.device_put(jnp.asarray(W)), "n": 0}
    report = sbp.verify(program, state, jax.random.key(3), X)
    assert report.outputs == 5
    assert report.largest < 1e-5
    assert "5 results equal one device's" in str(report)
    # What was verified can still be used: the arguments were copied.
    assert not state["w"].is_deleted()
    program(state, jax.random.key(3), X)


def test_the_first_wrong_op_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    break_tanh(monkeypatch)
    with pytest.raises(MismatchError) as caught:
        sbp.verify(sbp.compile(mlp, GRID, in_sbp=SPLIT), X, W)
    line = mlp.__code__.co_firstlineno + 2
    where, got, legal, why, fix = str(caught.value).splitlines()
    assert where == f"result[0] differs; the first op that differs is tanh at test_verify.py:{line}"
    assert got.startswith("  got    a relative difference of ") and "in tanh:float32[8, 12]" in got
    assert legal == "  legal  the same numbers as on one device, up to rounding"
    assert why.startswith("  why    it ran as [") and why.endswith(" on cpu(data=2 x model=4)")
    assert fix.startswith("  try    if the op's rule is yours, check its rows")


def test_differences_that_add_up_are_told_from_a_wrong_op(monkeypatch: pytest.MonkeyPatch) -> None:
    break_tanh(monkeypatch)
    monkeypatch.setattr("sbp.runtime.diagnose.verify._chunks", lambda graph: iter(()))
    with pytest.raises(MismatchError) as caught:
        sbp.verify(sbp.compile(mlp, GRID, in_sbp=SPLIT), X, W)
    where, got, _, why, fix = str(caught.value).splitlines()
    assert where == "result[0]" and got.startswith("  got    a relative difference of ")
    assert why == "  why    no single op differs beyond rounding: the differences add up"
    assert fix == "  try    compare under jax_enable_x64, which separates rounding from bugs"


def test_of_a_program_with_stages_the_result_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    break_tanh(monkeypatch)
    first, second = GRID.split(0)

    def staged(x: Any, w: Any) -> Any:
        with sbp.on(first):
            hidden = x @ w
        with sbp.on(second):
            return jnp.tanh(hidden).sum(0)

    with pytest.raises(MismatchError) as caught:
        sbp.verify(sbp.compile(staged, GRID), X, W)
    where, _, _, why, fix = str(caught.value).splitlines()
    assert where == "result"
    assert why.startswith("  why    the program runs on ")
    assert why.endswith("; ops are named only in programs of one placement")
    assert fix == "  try    verify the function without sbp.on, on one of them"


def test_a_wrong_loop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    break_tanh(monkeypatch)

    def loop(x: Any) -> Any:
        return lax.scan(lambda c, row: (jnp.tanh(c + row), None), jnp.zeros(16), x)[0] * 2

    with pytest.raises(MismatchError, match=r"the first op that differs is scan at test_verify\.py:\d+"):
        sbp.verify(sbp.compile(loop, GRID), X)


def test_an_error_of_the_tracer_is_seen_and_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is the function: what reads the function wrongly does not also make the reference."""

    def forgets_the_last_sum(*args: Any, **kwargs: Any) -> Any:
        traced = trace(*args, **kwargs)
        last = next(n for n in reversed(traced.graph.nodes) if n.op == "add")
        outs = tuple(last.inputs[0] if x == last.outputs[0] else x for x in traced.graph.outputs)
        return replace(traced, graph=replace(traced.graph, outputs=outs))

    def step(x: Any, w: Any) -> Any:
        return (x @ w).sum(), x + w[:, :8].T

    monkeypatch.setattr(traced_call, "trace", forgets_the_last_sum)
    with pytest.raises(MismatchError) as caught:
        sbp.verify(sbp.compile(step, GRID, in_sbp=SPLIT), X, W)
    (problem,) = caught.value.problems
    assert problem.where == "result[1] differs, and the trace differs"
    assert problem.why.startswith("the graph that was read from the function computes something else")
    assert "bug in the compiler" in problem.fix


def test_results_that_are_constants_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_constant(*args: Any, **kwargs: Any) -> Any:
        traced = trace(*args, **kwargs)
        outs = tuple(replace(x, value=2.5) if isinstance(x, Const) else x for x in traced.graph.outputs)
        return replace(traced, graph=replace(traced.graph, outputs=outs))

    monkeypatch.setattr(traced_call, "trace", other_constant)
    with pytest.raises(MismatchError, match=r"result\[1\] differs, and the trace differs"):
        sbp.verify(sbp.compile(lambda x: (x + 1, 1.5), GRID), X)


def test_static_and_keyword_arguments_reach_the_reference() -> None:
    def power(n: int, x: Any, *, scale: Any) -> Any:
        assert isinstance(n, int)
        return x**n * scale

    program = sbp.compile(power, GRID, static_argnums=0)
    assert sbp.verify(program, 3, X, scale=2.0).outputs == 1


def test_what_a_difference_is() -> None:
    one = np.array([1.0, -4.0, np.nan, np.inf])
    assert difference(one, one) == 0.0
    assert difference(one, np.array([1.0, -4.0, np.nan, 3.0])) == float("inf")
    assert difference(np.array([1.0, 4.0]), np.array([1.0, 4.4])) == pytest.approx(0.4 / 4.4)
    assert difference(np.array([3, 4]), np.array([3, 5])) == 1.0
    assert difference(np.zeros((0, 3)), np.zeros((0, 3))) == 0.0
    assert difference(jax.random.key(0), jax.random.key(1)) == 1.0
    assert limit(np.dtype(np.int32)) == limit(jax.random.key(0).dtype) == 0.0
    assert 0 < limit(np.dtype(np.float64)) < limit(np.dtype(np.float32)) < limit(jnp.dtype(jnp.bfloat16))
