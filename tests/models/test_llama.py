"""The Llama on one device against loops in NumPy, and on several against one; its table; its options."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from models import llama, train
from sbp import B, S
from sbp.passes.physical.program import Compute
from sbp.signature import Split

TINY = llama.Config(layers=2, width=16, heads=4, kv_heads=2, hidden=24, vocabulary=12, sequence=6)
# 4 devices divide the heads of keys and no other odd size.
WIDE = replace(TINY, width=32, heads=8, kv_heads=4, vocabulary=34)
KEY = jax.random.key(3)
OPTIMIZER = optax.adamw(1e-2)


def tokens(config: llama.Config, rows: int) -> np.ndarray:
    shape = rows, config.sequence + 1
    return np.random.default_rng(0).integers(0, config.vocabulary, size=shape).astype(np.int32)


@pytest.fixture(scope="module")
def params() -> llama.PyTree:
    return jax.jit(partial(llama.init, config=TINY))(KEY)


def layer_of(params: llama.PyTree, index: int) -> dict[str, np.ndarray]:
    return {name: np.asarray(stack[index], np.float64) for name, stack in params["layers"].items()}


def normalized(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5) * scale


def turned(x: np.ndarray, position: int) -> np.ndarray:
    """One head, each pair of numbers as a complex one."""
    half = len(x) // 2
    pairs = (x[:half] + 1j * x[half:]) * np.exp(1j * position / TINY.rotation ** (np.arange(half) / half))
    return np.concatenate([pairs.real, pairs.imag])


def attended(x: np.ndarray, layer: dict[str, np.ndarray]) -> np.ndarray:
    out = np.zeros_like(x)
    for b, i, h in np.ndindex(x.shape[0], x.shape[1], TINY.heads):
        k, g = divmod(h, TINY.heads // TINY.kv_heads)
        query = turned(x[b, i] @ layer["query"][:, k, g], i)
        keys = [turned(x[b, j] @ layer["key"][:, k], j) for j in range(i + 1)]
        weights = np.exp([query @ key / np.sqrt(TINY.head_width) for key in keys])
        values = [w * (x[b, j] @ layer["value"][:, k]) for j, w in enumerate(weights / weights.sum())]
        out[b, i] += sum(values) @ layer["out"][k, g]
    return out


def test_logits_are_what_loops_compute(params: llama.PyTree) -> None:
    batch = tokens(TINY, 2)
    x = np.asarray(params["embedding"], np.float64)[batch]
    for index in range(TINY.layers):
        layer = layer_of(params, index)
        x = x + attended(normalized(x, layer["attention_norm"]), layer)
        y = normalized(x, layer["mlp_norm"])
        gate = y @ layer["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["up"])) @ layer["down"]
    expected = normalized(x, np.asarray(params["norm"])) @ np.asarray(params["head"])
    np.testing.assert_allclose(llama.logits(params, batch, TINY), expected, rtol=1e-4, atol=1e-4)


def test_the_published_sizes() -> None:
    for name, billions in (("1b", 1.50), ("8b", 8.03), ("70b", 70.55)):
        shapes = jax.eval_shape(partial(llama.init, config=llama.PRESETS[name]), jax.random.key(0))
        assert sum(x.size for x in jax.tree.leaves(shapes)) / 1e9 == pytest.approx(billions, abs=0.005)


def test_heads_divide_the_width() -> None:
    with pytest.raises(ValueError, match="width of 16, 4 heads, 3 of keys and values"):
        replace(TINY, kv_heads=3)


def unstacked(params: llama.PyTree) -> llama.PyTree:
    layers = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(TINY.layers)]
    return {**params, "layers": layers}


@pytest.mark.full
@pytest.mark.parametrize("remat", [False, True])
def test_stacked_or_not_and_computed_twice_or_not_is_the_same(params: llama.PyTree, remat: bool) -> None:
    batch = tokens(TINY, 2)
    value, grads = jax.value_and_grad(llama.loss)(params, batch, None, replace(TINY, remat=False))
    one_by_one = replace(TINY, scan=False, remat=remat)
    other, theirs = jax.value_and_grad(llama.loss)(unstacked(params), batch, None, one_by_one)
    np.testing.assert_allclose(value, other, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), unstacked(grads), theirs)


@pytest.mark.full
def test_attention_by_one_op_of_jax_is_the_same(params: llama.PyTree) -> None:
    batch = tokens(TINY, 2)
    value, grads = jax.value_and_grad(llama.loss)(params, batch, None, TINY)
    other, theirs = jax.value_and_grad(llama.loss)(params, batch, None, replace(TINY, attention="xla"))
    np.testing.assert_allclose(value, other, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), grads, theirs)


@pytest.mark.full
@pytest.mark.parametrize(("choice", "shape"), [("2d", (2, 2)), ("auto", (4,))])
def test_training_with_it_equals_one_device(
    choice: str, shape: tuple[int, ...], one_device: list[float]
) -> None:
    config = replace(WIDE, attention="xla")
    in_sbp = llama.signatures(choice, shape, config, OPTIMIZER)
    step = llama.make_train_step(config, OPTIMIZER)
    program = sbp.compile(step, sbp.placement("cpu", shape=shape), in_sbp=in_sbp, donate_argnums=(0, 1))
    assert trained(program, config, 4) == pytest.approx(one_device[:4], rel=1e-5)


@pytest.mark.full
def test_a_plan_of_its_kernel_keeps_no_scores() -> None:
    """On GPUs that need not be here: attention is split by batch and by heads, and takes no s x s memory."""
    by_hand = llama.Config(4, 1024, 16, 8, 2816, 4096, 4096, compute_dtype=jnp.bfloat16)
    plans = {}
    for config in (by_hand, replace(by_hand, attention="cudnn")):
        step = llama.make_train_step(config, OPTIMIZER)
        args = train.example(
            partial(llama.init, config=config), OPTIMIZER, jax.ShapeDtypeStruct((2, 4097), jnp.int32)
        )
        in_sbp = llama.signatures("fsdp", (2, 4), config, OPTIMIZER)
        program = sbp.compile(step, sbp.placement("h100", shape=(2, 4)), in_sbp=in_sbp, donate_argnums=(0, 1))
        plans[config.attention] = program.plan(*args)
    fused = plans["cudnn"]
    ops = [s for s, _ in fused.physical.walk() if isinstance(s, Compute) and "attention" in s.node.op]
    assert len(ops) == 3  # forward, forward again, backward: of each layer
    assert all(s.strategy.operands[0] == (S(0), S(2)) for s in ops)
    scores = 4 * (16 / 4) * 4096**2  # of one row on a device, float32
    assert plans[None].memory_bytes - fused.memory_bytes > scores
    assert not any("attention" in note for note in fused.notes)


def test_bfloat16_is_used_and_stored_as_asked(params: llama.PyTree) -> None:
    mixed = replace(TINY, compute_dtype=jnp.bfloat16)
    text = str(
        jax.make_jaxpr(partial(llama.block, config=mixed))(
            jnp.zeros((1, 6, 16), jnp.bfloat16), {name: stack[0] for name, stack in params["layers"].items()}
        )
    )
    assert all("bf16" in line for line in text.splitlines() if "= dot_general" in line)
    loss = llama.loss(params, tokens(TINY, 2), None, mixed)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, llama.loss(params, tokens(TINY, 2), None, TINY), rtol=0.02)
    shapes = jax.eval_shape(partial(llama.init, config=replace(mixed, weight_dtype=jnp.bfloat16)), KEY)
    assert {x.dtype for x in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.bfloat16)}


def trained(step: Any, config: llama.Config, steps: int) -> list[float]:
    params = jax.tree.map(np.asarray, jax.jit(partial(llama.init, config=config))(KEY))
    state, losses = OPTIMIZER.init(params), []
    for _ in range(steps):
        params, state, loss = step(params, state, tokens(config, 8), KEY)
        losses.append(float(loss))
    return losses


@pytest.fixture(scope="module")
def one_device() -> list[float]:
    return trained(jax.jit(llama.make_train_step(WIDE, OPTIMIZER)), WIDE, 20)


@pytest.mark.full
def test_loss_falls(one_device: list[float]) -> None:
    assert one_device[-1] < 0.5 * one_device[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("choice", "shape", "scan"),
    [
        ("data", (4,), False),
        ("tensor", (4,), True),
        ("zero", (4,), True),
        ("2d", (2, 2), True),
        ("fsdp", (2, 2), True),
        pytest.param("zero", (4,), False, marks=pytest.mark.slow),
        pytest.param("fsdp", (2, 4), False, marks=pytest.mark.slow),
        pytest.param("auto", (4,), True, marks=pytest.mark.slow),
    ],
)
def test_training_equals_one_device(
    choice: str, shape: tuple[int, ...], scan: bool, one_device: list[float]
) -> None:
    config = replace(WIDE, scan=scan)
    step = llama.make_train_step(config, OPTIMIZER)
    in_sbp = llama.signatures(choice, shape, config, OPTIMIZER)
    program = sbp.compile(step, sbp.placement("cpu", shape=shape), in_sbp=in_sbp, donate_argnums=(0, 1))
    assert trained(program, config, 4) == pytest.approx(one_device[:4], rel=1e-5)


@pytest.mark.parametrize(
    ("choice", "shape", "query", "out", "head"),
    [
        ("data", (4,), [B], [B], [B]),
        ("tensor", (4,), [S(1)], [S(0)], [S(1)]),
        ("zero", (4,), [S(0)], [S(0)], [S(0)]),
        ("2d", (2, 2), [B, S(1)], [B, S(0)], [B, S(1)]),
        ("fsdp", (2, 2), [S(0), S(1)], [S(3), S(0)], [S(0), S(1)]),
    ],
)
def test_a_stack_lies_as_its_layers_do(
    choice: str, shape: tuple[int, ...], query: list, out: list, head: list
) -> None:
    weights, state, *_ = llama.signatures(choice, shape, replace(WIDE, scan=False), OPTIMIZER)
    assert weights["layers"][1]["query"] == query
    assert weights["layers"][1]["out"] == out
    assert weights["head"] == head
    assert state[0].mu == weights
    stacked, _, batch, _ = llama.signatures(choice, shape, WIDE, OPTIMIZER)
    one_more = {
        name: [S(s.dim + 1) if isinstance(s, Split) else s for s in nd]
        for name, nd in weights["layers"][0].items()
    }
    assert stacked["layers"] == one_more
    assert batch == ([B] if choice == "tensor" else [S(0), B] if len(shape) > 1 else [S(0)])


def test_options() -> None:
    args = llama.parser().parse_args([])
    assert (args.parallel, args.scan, args.remat, args.bf16) == ("fsdp", True, True, False)
    args = llama.parser().parse_args("--layers 3 --kv-heads 2 --no-scan --no-remat --bf16".split())
    assert (args.layers, args.kv_heads, args.scan, args.remat, args.bf16) == (3, 2, False, False, True)
    assert (args.fused, llama.parser().parse_args(["--fused", "cudnn"]).fused) == (None, "cudnn")
