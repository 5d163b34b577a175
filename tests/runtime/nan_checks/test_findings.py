"""Under `jax_debug_nans` and `jax_debug_infs` an error names the user's line, whatever runs there."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import B, P, S
from sbp.errors import NonFiniteError
from tests.errors.messages import check_message

LINE = sbp.placement("cpu", shape=(8,))
X, W = np.ones((16, 16), np.float32), np.full((16, 16), 0.1, np.float32)
LEGAL = "finite numbers, as jax_debug_nans and jax_debug_infs demand"
FIX = "jax.debug.print beside that line; jax.numpy.where before the op, not behind it"


@pytest.fixture(autouse=True)
def demanded() -> Iterator[None]:
    with jax.debug_nans(True):
        yield


def bad(x: jax.Array) -> jax.Array:
    return jnp.log(x - 1000)


def model(w: jax.Array, x: jax.Array) -> jax.Array:
    with jax.named_scope("first"):
        x = jnp.tanh(x @ w)
    with jax.named_scope("second"):
        return bad(x @ w).mean()


def step(w: jax.Array, x: jax.Array) -> Any:
    value, grad = jax.value_and_grad(jax.checkpoint(model))(w, x)
    return w - grad, value


def partial_sums(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sqrt(sbp.annotate(x @ w, [P]) - 10)


def padded(x: jax.Array) -> Any:
    """The padding of a split of 10 over 8 is 0 / 0, which nobody sees."""
    return (x / x.sum(1, keepdims=True)).sum(), bad(x[3:]).sum()


def looped(w: jax.Array, x: jax.Array) -> jax.Array:
    """The last trip makes it, inside a branch."""

    def one(h: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        with jax.named_scope("inner"):
            return jax.lax.cond(i > 2, bad, jnp.tanh, h @ w), None

    return jax.lax.scan(one, x, jnp.arange(4))[0]


def until(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.sqrt(c[0] - 1), c[1] + 1), (x, 0))[0]


def micro(w: jax.Array, x: jax.Array) -> Any:
    return sbp.microbatch(jax.value_and_grad(model), 2, batch_args=1)(w, x)


def staged(w: jax.Array, x: jax.Array) -> jax.Array:
    first, second = LINE.split(0)[:2]
    with sbp.on(first):
        x = x @ w
    with sbp.on(second):
        return bad(x).sum()


def run(fn: Callable[..., Any], *args: Any, sbp_of: Any = sbp.AUTO, **how: Any) -> Callable[[], Any]:
    return lambda: sbp.compile(fn, LINE, in_sbp=sbp_of, **how)(*args)


TEN = np.ones((10, 4), np.float32)
MESSAGES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "a model": (
        run(model, W, X, sbp_of=([B], [S(0)])),
        "result",
        "log at {line} in second: log:float32[16, 16] [S(0)]",
    ),
    "its training": (run(step, W, X), "result[1]", "log at {line} in second: log:float32[16, 16] [B]"),
    "a donated argument": (
        run(step, jnp.asarray(W), X, donate_argnums=0),
        "result[1]",
        "log at {line} in second: log:float32[16, 16] [B]",
    ),
    "partial sums": (
        run(partial_sums, W, X, sbp_of=([S(0)], [S(1)])),
        "result",
        "sqrt at {line}: sqrt:float32[16, 16] [S(0)]",
    ),
    "padding is not looked at": (
        run(padded, TEN, sbp_of=([S(0)],)),
        "result[1]",
        "log at {line}: log:float32[7, 4] [B]",
    ),
    "a branch in a loop": (
        run(looped, W, X, sbp_of=([B], [S(0)])),
        "result",
        "log at {line} in inner: log:float32[16, 16] [S(0)]",
    ),
    "a while loop": (
        run(until, X, sbp_of=([S(0)],)),
        "result",
        "sqrt at {line}: sqrt:float32[16, 16] [S(0)]",
    ),
    "micro-batches": (run(micro, W, X), "result[0]", "log at {line} in second: log:float32[8, 16] [B]"),
    "a program with stages": (run(staged, W, X), "result", "log at {line}: log:float32[16, 16] [B]"),
}


@pytest.mark.some(5)
@pytest.mark.parametrize("name", MESSAGES)
def test_message(name: str) -> None:
    call, where, first = MESSAGES[name]
    on = "on cpu(x=1, ranks [1])" if name == "a program with stages" else "on all devices of cpu(x=8)"
    why = f"the first op whose result has one is {first}; its operands are finite; {on}"
    check_message(call, NonFiniteError, where, "NaN", LEGAL, why, FIX)


def test_what_came_in_is_named() -> None:
    call = run(lambda w, x: x @ w, W, np.full_like(X, np.nan), sbp_of=([B], [S(0)]))
    check_message(
        call,
        NonFiniteError,
        "result",
        "NaN",
        LEGAL,
        "it came in with x",
        "look at the ops that made them, in the step before",
    )


def test_infinities_are_looked_for_if_asked() -> None:
    call = run(lambda x: jnp.exp(x * 100).sum(), X, sbp_of=([S(0)],))
    assert np.isinf(call())
    found = r"is exp at test_findings.py:\d+: exp"
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match=found):
        call()


def test_what_is_finite_passes_and_donation_is_kept() -> None:
    w = jnp.asarray(W)
    program = sbp.compile(lambda w: (w * 2, jnp.log(jnp.where(w > 1, w, 1))), LINE, donate_argnums=0)
    doubled, _ = program(w)
    np.testing.assert_array_equal(doubled, 2 * W)
    assert w.is_deleted()


OPTION = sbp.Options(debug_nans=True)
DEMANDS = "no NaN, as Options(debug_nans=True) demands"


def said(call: Callable[[], Any]) -> Any:
    """What is wrong, by the option alone."""
    with jax.debug_nans(False), pytest.raises(NonFiniteError) as caught:
        call()
    (problem,) = caught.value.problems
    assert problem.legal == DEMANDS
    return problem


def test_the_device_that_had_it_first_is_named() -> None:
    x = np.ones((16, 16), np.float32)
    x[5] = -1
    problem = said(run(lambda x: jnp.sqrt(x).sum(), x, sbp_of=([S(0)],), options=OPTION))
    assert problem.why.endswith(
        "sqrt:float32[16, 16] [S(0)]; its operands are finite; on device 2 of cpu(x=8)"
    )
    one = sbp.placement("cpu", shape=(1,))
    problem = said(lambda: sbp.compile(jnp.sqrt, one, options=OPTION)(x))
    assert problem.why.endswith("its operands are finite; on cpu(x=1)")


def test_what_only_the_sum_over_devices_has_is_found() -> None:
    """Infinity minus infinity: each device's summand is no NaN."""
    x = np.zeros((16, 16), np.float32)
    x[0, 0], x[0, 15] = np.inf, -np.inf
    w = np.ones((16, 4), np.float32)
    problem = said(run(lambda x, w: x @ w, x, w, sbp_of=([S(1)], [S(0)]), options=OPTION))
    assert problem.got == "NaN" and "the shards that were added up have infinity" in problem.why
    assert "dot_general at test_findings.py" in problem.why


