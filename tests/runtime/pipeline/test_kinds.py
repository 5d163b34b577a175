"""Kinds of programs with stages: evaluation, plain model parallelism, split state, and odd dataflow."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import AUTO, B, S
from sbp.hardware.catalogue import hardware_for
from tests.runtime.pipeline.programs import Keys, parts
from tests.runtime.pipeline.running import assert_close

WHOLE, P2 = parts((2, 2), ("stage", "data"))
FOUR, P4 = parts((4, 2), ("stage", "data"))
KEYS = Keys(11)
W = {"a": KEYS.normal(8, 8, scale=0.5), "b": KEYS.normal(8, 8, scale=0.5)}
X, Y = KEYS.normal(8, 8), KEYS.normal(8, 8)
MASK = jnp.asarray(np.arange(8) % 3 > 0)


def model(w: Any, x: Any) -> Any:
    with sbp.on(P2[0]):
        x = jnp.tanh(x @ w["a"])
    with sbp.on(P2[1]):
        return jnp.tanh(x @ w["b"])


def loss(w: Any, x: Any, y: Any) -> Any:
    return jnp.mean((model(w, x) - y) ** 2)


def sgd(w: Any, g: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, g)


def evaluation(w: Any, x: Any, y: Any) -> Any:
    def run(w: Any, x: Any, y: Any) -> Any:
        out = model(w, x)
        return out, jnp.argmax(out, 1), jnp.sum(jnp.abs(out - y) < 0.5)

    return sbp.microbatch(run, 4, batch_args=(1, 2), reduce=("rows", "rows", "sum"))(w, x, y)


def model_parallel(w: Any, x: Any, y: Any) -> Any:
    value, g = jax.value_and_grad(loss)(w, x, y)
    return sgd(w, g), value


def split_state(w: Any, mu: Any, x: Any, y: Any) -> Any:
    value, g = sbp.microbatch(jax.value_and_grad(loss), 2, batch_args=(1, 2))(w, x, y)
    mu = jax.tree.map(lambda m, g: 0.9 * m + g, mu, g)
    return sgd(w, mu), mu, value


def one_stage(w: Any, x: Any, y: Any) -> Any:
    def fn(w: Any, x: Any, y: Any) -> Any:
        with sbp.on(P2[1]):
            return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2)

    value, g = sbp.microbatch(jax.value_and_grad(fn), 2, batch_args=(1, 2))(w, x, y)
    return sgd(w, g), value


def fed_by_nobody(w: Any, x: Any, y: Any) -> Any:
    """A penalty on weights on a stage of its own; a mask that two stages read; a constant result."""

    def fn(w: Any, x: Any, y: Any, mask: Any) -> Any:
        with sbp.on(P4[0]):
            h = jnp.tanh(x @ w["a"]) * mask[:, None]
        with sbp.on(P4[2]):
            penalty = jnp.sum(w["b"] ** 2)
        with sbp.on(P4[1]):
            h = (h @ w["b"]) * mask[:, None]
        with sbp.on(P4[3]):
            noise = jnp.sum(jnp.sin(y)) + 0 * jnp.sum(w["a"])
            return jnp.mean((h - y) ** 2) + 0.1 * penalty + noise

    value, g = sbp.microbatch(jax.value_and_grad(fn), 4, batch_args=(1, 2, 3))(w, x, y, MASK)
    return sgd(w, g), value, x, 1.5


def tied(w: Any, x: Any, y: Any) -> Any:
    """A weight of two stages; the parts of the batch count by their masks."""

    def fn(w: Any, x: Any, y: Any, mask: Any) -> Any:
        with sbp.on(P2[0]):
            x = jnp.tanh(x @ w["a"]) @ w["b"]
        with sbp.on(P2[1]):
            x = jnp.tanh(x) @ w["a"].T
            return jnp.sum(jnp.mean((x - y) ** 2, 1) * mask) / jnp.sum(mask)

    def count(w: Any, x: Any, y: Any, mask: Any) -> Any:
        return jnp.sum(mask)

    run = sbp.microbatch(jax.value_and_grad(fn), 4, batch_args=(1, 2, 3), reduce=count)
    value, g = run(w, x, y, MASK.astype(x.dtype))
    return sgd(w, g), value


def gathered(w: Any, x: Any, y: Any) -> Any:
    """Rows of a table by ids, a branch, a vmapped stage, jit, and an op of a stage before the loop."""

    def row(w: Any, h: Any, y: Any) -> Any:
        with sbp.on(P2[1]):
            return jnp.mean((jnp.tanh(h @ w["b"]) - y) ** 2)

    def fn(w: Any, x: Any, y: Any, ids: Any) -> Any:
        with sbp.on(P2[0]):
            h = jax.lax.cond(jnp.sum(x) > 0, jnp.tanh, jnp.sin, w["a"][ids] + x)
        return jnp.mean(jax.vmap(row, (None, 0, 0))(w, h, y))

    with sbp.on(P2[0]):
        mean = jnp.mean(w["a"])
    run = sbp.microbatch(jax.jit(jax.value_and_grad(fn)), 2, batch_args=(1, 2, 3))
    value, g = run(w, x - mean, y, jnp.argmax(y, 1))
    return sgd(w, g), value, mean


def norms(w: Any, x: Any, y: Any) -> Any:
    """What is done with gradients on the way: norms of each part, a scale by a loss, a max over parts."""

    def fn(w: Any, x: Any, y: Any) -> Any:
        value, g = jax.value_and_grad(loss)(w, x, y)
        size = jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(g)))
        return {"g": jax.tree.map(lambda g: g * value, g), "each": jnp.full((1,), size), "size": size}

    engine = {"g": "mean", "each": "rows", "size": "sum"}
    out = sbp.microbatch(fn, 8, batch_args=(1, 2), reduce=engine)(w, x, y)
    return sgd(w, out["g"]), jnp.max(out["each"]), out["size"]


KINDS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any, Any]] = {
    "evaluation": (evaluation, (W, X, Y), WHOLE, AUTO),
    "forward alone": (model, (W, X), WHOLE, AUTO),
    "model parallel": (model_parallel, (W, X, Y), WHOLE, (AUTO, [S(0)], [S(0)])),
    "state split over data": (
        split_state,
        (W, jax.tree.map(jnp.zeros_like, W), X, Y),
        WHOLE,
        ([B], [S(0)], [S(0)], [S(0)]),
    ),
    "one stage": (one_stage, (W, X, Y), WHOLE, AUTO),
    "a stage that nobody feeds": (fed_by_nobody, (W, X, Y), FOUR, AUTO),
    "a tied weight": (tied, (W, X, Y), WHOLE, (AUTO, [S(0)], [S(0)])),
    "rows of a table": (gathered, (W, X, Y), WHOLE, ({"a": [S(0)], "b": [B]}, [S(0)], [S(0)])),
    "norms of gradients": (norms, (W, X, Y), WHOLE, AUTO),
}


@pytest.mark.some(4)
@pytest.mark.parametrize("name", KINDS)
def test_results_equal_one_device(name: str) -> None:
    fn, args, whole, signatures = KINDS[name]
    program = sbp.compile(fn, whole, in_sbp=signatures, options=sbp.Options(check=True))
    wanted = jax.jit(fn)(*args)
    found = program(*args)
    assert_close(found, wanted, 1e-5)
    assert_close(program(*args), found, 0)


def test_an_evaluation_runs_forward_and_keeps_nothing() -> None:
    program = sbp.compile(evaluation, WHOLE)
    plan = program.plan(W, X, Y)
    assert plan.stages and plan.schedule is not None
    assert (plan.schedule.name, plan.schedule.trains) == ("forward", False)


def test_state_stays_split_and_gradients_are_summed_once() -> None:
    """ZeRO: gradients stay sums of parts until the state wants them; weights are gathered once per step."""
    fn, args, whole, signatures = KINDS["state split over data"]
    plan = sbp.compile(fn, whole, in_sbp=signatures).plan(*args)
    lies = dict(zip(plan.out_paths, plan.out_sbp, strict=True))
    assert lies["result[1]['a']"] == lies["result[1]['b']"] == (S(0),)
    assert plan.stages
    for stage in plan.stages:
        of_weights = [c for c in stage.collectives if c.shape == (8, 8)]
        assert of_weights and {c.count for c in of_weights} == {1}


def test_the_gradient_of_a_tied_weight_is_sent_once() -> None:
    """Each stage adds up its own part, though every part of the batch has a weight of its own."""
    fn, args, whole, signatures = KINDS["a tied weight"]
    plan = sbp.compile(fn, whole, in_sbp=signatures).plan(*args)
    assert plan.stages
    whole_weights = [c for c in plan.sends if c.shape == (8, 8)]
    assert [c.count for c in whole_weights] == [1]
    assert {c.count for c in plan.sends if c.shape == (2, 8)} == {4}


def test_gradients_of_parts_are_reduced_once_per_step() -> None:
    """Without stages: one all-reduce for all parts of the batch, in the plan and in what XLA runs."""

    def step(w: Any, x: Any, y: Any) -> Any:
        def plain(w: Any, x: Any, y: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2)

        return sgd(w, sbp.microbatch(jax.grad(plain), 4, batch_args=(1, 2))(w, x, y))

    slow = replace(hardware_for("cpu"), memory_bytes_per_second=1e9)
    options = sbp.Options(hardware=slow)  # so small a batch is else gathered
    devices = sbp.placement("cpu", shape=(2,))
    program = sbp.compile(step, devices, in_sbp=([B], [S(0)], [S(0)]), options=options)
    plan = program.plan(W, X, Y)
    assert sorted((c.kind, c.count) for c in plan.collectives) == [("all_reduce", 1)] * 2
    text = program.lower(W, X, Y).compile().as_text()
    loops = text.split("ENTRY")[0]
    assert "all-reduce(" in text and "all-reduce-start(" not in loops
    assert not any(" all-reduce(" in part for part in text.split("\n\n") if "region" in part.split("(")[0])
    assert_close(program(W, X, Y), step(W, X, Y), 1e-5)


def test_donated_arguments_are_gone_and_results_are_not() -> None:
    def step(w: Any, x: Any, y: Any) -> Any:
        value, g = sbp.microbatch(jax.value_and_grad(loss), 2, batch_args=(1, 2))(w, x, y)
        return sgd(w, g), value, x

    program = sbp.compile(step, WHOLE, donate_argnums=(0, 1))
    wanted = step(W, X, Y)
    args = program.place(jax.tree.map(jnp.copy, W), X.copy(), Y)
    found = program(*args)
    assert all(a.is_deleted() for a in jax.tree.leaves(args[:2]))
    assert not args[2].is_deleted()
    assert_close(found, wanted, 1e-5)


def test_settings_of_jax_are_those_of_the_caller() -> None:
    program = sbp.compile(evaluation, WHOLE)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (W, X, Y))
        assert_close(program(*wide), evaluation(*wide), 1e-12)
    assert_close(program(W, X, Y), evaluation(W, X, Y), 1e-5)
