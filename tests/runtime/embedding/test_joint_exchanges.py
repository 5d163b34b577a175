"""Tables of several widths share one exchange: three all-to-alls a step, and the numbers of one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp import S
from sbp.communication.legs import default_capacity
from sbp.options import ExchangeOptions
from sbp.runtime.hlo.meter import read_compiled
from tests.passes.rows.test_tables import DEAR

HASTY: dict[str, Any] = {"xla_backend_optimization_level": 0}
WIDTHS, ROWS, BATCH, DEVICES = (4, 8, 12, 16), 2048, 512, 8
TX = sbp.rows(optax.adam(0.01, eps=1e-3))


def step(params: Any, state: Any, ids: Any) -> Any:
    def loss(params: Any) -> Any:
        found = [table.at[i].get(mode="fill", fill_value=0) for table, i in zip(params, ids, strict=True)]
        return jnp.square(jnp.concatenate([jnp.tanh(x) for x in found], axis=-1).sum(-1) - 1).mean()

    value, grads = jax.value_and_grad(loss)(params)
    added, state = TX.update(grads, state, params)
    return optax.apply_updates(params, added), state, value


def batch(kind: str, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    draw = {
        "uniform": lambda: rng.integers(0, ROWS, BATCH),
        "skewed": lambda: np.minimum(rng.zipf(1.1, BATCH), ROWS) - 1,
        "equal": lambda: np.full(BATCH, rng.integers(ROWS)),
    }
    return [draw[kind]().astype(np.int32) for _ in WIDTHS]


@pytest.mark.parametrize("shape", [(8,), pytest.param((2, 4), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("capacity", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_one_exchange_for_four_widths(shape: tuple[int, ...], capacity: int | None) -> None:
    split = [S(0)] * len(shape)
    program = sbp.compile(
        step,
        sbp.placement("cpu", shape=shape),
        in_sbp=(split, sbp.AUTO, split),
        options=sbp.Options(hardware=DEAR, exchange=ExchangeOptions(capacity=capacity)),
    )
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(ROWS, w)).astype(np.float32) for w in WIDTHS]
    begin = jax.tree.map(np.asarray, (params, TX.init(params)))
    args = *begin, batch("uniform", 0)
    executable = program.lower(*args).compile(HASTY)

    meter = read_compiled(executable)
    sent = [c.kind for c in meter.collectives]
    legs = len(shape)
    assert sent.count("all_to_all") == 3 * legs
    assert meter.wire_bytes == pytest.approx(program.plan(*args).wire_bytes, rel=1e-9)
    if legs == 1:
        each = capacity or default_capacity(BATCH // DEVICES, DEVICES)
        ideal = sum((DEVICES - 1) * each * (4 + 2 * 4 * w) for w in WIDTHS)
        assert meter.wire_bytes <= 1.1 * ideal

    one = many = begin
    reference = jax.jit(step, compiler_options=HASTY)
    for kind in ("uniform", "skewed", "equal"):
        ids = batch(kind, 1)
        *one, _ = reference(*one, ids)
        given = jax.tree.leaves(program.place(*many, ids))
        *many, _ = jax.tree.unflatten(jax.tree.structure((*begin, 0)), executable(*given))
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
            np.testing.assert_allclose(b, a, rtol=0, atol=1e-5 * max(1.0, np.abs(a).max()), err_msg=kind)
