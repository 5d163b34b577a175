"""The classifier of many classes on one device, its data, and its table of signatures."""

import jax
import numpy as np
import optax
import pytest

from models import classifier, parallel
from sbp import B, S


def test_identities_are_few_frequent_and_many_rare() -> None:
    data = classifier.Identities(classes=1000, inputs=4)
    inputs, labels = data.batch(2000, (0, 1))
    assert (inputs.shape, inputs.dtype, labels.dtype) == ((2000, 4), np.float32, np.int32)
    assert labels.min() >= 0
    assert labels.max() < 1000
    counts = np.sort(np.bincount(labels, minlength=1000))[::-1]
    expected = 2000 * np.diff(data.cumulative, prepend=0)
    np.testing.assert_allclose(counts[:2], expected[:2], rtol=0.2)
    assert (counts == 0).sum() > 200


def test_an_identity_looks_alike_each_time() -> None:
    inputs, labels = classifier.Identities(classes=50, inputs=16).batch(400, (0, 1))
    often = np.bincount(labels).argmax()
    same, other = inputs[labels == often], inputs[labels != often]
    assert same.std(axis=0).max() < 0.5 < other.std(axis=0).min()


def test_batches_repeat_with_their_seed() -> None:
    data = classifier.Identities(classes=50, inputs=4)
    for one, two in zip(data.batch(8, (0, 1)), data.batch(8, (0, 1)), strict=True):
        np.testing.assert_array_equal(one, two)
    assert (data.batch(8, (0, 1))[0] != data.batch(8, (0, 2))[0]).any()


def test_loss_is_the_mean_surprise() -> None:
    params = classifier.init(jax.random.key(0), inputs=4, width=6, classes=13)
    inputs, labels = classifier.Identities(classes=13, inputs=4).batch(5, (0,))
    hidden, features, head = (np.asarray(params[name]) for name in ("hidden", "features", "head"))
    scores = np.exp(np.maximum(inputs @ hidden, 0) @ features @ head.T)
    expected = -np.mean([np.log(row[label] / row.sum()) for row, label in zip(scores, labels, strict=True)])
    np.testing.assert_allclose(classifier.loss(params, (inputs, labels)), expected, rtol=1e-5)


@pytest.mark.full
def test_loss_falls_on_one_device() -> None:
    optimizer, data = optax.sgd(0.05, momentum=0.9), classifier.Identities(classes=300, inputs=16)
    step = jax.jit(classifier.make_train_step(optimizer))
    params = classifier.init(jax.random.key(0), inputs=16, width=32, classes=300)
    state, losses = optimizer.init(params), []
    for index in range(60):
        params, state, loss = step(params, state, data.batch(64, (0, index)), jax.random.key(0))
        losses.append(float(loss))
    assert np.mean(losses[-10:]) < 0.6 * losses[0]


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_batch_and_classes_are_split_over_the_same_devices(shape: tuple[int, ...]) -> None:
    params = classifier.init(jax.random.key(0), inputs=4, width=6, classes=13)
    weights, state, batch, _ = parallel.signatures(
        "classes", shape, classifier.TABLE, params, optax.sgd(0.1, momentum=0.9)
    )
    split, whole = [S(0)] * len(shape), [B] * len(shape)
    assert weights == {"hidden": whole, "features": whole, "head": split}
    assert state[0].trace == weights
    assert batch == split


def test_options() -> None:
    args = classifier.parser().parse_args(["--classes", "1000000"])
    assert (args.classes, args.placement, args.parallel) == (1_000_000, "cpu:8", "classes")
