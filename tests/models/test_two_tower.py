"""Two towers: their loss by hand, their steps as on one device, and what travels for them."""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import sbp
from models import two_tower
from models.two_tower import HISTORY, Market, Views, in_sbp, make_train_step, towers
from sbp import B, S
from sbp.runtime.embedding.optimizers import rowwise_adagrad
from sbp.runtime.hlo.meter import read_compiled

LINE = sbp.placement("cpu", shape=(8,))
MODEL = towers(60, 40, 8, 8)
MARKET = Market.make(60, 40, 0)
BATCH = 32


def optimizer() -> Any:
    """Whose steps do not grow without bound where a gradient is nearly zero."""
    each = {"tables": sbp.rows(rowwise_adagrad(0.1)), "dense": optax.sgd(0.1)}
    return optax.multi_transform(each, {"tables": "tables", "dense": "dense"})


def doubled(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64) if x.dtype == np.float32 else np.asarray(x), tree)


def test_the_loss_is_that_of_the_formula() -> None:
    """Item by item: an item that others took too is no negative, and frequent ones count less."""
    params, batch = jax.jit(MODEL.init)(jax.random.key(0)), MARKET.batch(BATCH, 0)
    assert len({*batch.item.tolist()}) < BATCH
    users, items = (np.asarray(x, np.float64) for x in jax.jit(MODEL.vectors)(params, batch))
    np.testing.assert_allclose(np.linalg.norm(users, axis=1), 1, rtol=1e-5)
    total = 0.0
    for i in range(BATCH):
        others = [j for j in range(BATCH) if j == i or batch.item[j] != batch.item[i]]
        score = {j: users[i] @ items[j] / two_tower.TEMPERATURE - batch.log_q[j] for j in others}
        total += math.log(sum(map(math.exp, score.values()))) - score[i]
    assert float(jax.jit(MODEL.loss)(params, batch)) == pytest.approx(total / BATCH, rel=1e-5)


def test_a_market_repeats_and_keeps_to_its_shares() -> None:
    one, again = (Market.make(60, 40, 3).batch(4000, 7) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert one.history.shape == (4000, HISTORY) and one.item.max() < 40
    found = np.bincount(one.item, minlength=40) / 4000
    assert (
        np.abs(found - np.exp(np.bincount(one.item, one.log_q, 40) / np.maximum(4000 * found, 1))).max()
        < 0.04
    )


@pytest.mark.usefixtures("x64")
def test_steps_and_retrieval_are_those_of_one_device() -> None:
    tx = optimizer()
    step = make_train_step(MODEL, tx)
    params = doubled(jax.jit(MODEL.init)(jax.random.key(0)))
    one = many = params, tx.init(params)
    program = sbp.compile(step, LINE, in_sbp=in_sbp(MODEL, LINE, tx))
    alone = jax.jit(step)
    for i in range(4):
        batch = MARKET.batch(BATCH, i)
        *one, loss = alone(*one, batch)
        *many, other = program(*many, batch)
        assert float(other) == pytest.approx(float(loss), rel=1e-12)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11), many, one)
    corpus = MODEL.items(one[0])
    retrieve = sbp.compile(
        lambda params, corpus, batch: MODEL.retrieve(params, corpus, batch, 5),
        LINE,
        in_sbp=(B, [S(0)], [B]),
    )
    scores, found = retrieve(one[0], corpus, batch)
    users, _ = MODEL.vectors(one[0], batch)
    every = np.asarray(users @ corpus.T)
    np.testing.assert_array_equal(found, np.argsort(-every, axis=1, kind="stable")[:, :5])
    np.testing.assert_allclose(scores, np.take_along_axis(every, np.asarray(found), 1))


def test_no_more_travels_than_by_hand() -> None:
    """Vectors of items gathered, their gradients scattered, weights reduced, rows exchanged: nothing else."""
    model, tx, batch = towers(6000, 4000, 32, 8), optimizer(), 512
    params = jax.eval_shape(model.init, jax.random.key(0))
    drawn = Market.make(6000, 4000, 0).batch(batch, 0)
    shapes: Views = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), drawn)
    args = params, jax.eval_shape(tx.init, params), shapes
    program = sbp.compile(make_train_step(model, tx), LINE, in_sbp=in_sbp(model, LINE, tx))
    plan = program.plan(*args)
    sent = read_compiled(program.lower(*args).compile())
    assert sent.wire_bytes == pytest.approx(plan.wire_bytes, rel=1e-6)
    # An exchange has room for a quarter more than an even share of the ids.
    exchange = 7 / 8 * 1.25 * batch // 8 * (HISTORY + 2) * (4 + 2 * 4 * 32)
    weights = sum(x.size for x in jax.tree.leaves(params["dense"]))
    others = 7 / 8 * 4 * (batch * (2 * model.width + 2) + 2 * weights)
    assert sent.wire_bytes <= 1.1 * (exchange + others)


@pytest.mark.full
def test_the_command_learns_to_retrieve(tmp_path: Path) -> None:
    small = "--users 800 --items 1000 --width 8 --batch 256 --steps 80 --k 20 --lr 0.03".split()
    result = two_tower.main([*small, "--out", str(tmp_path)])
    assert result.difference is not None and result.difference.losses < 0.05
    assert result.losses[-1] < result.losses[0] - 0.5
    assert result.recall > 1.25 * result.popular
