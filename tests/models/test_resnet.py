"""The residual network: its shapes, its averages, and training split by batch and by rows of images."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from models import resnet
from models.resnet import Config

LINE = sbp.placement("cpu", shape=(8,))
SMALL = Config((1, 1), width=4)
OPTIMIZER = optax.sgd(0.05, momentum=0.9)


def batch(seed: int, size: int = 32) -> Any:
    """Eight images with labels."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(8, size, size, 3)).astype(np.float32), rng.integers(0, 10, 8).astype(np.int32)


@pytest.mark.parametrize(("depth", "convolutions"), [(18, 20), (34, 36), (50, 53)])
def test_depths_are_the_published_ones(depth: int, convolutions: int) -> None:
    params = jax.eval_shape(partial(resnet.init, config=resnet.DEPTHS[depth]), jax.random.key(0))
    kernels = [x for path, x in jax.tree_util.tree_flatten_with_path(params)[0] if "kernel" in str(path[-1])]
    # With the convolutions on the skips where channels change: three in 18 and 34 layers, four in 50.
    assert len(kernels) == convolutions
    images = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)
    assert jax.eval_shape(resnet.logits, params, images).shape == (2, 10)


@pytest.mark.full
@pytest.mark.parametrize("choice", ["data", "spatial"])
def test_training_equals_one_device(choice: str) -> None:
    step = resnet.make_train_step(OPTIMIZER)
    in_sbp = resnet.signatures(choice, (8,), SMALL, OPTIMIZER)
    program = sbp.compile(step, LINE, in_sbp=in_sbp)
    params = jax.tree.map(np.asarray, resnet.init(jax.random.key(0), SMALL))
    one = many = (params, OPTIMIZER.init(params))
    plain = jax.jit(step)
    for seed in range(2):
        *one, loss = plain(*one, batch(seed), jax.random.key(0))
        *many, same = program(*many, batch(seed), jax.random.key(0))
        np.testing.assert_allclose(loss, same, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_averages_follow_the_batches_and_are_not_learned() -> None:
    step = resnet.make_train_step(OPTIMIZER)
    params = resnet.init(jax.random.key(0), SMALL)
    after, state, _ = jax.jit(step)(params, OPTIMIZER.init(params), batch(0), jax.random.key(0))
    stem = resnet._Pass(training=True).conv(params["stem"], batch(0)[0], 2)[1]
    np.testing.assert_allclose(after["stem"]["mean"], stem["mean"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(after["stem"]["variance"], stem["variance"], rtol=1e-4, atol=1e-6)
    assert not np.any(state[0].trace["stem"]["mean"])


def test_digits_are_enlarged() -> None:
    small = np.arange(64, dtype=np.float32)[None]
    large = resnet.enlarge(small, 32)
    assert large.shape == (1, 32, 32, 3)
    np.testing.assert_array_equal(large[0, ::4, ::4, 0].ravel(), small[0])
