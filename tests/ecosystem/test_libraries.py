"""Models of flax and equinox, mixed precision, checkpoints, keys: the user's loop, one line changed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp.signature import AUTO, B, S

PLACEMENT = sbp.placement("cpu", shape=(2, 4))
OPTIMIZER = optax.adamw(1e-2)
X = np.random.default_rng(0).normal(size=(16, 12)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 10, 16).astype(np.int32)


def train(step: Any, state: Any, steps: int = 10) -> tuple[Any, list[float]]:
    losses = []
    for _ in range(steps):
        *state, loss = step(*state, X, Y)
        losses.append(float(loss))
    return state, losses


def compare(step: Any, state: Any, in_sbp: Any = AUTO) -> None:
    """The same loop through `jax.jit` and through us: losses in float32, parameters in float64."""
    program = sbp.compile(step, PLACEMENT, in_sbp=in_sbp, options=sbp.Options(check=True))
    _, expected = train(jax.jit(step), state)
    _, losses = train(program, state)
    assert losses == pytest.approx(expected, rel=1e-5)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, state)
        one, _ = train(jax.jit(step), wide)
        got, _ = train(program, wide)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(one), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@pytest.mark.full
def test_flax_linen() -> None:
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):  # type: ignore[name-defined, misc]
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.LayerNorm()(linen.relu(linen.Dense(32)(x)))
            return linen.Dense(10)(x)

    net = Net()
    params = net.init(jax.random.key(0), X)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(net.apply(p, x), y))(params)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    compare(step, (params, OPTIMIZER.init(params)), (AUTO, AUTO, [S(0), S(0)], [S(0), S(0)]))


def test_flax_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):  # type: ignore[name-defined, misc]
        def __init__(self, rngs: Any) -> None:
            self.up = nnx.Linear(12, 32, rngs=rngs)
            self.norm = nnx.LayerNorm(32, rngs=rngs)
            self.down = nnx.Linear(32, 10, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.down(self.norm(nnx.relu(self.up(x))))

    graph, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(nnx.merge(graph, p)(x), y))(params)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    compare(step, (params, OPTIMIZER.init(params)))


@pytest.mark.full
def test_equinox() -> None:
    eqx = pytest.importorskip("equinox")
    net = eqx.nn.MLP(12, 10, 32, 2, key=jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_array)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(jax.vmap(eqx.combine(p, static))(x), y))(
            params
        )
        updates, state = OPTIMIZER.update(grads, state, params)
        return eqx.apply_updates(params, updates), state, loss

    compare(step, (params, OPTIMIZER.init(params)))


def test_loops_of_equinox_are_seen_through() -> None:
    """A checkpointed loop, as diffrax solves with: of rows that are split only gradients are sent."""
    loops = pytest.importorskip("equinox.internal")

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            def trip(carry: Any) -> Any:
                at, y = carry
                return at + 1, y + 0.1 * jnp.tanh(y @ params)

            return jnp.square(
                loops.while_loop(
                    lambda c: c[0] < 5, trip, (jnp.array(0), x), max_steps=8, kind="checkpointed"
                )[1]
            ).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        return params - gradient, value

    params = np.random.default_rng(4).normal(size=(12, 12)).astype(np.float32)
    program = sbp.compile(step, PLACEMENT, in_sbp=([B, B], [S(0), S(0)]), out_sbp=[B, B])
    for got, expected in zip(program(params, X), jax.jit(step)(params, X), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    sent = {c.kind for c in program.plan(params, X).collectives}
    assert sent == {"all_reduce"}


PARAMS = {
    "w1": np.random.default_rng(2).normal(size=(12, 32)).astype(np.float32) * 0.3,
    "w2": np.random.default_rng(3).normal(size=(32, 10)).astype(np.float32) * 0.3,
}


def plain(params: Any, x: Any) -> Any:
    return jax.nn.gelu(x @ params["w1"]) @ params["w2"]


def sgd(loss: Any) -> Any:
    def step(params: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def test_mixed_precision_with_loss_scaling() -> None:
    """bfloat16 compute, float32 parameters, a scaled loss: as exact as bfloat16 allows."""

    def loss(params: Any, x: Any, y: Any) -> Any:
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        return 1024.0 * cross_entropy(plain(half, x.astype(jnp.bfloat16)).astype(jnp.float32), y)

    def step(params: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 / 1024.0 * g, params, grads), value / 1024.0

    _, expected = train(jax.jit(step), (PARAMS,))
    program = sbp.compile(step, PLACEMENT, in_sbp=(AUTO, [S(0), S(0)], [S(0), S(0)]))
    (params,), losses = train(program, (PARAMS,))
    assert losses == pytest.approx(expected, rel=2e-2)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))


def test_checkpointed_block_stays_rematerialised() -> None:
    """The recomputation survives: matrix products of the block run again in the backward."""

    def loss(params: Any, x: Any, y: Any) -> Any:
        return cross_entropy(jax.checkpoint(plain)(params, x), y)

    compare(sgd(loss), (PARAMS,))
    program = sbp.compile(sgd(loss), PLACEMENT, in_sbp=(AUTO, [S(0), S(0)], [S(0), S(0)]))
    without = sbp.compile(
        sgd(lambda p, x, y: cross_entropy(plain(p, x), y)),
        PLACEMENT,
        in_sbp=(AUTO, [S(0), S(0)], [S(0), S(0)]),
    )
    texts = [f.lower(PARAMS, X, Y).compile().as_text() for f in (program, without)]
    tanhs = [t.count(" tanh(") for t in texts]
    assert tanhs[0] > tanhs[1] >= 1


@pytest.mark.parametrize(
    "key",
    (lambda: jax.random.key(3), lambda: jax.random.key(3, impl="rbg"), lambda: jax.random.PRNGKey(3)),
    ids=("threefry", "rbg", "raw"),
)
def test_dropout_with_keys_of_every_kind(key: Any) -> None:
    """Random numbers do not depend on the placement, with typed and with raw keys."""

    def f(x: Any, key: Any) -> Any:
        mask = jax.random.bernoulli(key, 0.7, x.shape)
        return jnp.where(mask, x / 0.7, 0), jax.random.normal(jax.random.fold_in(key, 1), (7, 5))

    program = sbp.compile(f, PLACEMENT, in_sbp=([S(0), S(1)], AUTO))
    for a, b in zip(program(X, key()), jax.jit(f)(X, key()), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
