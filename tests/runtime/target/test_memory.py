"""The plan's memory against that of XLA:GPU, compiled for eight H100s that are not here."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import sbp
from models import gpt
from sbp import AUTO, B, S
from tests.runtime.target.plugin import needs_plugin

ON = sbp.placement("h100", shape=(8,))
pytestmark = needs_plugin

WITHIN = 0.1
WIDTH, ROWS, LAYERS = 1024, 4096, 8


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def deep(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.square(x).mean()


def residual(ws: Any, x: Any) -> Any:
    for up, down in zip(ws[::2], ws[1::2], strict=True):
        x = x + jax.nn.gelu(x @ up) @ down
    return jnp.square(x).mean()


def standardized(ws: Any, x: Any) -> Any:
    """A norm over the batch: a collective that the next layer waits for."""
    for w in ws:
        x = x @ w
        x = jnp.tanh(x * lax.rsqrt(jnp.square(x).mean(0)))
    return jnp.square(x).mean()


def scanned(ws: Any, x: Any, *, keep: bool) -> Any:
    def block(x: Any, w: Any) -> Any:
        return x + jax.nn.softmax(jax.nn.silu(x @ w["up"]), -1) @ w["down"], None

    x, _ = lax.scan(block if keep else jax.checkpoint(block), x, ws)
    return jnp.square(x).mean()


def convolved(ws: Any, x: Any) -> Any:
    for k, w in enumerate(ws):
        dims = ("NHWC", "HWIO", "NHWC")
        x = jax.nn.relu(lax.conv_general_dilated(x, w, (1 + k % 2,) * 2, "SAME", dimension_numbers=dims))
    return jnp.square(x).mean()


def pooled(ws: Any, x: Any) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")
    for w in ws:
        x = jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    return jnp.square(x).mean()


def pooled_early(ws: Any, x: Any) -> Any:
    """Collectives wait between a pool and its gradient."""
    dims = ("NHWC", "HWIO", "NHWC")
    for k, w in enumerate(ws):
        x = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
        x = jax.nn.relu(x * lax.rsqrt(jnp.square(x).mean((0, 1, 2)) + 1))
        if k == 0:
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    return jnp.square(x).mean()


def rectified(ws: Any, x: Any) -> Any:
    """Products that compute of an operand what is element-wise."""
    for w, b in zip(ws[::2], ws[1::2], strict=True):
        x = jax.nn.relu(x @ w + b)
    return jnp.square(x).mean()


def layered(ws: Any, x: Any, *, wide: bool) -> Any:
    """Plain layers, with biases or without."""
    for w in ws:
        x = jax.nn.relu(x @ w[0] + w[1]) if wide else jax.nn.relu(x @ w)
    return jnp.square(x).mean()


def looked_up(ws: Any, ids: Any) -> Any:
    """Rows of a table that is split by its rows, and a product."""
    rows = ws[0][ids].reshape(ids.shape[0], -1)
    return jnp.square(jnp.tanh(rows @ ws[1])).mean()


def chosen(w: Any, x: Any, *, dtype: Any = None) -> Any:
    """The logarithms of a softmax over whole rows, of which one element each counts."""
    logits = (x["rows"] @ w.T).astype(dtype or w.dtype)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), x["at"][:, None], -1).mean()


def one_hot(w: Any, x: Any) -> Any:
    """The same, chosen by comparison."""
    found = jax.nn.log_softmax(x["rows"] @ w.T)
    at = x["at"][:, None] == lax.broadcasted_iota(jnp.int32, found.shape, 1)
    return -jnp.where(at, found, 0).sum(-1).mean()


def descent(loss: Callable[..., Any], ws: Any, x: Any) -> Any:
    """A step of gradient descent with momentum, as `(weights, momenta), x -> (weights, momenta), loss`."""
    value, grads = jax.value_and_grad(loss)(ws[0], x)
    momenta = jax.tree.map(lambda m, g: 0.9 * m + g, ws[1], grads)
    return (jax.tree.map(lambda w, m: w - 0.1 * m, ws[0], momenta), momenta), value


def adaptive(loss: Callable[..., Any], state: Any, x: Any) -> Any:
    """A step with two moments, which are updated at once with the weights."""
    weights, first, second = state
    value, grads = jax.value_and_grad(loss)(weights, x)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, grads)
    weights = jax.tree.map(lambda w, m, v: w - 0.1 * m / (jnp.sqrt(v) + 1e-8), weights, first, second)
    return (weights, first, second), value


@dataclass(frozen=True)
class Trained:
    """A loss, the shapes of its weights and of what it is given, and how these lie."""

    loss: Callable[..., Any]
    weights: Any
    x: Any
    lying: Any


SQUARE = [floats(WIDTH, WIDTH)] * LAYERS
PAIRS = [floats(WIDTH, 4 * WIDTH), floats(4 * WIDTH, WIDTH)] * 4
STACKED = {"up": floats(LAYERS, WIDTH, 4 * WIDTH), "down": floats(LAYERS, 4 * WIDTH, WIDTH)}
BATCH = floats(8 * ROWS, WIDTH)

PROGRAMS = {
    "data": Trained(deep, SQUARE, BATCH, ([B], [S(0)])),
    "fsdp": Trained(deep, SQUARE, BATCH, ([S(0)], [S(0)])),
    "tensor": Trained(residual, PAIRS, floats(ROWS, WIDTH), (([[S(1)], [S(0)]] * 4,) * 2, [B])),
    "rectified": Trained(
        rectified,
        [floats(WIDTH, 8 * WIDTH), floats(8 * WIDTH), floats(8 * WIDTH, WIDTH), floats(WIDTH)],
        BATCH,
        ([B], [S(0)]),
    ),
    "norm over the batch": Trained(standardized, SQUARE, BATCH, ([B], [S(0)])),
    "loop": Trained(partial(scanned, keep=True), STACKED, BATCH, ([B], [S(0)])),
    "loop with checkpoints": Trained(partial(scanned, keep=False), STACKED, BATCH, ([B], [S(0)])),
    # Updates of weights: many that are gathered, and few.
    "small and many": Trained(deep, [floats(2048, 2048)] * 12, floats(2048, 2048), ([B], [S(0)])),
    "large and few": Trained(deep, [floats(4096, 4096)] * 3, floats(8192, 4096), ([B], [S(0)])),
    "pools": Trained(pooled, [floats(3, 3, 64, 64)] * 2, floats(64, 112, 112, 64), ([B], [S(0)])),
    "a pool before norms": Trained(
        pooled_early, [floats(3, 3, 64, 64)] * 4, floats(64, 112, 112, 64), ([B], [S(0)])
    ),
    "convolutions": Trained(convolved, [floats(3, 3, 64, 64)] * 4, floats(64, 112, 112, 64), ([B], [S(0)])),
}


def ratio(program: Any, *args: Any) -> float:
    """The plan's memory, as a share of XLA's."""
    stats = program.lower(*args).compile().memory_analysis()
    xla = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )
    planned: float = program.plan(*args).memory_bytes
    return planned / xla


@pytest.mark.full
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_memory_of_a_train_step(name: str) -> None:
    t = PROGRAMS[name]
    program = sbp.compile(partial(descent, t.loss), ON, in_sbp=t.lying, donate_argnums=0)
    assert ratio(program, (t.weights, t.weights), t.x) == pytest.approx(1, abs=WITHIN)


@pytest.mark.full
@pytest.mark.parametrize(
    ("loss", "vocabulary"),
    [
        *itertools.product([chosen, one_hot], [512, 2048, 8192]),
        (partial(chosen, dtype=jnp.float32), 2048),
        (chosen, 50304),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_memory_of_a_softmax_over_rows(loss: Any, dtype: Any, vocabulary: int) -> None:
    """Rows of up to 32,768 are one kernel with their softmax, whose result is written; the products of small
    ones are written in parts."""
    w = jax.ShapeDtypeStruct((vocabulary, 256), dtype)
    x = {"rows": jax.ShapeDtypeStruct((8192, 256), dtype), "at": jax.ShapeDtypeStruct((8192,), jnp.int32)}
    program = sbp.compile(partial(descent, loss), ON, in_sbp=([B], [S(0)]), donate_argnums=0)
    assert ratio(program, (w, w), x) == pytest.approx(1, abs=0.15)


LAYERED = [(4, 1024, 4096), (24, 1024, 8192), (12, 2048, 32_768), (8, 4096, 16_384), (12, 1024, 32_768)]
"""Layers, their width, and rows of the batch: from few bytes, all of which are sent as one, to large ones."""


@pytest.mark.full
@pytest.mark.parametrize(("layers", "width", "rows"), LAYERED)
def test_the_memory_of_plain_layers(layers: int, width: int, rows: int) -> None:
    ws = [floats(width, width)] * layers
    program = sbp.compile(
        partial(descent, partial(layered, wide=False)), ON, in_sbp=([B], [S(0)]), donate_argnums=0
    )
    assert ratio(program, (ws, ws), floats(rows, width)) == pytest.approx(1, abs=WITHIN)


@pytest.mark.slow
@pytest.mark.parametrize("lying", [B, S(0)])
@pytest.mark.parametrize(("layers", "width", "rows"), [(12, 1024, 32_768), (12, 2048, 2048)])
@pytest.mark.parametrize("step", [descent, adaptive])
def test_the_memory_of_layers_with_biases(step: Any, layers: int, width: int, rows: int, lying: Any) -> None:
    ws = [(floats(width, width), floats(width))] * layers
    program = sbp.compile(
        partial(step, partial(layered, wide=True)), ON, in_sbp=([lying], [S(0)]), donate_argnums=0
    )
    state = (ws,) * (2 if step is descent else 3)
    assert ratio(program, state, floats(rows, width)) == pytest.approx(1, abs=WITHIN)


@pytest.mark.full
def test_the_memory_of_a_transformer() -> None:
    config = gpt.Config(layers=1, width=512, heads=8, vocabulary=8192, sequence=512, dropout=0.0)
    optimizer = optax.sgd(1e-3, momentum=0.9)
    params = jax.eval_shape(partial(gpt.init, config=config), jax.random.key(0))
    args = params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((64, 513), jnp.int32)
    step = gpt.make_train_step(config, optimizer)
    key = jax.eval_shape(lambda: jax.random.key(1))
    program = sbp.compile(step, ON, in_sbp=([B], AUTO, [S(0)], [B]), donate_argnums=(0, 1))
    assert ratio(program, *args, key) == pytest.approx(1, abs=WITHIN)


@pytest.mark.full
def test_the_memory_of_rows_that_travel() -> None:
    def step(ws: Any, ids: Any) -> Any:
        loss, grads = jax.value_and_grad(looked_up)(ws, ids)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), loss

    program = sbp.compile(step, ON, in_sbp=([[S(0)], [B]], [S(0)]), donate_argnums=0)
    ids = jax.ShapeDtypeStruct((65_536, 16), jnp.int32)
    assert ratio(program, [floats(1 << 20, 128), floats(16 * 128, 64)], ids) == pytest.approx(1, abs=WITHIN)


@pytest.mark.full
def test_what_is_not_donated_is_there_twice() -> None:
    t = PROGRAMS["data"]
    kept, given = (
        sbp.compile(partial(descent, t.loss), ON, in_sbp=t.lying, donate_argnums=donate)
        for donate in ((), (0,))
    )
    args = (t.weights, t.weights), t.x
    state = 2 * 4 * WIDTH**2 * LAYERS
    assert kept.plan(*args).memory_bytes - given.plan(*args).memory_bytes == pytest.approx(state, rel=WITHIN)
    assert ratio(kept, *args) == pytest.approx(1, abs=WITHIN)


@pytest.mark.full
def test_a_stack_that_a_scan_adds_to_is_there_once() -> None:
    """Slices of it are read and written in place; it is not copied, nor is there another one beside it."""

    def added(total: Any, x: Any, ws: Any) -> Any:
        def trip(x: Any, at: Any) -> Any:
            before, w = at
            x = jnp.tanh(x @ w)
            return x, before + x.T @ x

        return lax.scan(trip, x, (total, ws), reverse=True)[::-1]

    stack = floats(LAYERS, WIDTH, WIDTH)
    program = sbp.compile(added, sbp.placement("h100", shape=(1,)), donate_argnums=0)
    args = stack, floats(WIDTH, WIDTH), stack
    memory = program.report(*args).memory
    assert memory is not None and memory.temporary < 0.5 * 4 * LAYERS * WIDTH**2
    assert ratio(program, *args) == pytest.approx(1, abs=WITHIN)
