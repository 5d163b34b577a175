"""The MLP on one device, its data, and its table of signatures."""

import sys

import jax
import numpy as np
import optax
import pytest

from models import mlp, parallel
from sbp import B, S


def test_digits_have_the_shape_of_digits() -> None:
    for data in (mlp.digits(), mlp.synthetic_digits()):
        assert data.images.shape == (1797, mlp.PIXELS)
        assert data.images.min() >= 0
        assert data.images.max() <= 1
        assert set(data.labels) == set(range(mlp.DIGITS))


def test_without_scikit_learn_the_digits_are_called_synthetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert mlp.digits().name == "synthetic digits"


def test_batches_repeat_with_their_seed() -> None:
    data = mlp.synthetic_digits(count=50)
    images, labels = data.batch(8, (1, 2))
    again, _ = data.batch(8, (1, 2))
    other, _ = data.batch(8, (1, 3))
    assert (images.shape, labels.shape) == ((8, 64), (8,))
    np.testing.assert_array_equal(images, again)
    assert (images != other).any()


@pytest.mark.full
def test_loss_falls_on_one_device() -> None:
    optimizer, data = optax.adam(3e-3), mlp.synthetic_digits()
    step = jax.jit(mlp.make_train_step(optimizer))
    params = mlp.init(jax.random.key(0), width=32, layers=3)
    state, losses = optimizer.init(params), []
    for index in range(40):
        params, state, loss = step(params, state, data.batch(64, (0, index)), jax.random.key(0))
        losses.append(float(loss))
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize(
    ("layers", "expected"), [(2, [S(1), S(0)]), (3, [S(1), S(0), B]), (4, [S(1), S(0), S(1), S(0)])]
)
def test_weights_are_split_in_pairs(layers: int, expected: list) -> None:
    params = mlp.init(jax.random.key(0), width=8, layers=layers)
    weights, *_ = parallel.signatures("tensor", (4,), mlp.table(layers), params, optax.adam(1e-3))
    assert [layer["weight"] for layer in weights] == [[s] for s in expected]


def test_options() -> None:
    args = mlp.parser().parse_args("--layers 3 --width 16 --placement cpu:8 --parallel data".split())
    assert (args.layers, args.width, args.placement, args.parallel) == (3, 16, "cpu:8", "data")
