"""How far a run is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp import S
from sbp.runtime.training import progress
from sbp.runtime.training.throughput import BatchSize, Rate, StepWork, step_work
from tests.runtime.training.small import fitted
from tests.terminals import terminal


def test_off_a_terminal_there_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted(steps=6, progress=True)
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("step 1/6: loss ") and last.startswith("step 6/6: loss ")
    assert "steps/s, " in last and "examples/s, 0 s left" in last
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    fitted(steps=6, progress=True)
    assert len(capsys.readouterr().err.splitlines()) == 6


def test_lines_come_less_often(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    shown = progress.Progress(10**9, progress.Lines(10**9))
    shown.begin(0)
    for second in range(3600):
        clock[0] = float(second)
        shown.take({"step": second + 1, "loss": 1.0})
    assert 10 < len(capsys.readouterr().err.splitlines()) < 25


def test_nobody_is_shown_what_nobody_wants(capsys: pytest.CaptureFixture[str]) -> None:
    fitted(steps=2, progress=False)
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "BAR_SECONDS", 0.0)
    with terminal(monkeypatch, "stderr", 140) as seen:
        fitted(steps=5, progress=True)
    shown = b"".join(seen).decode()
    assert "step 5" in shown and "loss" in shown and "steps/s" in shown


def test_what_is_in_a_batch() -> None:
    tokens = np.zeros((4, 16), np.int32)
    assert BatchSize.of(tokens) == BatchSize(4, 64)
    assert BatchSize.of({"x": tokens, "key": jax.random.key(0)}) == BatchSize(4, 64)
    assert BatchSize.of((tokens, np.zeros(4, np.int32))) == BatchSize(4, 0)
    assert BatchSize.of(3.0) == BatchSize(0, 0)


def test_a_rate_is_of_the_last_seconds() -> None:
    rate = Rate()
    for i in range(100):
        rate.add(i, now=10.0 * i if i < 50 else 500 + (i - 50))
    assert rate.steps_per_second == pytest.approx(1.0, rel=0.01)
    rate.clear()
    assert rate.steps_per_second == 0.0


def trained(kind: str, **how: Any) -> Any:
    """A train step of two matrices in a loop of three, planned for some devices."""
    optimizer = optax.sgd(0.1)

    def loss(params: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return jnp.tanh(h @ w), None

        return jnp.mean(jax.lax.scan(layer, x @ params["first"], params["rest"])[0] ** 2)

    def step(params: Any, state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = {
        "first": jax.ShapeDtypeStruct((32, 64), jnp.float32),
        "rest": jax.ShapeDtypeStruct((3, 64, 64), jnp.float32),
    }
    state = jax.eval_shape(optimizer.init, params)
    program = sbp.compile(step, sbp.placement(kind, **how), in_sbp=(sbp.AUTO, sbp.AUTO, [S(0)]))
    return program.plan(params, state, jax.ShapeDtypeStruct((128, 32), jnp.float32))


def test_the_products_of_a_step_are_counted() -> None:
    """Forward once, backward twice, but for what the batch would be given; on however many devices."""
    forward = 2 * 128 * 32 * 64, 3 * 2 * 128 * 64 * 64
    flops = 2 * forward[0] + 3 * forward[1]
    for kind, devices in (("cpu", 1), ("cpu", 4), ("h100", 8)):
        work = step_work(trained(kind, shape=(devices,)))
        assert work.flops == flops, (kind, devices)
        if kind == "cpu":
            assert work.utilisation(10.0) is None
        else:
            share = work.utilisation(10.0)
            assert share == pytest.approx(10 * flops / (devices * work.flops_per_second / devices))
            assert 0 < work.flops_per_second / devices < 1e15


def test_the_share_is_shown() -> None:
    shown = progress.Progress(10, None, BatchSize(4, 64), StepWork(1e12, 1e13))
    for i in range(3):
        shown._rate.add(i, now=0.25 * i)
    assert shown.text({"step": 3, "loss": 2.0}) == "loss 2, 4 steps/s, 256 tokens/s, MFU 40.0 %, 2 s left"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (61, "1:01 min"), (7384, "2:03 h"), (4e5, "111:06 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert progress.duration(seconds) == text
