"""Tables that take a step with the mean of several batches: as `optax.MultiSteps`, without its table."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp import S
from sbp.errors import EmbeddingError
from sbp.runtime import embedding as em
from tests.passes.rows.test_tables import DEAR, updates

EVERY, BATCH, WIDTH = 3, 32, 8
LINE = sbp.placement("cpu", shape=(8,))
WEIGHT = np.random.default_rng(0).normal(size=WIDTH)


def collection(layout: Any) -> em.Collection:
    """Bags of a table that two features share, and another table."""
    first, second = (
        em.TableConfig(f"t{n}", n, WIDTH, dtype=jnp.float64, placement=layout) for n in (512, 256)
    )
    features = (
        em.FeatureConfig("a", first, (None, 3)),
        em.FeatureConfig("b", second),
        em.FeatureConfig("c", first),
    )
    return em.Collection(features)


def batch(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"a": (BATCH, 3), "b": (BATCH,), "c": (BATCH,)}
    return {name: rng.integers(-1, 256, shape).astype(np.int32) for name, shape in shapes.items()}


def loss(vectors: Any) -> Any:
    return jnp.square(jnp.tanh(sum(vectors.values())) @ WEIGHT - 1).mean()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("layout", [em.RowWise(), em.TableWise(8)], ids=["rows", "groups"])
def test_the_same_as_multi_steps(layout: Any) -> None:
    """On one device and on eight; the compiled step makes nothing of the size of a table."""
    tables, lazy = collection(layout), sbp.rows(optax.adam(0.05, eps=1e-3))
    held, plain = (
        em.accumulate(tables, lazy, EVERY),
        optax.MultiSteps(lazy, EVERY, accumulator_dtype=jnp.float64),
    )

    def flat(stacks: Any) -> Any:
        return {n: x.reshape(-1, WIDTH) for n, x in stacks.items()}

    @jax.jit
    def dense(params: Any, state: Any, ids: Any) -> Any:
        grads = jax.grad(lambda p: loss(tables(p, ids)))(params)
        added, state = plain.update(flat(grads), state, flat(params))
        return {n: x + added[n].reshape(x.shape) for n, x in params.items()}, state

    def step(params: Any, state: Any, ids: Any) -> Any:
        return held.update(params, state, ids, jax.grad(loss)(tables(params, ids)))

    begin = jax.tree.map(np.asarray, tables.init(jax.random.key(0)))
    first = jax.tree.map(np.asarray, held.init(begin, batch(0)))
    program = sbp.compile(
        step,
        LINE,
        in_sbp=(tables.in_sbp(LINE), held.in_sbp(LINE, first), [S(0)]),
        options=sbp.Options(hardware=DEAR, check=True),
    )
    wanted, one, many = (begin, plain.init(flat(begin))), (begin, first), (begin, first)
    for seed in range(2 * EVERY + 1):
        wanted, one = dense(*wanted, batch(seed)), jax.jit(step)(*one, batch(seed))
        many = jax.block_until_ready(program(*many, batch(seed)))
        for a, b, c in zip(*(jax.tree.leaves(x[0]) for x in (wanted, one, many)), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(c, a, rtol=1e-9, atol=1e-12)
    assert int(many[1].batches) == 1
    if isinstance(layout, em.RowWise):
        assert len(updates(program.plan(*many, batch(0)))) == 1


@pytest.mark.usefixtures("x64")
def test_what_cannot_be_held() -> None:
    tables = collection(em.RowWise())
    with pytest.raises(EmbeddingError, match=r"every=0\n.*1 or more"):
        em.accumulate(tables, sbp.rows(optax.sgd(0.1)), 0)
    ragged = batch(0) | {"a": em.Bags.from_lists([[1], [2, 3]])}
    with pytest.raises(EmbeddingError, match=r"feature 'a'\n.*ragged bags\n.*PaddedBags"):
        em.accumulate(tables, sbp.rows(optax.sgd(0.1)), 2).init(tables.init(jax.random.key(0)), ragged)