def pipelined(x: Any) -> Any:
    first, second = LINE.split(0)[:2]

    def loss(w: Any, x: Any) -> Any:
        with sbp.on(first):
            x = jnp.tanh(x @ w)
        with sbp.on(second):
            return jnp.log(x).mean()

    w = jnp.full((16, 16), 0.1)
    step = sbp.microbatch(jax.value_and_grad(loss), 2, batch_args=1)
    return sbp.compile(lambda w, x: step(w, x), LINE, options=OPTION)(w, x)


@pytest.mark.full
def test_stages_with_micro_batches() -> None:
    with jax.debug_nans(False):
        value, _ = pipelined(X)
    assert np.isfinite(value)
    problem = said(lambda: pipelined(-X))
    assert problem.where == "result[0]"
    assert "is log at test_findings.py" in problem.why
    assert problem.why.endswith("its operands are finite; on cpu(x=1, ranks [1])")
    problem = said(lambda: pipelined(X * np.nan))
    assert problem.why == "it came in with x, which stage 0 reads"
    assert problem.fix == "look at the ops that made them, in the step before"


HALVES = sbp.placement("cpu", shape=(2, 2), axes=("stage", "data"))


def descended(params: Any, state: Any, batch: Any) -> Any:
    """A step of two stages with momentum; the first weight is used by both."""
    first, second = HALVES.split("stage")

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        with sbp.on(first):
            x = jnp.tanh(x @ params["layers"][0]["w"])
        with sbp.on(second):
            x = jnp.tanh(x @ params["layers"][1]["w"]) @ params["layers"][0]["w"].T
            return jnp.mean((x - y) ** 2) * params["scale"]

    grads = sbp.microbatch(jax.value_and_grad(loss), 2, batch_args=1)
    value, grads = grads(params, batch)
    state = jax.tree.map(lambda m, g: 0.9 * m + g, state, grads)
    return jax.tree.map(lambda w, m: w - 0.1 * m, params, state), state, value


