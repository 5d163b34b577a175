"""Any signature gives the same numbers: every parallel choice of every model against one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from models import classifier, gpt, parallel
from sbp.signature import S, Split

STEPS = 30
# A vocabulary that nothing divides; heads that 8 devices divide.
CONFIG = gpt.Config(layers=1, width=32, heads=8, vocabulary=257, sequence=16, dropout=0.1)
CHOICES = ("data:8", "tensor:8", "2d:2x4", "zero:8", "zero:2x4", "auto:8", "auto:2x2x2")
# In float64 these say little more than 2-D does, and take a minute together.
SINGLE = ("data", "tensor", "zero", "auto")
OPTIMIZER = optax.adamw(1e-3)


def placement_of(row: str) -> tuple[str, sbp.Placement]:
    choice, _, shape = row.partition(":")
    return choice, sbp.placement("cpu", shape=tuple(map(int, shape.split("x"))))


def gpt_state(dtype: Any) -> tuple[Any, Any]:
    params = jax.tree.map(lambda x: x.astype(dtype), gpt.init(jax.random.key(0), CONFIG))
    return params, OPTIMIZER.init(params)


def tokens(step: int) -> np.ndarray[Any, Any]:
    return (
        np.random.default_rng(step).integers(0, CONFIG.vocabulary, (8, CONFIG.sequence + 1)).astype(np.int32)
    )


def train(step: Any, state: tuple[Any, Any]) -> tuple[Any, Any, list[float]]:
    params, opt_state = state
    losses = []
    for i in range(STEPS):
        params, opt_state, loss = step(params, opt_state, tokens(i), jax.random.key(i))
        losses.append(float(loss))
    return params, opt_state, losses


def largest(a: Any, b: Any) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs)


@pytest.fixture(scope="module")
def one_device() -> Any:
    return jax.jit(gpt.make_train_step(CONFIG, OPTIMIZER))


@pytest.mark.some("auto:8")
@pytest.mark.parametrize("row", CHOICES)
def test_gpt_float32(row: str, one_device: Any) -> None:
    """Losses within 1e-5 of one device over 30 steps with dropout, and state comes back as it came."""
    choice, placement = placement_of(row)
    in_sbp = gpt.signatures(choice, placement.shape, CONFIG, OPTIMIZER)
    program = sbp.compile(
        gpt.make_train_step(CONFIG, OPTIMIZER), placement, in_sbp=in_sbp, options=sbp.Options(check=True)
    )
    params, opt_state, losses = train(program, gpt_state(jnp.float32))
    _, _, expected = train(one_device, gpt_state(jnp.float32))
    assert losses == pytest.approx(expected, rel=1e-5)
    plan = program.plan(params, opt_state, tokens(0), jax.random.key(0))
    n = len(jax.tree.leaves((params, opt_state)))
    assert plan.out_sbp[:n] == plan.in_sbp[:n]
    assert plan.gap == 0.0
    for leaf, nd in zip(jax.tree.leaves((params, opt_state)), plan.out_sbp[:n], strict=True):
        local = leaf.addressable_shards[0].data.shape
        assert local == sbp_local(leaf.shape, nd, placement.shape)


def sbp_local(shape: Any, nd: Any, hierarchy: Any) -> tuple[int, ...]:
    """The shape of an even shard, computed plainly."""
    out = list(shape)
    for s, g in zip(nd, hierarchy, strict=True):
        if isinstance(s, Split):
            out[s.dim] //= g
    return tuple(out)


@pytest.mark.full
@pytest.mark.parametrize("row", ("2d:2x4", *(pytest.param(f"{c}:8", marks=pytest.mark.slow) for c in SINGLE)))
def test_gpt_x64(row: str, x64: None) -> None:
    """Parameters within 1e-9 of one device after 30 steps in float64, which separates bugs from rounding."""
    choice, placement = placement_of(row)
    in_sbp = gpt.signatures(choice, placement.shape, CONFIG, OPTIMIZER)
    step = gpt.make_train_step(CONFIG, OPTIMIZER)
    program = sbp.compile(step, placement, in_sbp=in_sbp, donate_argnums=(0, 1))
    params, opt_state, losses = train(program, gpt_state(jnp.float64))
    other, other_state, expected = train(jax.jit(step), gpt_state(jnp.float64))
    assert losses == pytest.approx(expected, rel=1e-12)
    assert largest(params, other) < 1e-9
    assert largest(opt_state, other_state) < 1e-9


@pytest.mark.full
def test_splits_are_real() -> None:
    """A device holds an eighth of each split weight; under ZeRO an eighth of weights and state."""
    config = gpt.Config(layers=1, width=32, heads=8, vocabulary=256, sequence=16, dropout=0.1)
    params = gpt.init(jax.random.key(0), config)
    for choice, names in (("tensor", ("qkv", "out", "up", "down")), ("zero", ("qkv", "out", "up", "down"))):
        placement = sbp.placement("cpu", shape=(8,))
        in_sbp = gpt.signatures(choice, (8,), config, OPTIMIZER)
        program = sbp.compile(gpt.make_train_step(config, OPTIMIZER), placement, in_sbp=in_sbp)
        new, state, _ = program(params, OPTIMIZER.init(params), tokens(0) % 256, jax.random.key(0))
        for tree in (new, state[0].mu, state[0].nu):
            for name in names:
                leaf = tree["layers"][0][name]
                assert leaf.addressable_shards[0].data.size * 8 == leaf.size, (choice, name)
            assert tree["embedding"].addressable_shards[0].data.size * 8 == tree["embedding"].size


def test_activations_are_split() -> None:
    """Under data parallelism no device computes an activation of the whole batch."""
    placement = sbp.placement("cpu", shape=(8,))
    in_sbp = gpt.signatures("data", (8,), CONFIG, OPTIMIZER)
    program = sbp.compile(gpt.make_train_step(CONFIG, OPTIMIZER), placement, in_sbp=in_sbp)
    params, state = jax.eval_shape(lambda: gpt_state(jnp.float32))
    batch = jax.ShapeDtypeStruct((24, CONFIG.sequence + 1), jnp.int32)
    plan = program.plan(params, state, batch, jax.random.key(0))
    assert plan.physical is not None
    steps = [s for s in plan.physical.steps if hasattr(s, "strategy") and s.node.op == "dot_general"]
    forward = [s for s in steps if plan.physical.graph.values[s.node.outputs[0]].shape[:1] == (24,)]
    assert forward
    assert all(s.strategy.results[0] == (S(0),) for s in forward)


def test_classifier_sends_nothing_of_the_size_of_the_logits() -> None:
    """The softmax over split classes has all-reduces of the size of the batch, and no other collective."""
    batch, classes, optimizer = 64, 100_000, optax.sgd(0.05, momentum=0.9)
    begin = partial(classifier.init, inputs=32, width=64, classes=classes)
    params = jax.eval_shape(begin, jax.random.key(0))
    in_sbp = parallel.signatures("classes", (8,), classifier.TABLE, params, optimizer)
    step = classifier.make_train_step(optimizer)
    program = sbp.compile(step, sbp.placement("cpu", shape=(8,)), in_sbp=in_sbp)
    data = jax.ShapeDtypeStruct((batch, 32), jnp.float32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    args = params, jax.eval_shape(optimizer.init, params), data, key
    plan = program.plan(*args)
    largest_tensor = max(int(np.prod(c.shape)) for c in plan.collectives)
    assert largest_tensor <= batch * 64 < batch * classes / 100
    softmax = [c for c in plan.collectives if c.before[0] != S(0) and int(np.prod(c.shape)) <= batch]
    assert softmax and {c.kind for c in softmax} == {"all_reduce"}
    from sbp.runtime.hlo.meter import read_compiled

    meter = read_compiled(program.lower(*args).compile())
    assert meter.wire_bytes == pytest.approx(plan.wire_bytes, rel=0.01)
    assert max(c.payload_bytes for c in meter.collectives) < batch * classes / 8


@pytest.mark.parametrize("classes", (1000, 1003))
def test_classifier_equals_one_device(classes: int) -> None:
    """Also with a number of classes that the devices do not divide."""
    optimizer = optax.sgd(0.05, momentum=0.9)
    params = classifier.init(jax.random.key(0), 16, 8, classes)
    in_sbp = parallel.signatures("classes", (8,), classifier.TABLE, params, optimizer)
    step = classifier.make_train_step(optimizer)
    program = sbp.compile(step, sbp.placement("cpu", shape=(8,)), in_sbp=in_sbp)
    data = classifier.Identities(classes, 16).batch(16, (1,))
    state = params, optimizer.init(params)
    got, expected = state, state
    for _ in range(5):
        *got, loss = program(*got, data, jax.random.key(0))
        *expected, one = jax.jit(step)(*expected, data, jax.random.key(0))
        assert float(loss) == pytest.approx(float(one), rel=1e-5)
    assert largest(got, expected) < 1e-5