CAME = {
    "params['layers'][0]['w'], which stage 0 reads": ("params", "result[0]['layers'][0]['w']"),
    "params['layers'][1]['w'], which stage 1 reads": ("params", "result[0]['layers'][0]['w']"),
    "params['scale'], which stage 1 reads": ("params", "result[0]['layers'][0]['w']"),
    "state['layers'][1]['w'], which stage 1 reads": ("state", "result[0]['layers'][1]['w']"),
    "batch[0], which stage 0 reads": ("batch", "result[0]['layers'][0]['w']"),
    "batch[1], which stage 1 reads": ("batch", "result[0]['layers'][0]['w']"),
}


@pytest.mark.full
@pytest.mark.parametrize("donate", [(), (0, 1)])
def test_what_came_into_a_pipeline_is_named_with_its_stage(donate: tuple[int, ...]) -> None:
    params = {"layers": [{"w": W}, {"w": W}], "scale": np.float32(1)}
    args = {"params": params, "state": jax.tree.map(np.zeros_like, params), "batch": (X, X)}
    program = sbp.compile(descended, HALVES, donate_argnums=donate, options=OPTION)
    with jax.debug_nans(False):
        assert np.isfinite(program(*args.values())[2])
    for words, (name, where) in CAME.items():
        path = words.partition(",")[0]

        def spoiled(at: Any, x: Any, name: str = name, path: str = path) -> Any:
            y = np.array(x)
            if f"{name}{jax.tree_util.keystr(at)}" == path:
                y[(-1,) * y.ndim] = np.nan  # of the last micro-batch
            return y

        bad = {**args, name: jax.tree_util.tree_map_with_path(spoiled, args[name])}
        problem = said(lambda bad=bad: program(*bad.values()))
        assert (problem.where, problem.got, problem.why) == (where, "NaN", f"it came in with {words}")
        assert problem.fix == "look at the ops that made them, in the step before"


def test_what_came_into_stages_without_micro_batches_is_named() -> None:
    def fn(w: Any, x: Any) -> Any:
        first, second = HALVES.split("stage")
        with sbp.on(first):
            x = jnp.tanh(x)
        with sbp.on(second):
            return (x @ w).sum()

    spoiled = np.where(np.eye(16, dtype=bool), np.float32(np.nan), W)
    problem = said(lambda: sbp.compile(fn, HALVES, options=OPTION)(spoiled, X))
    assert problem.why.startswith("it came in with w, which ") and problem.why.endswith(" reads")


def test_arguments_are_named_before_ops() -> None:
    """A NaN that came in is older than one that an op of an earlier stage has made."""

    def fn(w: Any, x: Any) -> Any:
        first, second = HALVES.split("stage")
        with sbp.on(first):
            x = jnp.log(x - 1000)
        with sbp.on(second):
            return (x @ w).sum()

    problem = said(lambda: sbp.compile(fn, HALVES, options=OPTION)(np.full_like(W, np.nan), X))
    assert problem.why.startswith("it came in with w, which ")


def test_an_infinity_is_no_nan() -> None:
    with jax.debug_nans(False):
        assert np.isinf(run(lambda x: jnp.exp(x * 100).sum(), X, options=OPTION)())


def test_what_is_masked_is_no_error() -> None:
    assert run(lambda x: jnp.where(x > 2, bad(x), x).sum(), X, sbp_of=([S(0)],))() == 256
